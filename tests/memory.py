"""What tests of leaks measure by."""

from __future__ import annotations

import gc
import os
import resource


def resident_kib() -> int:
    """Memory of the process that is in RAM, garbage collected."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


def room_kib(kib: int) -> int:
    """How much more memory is no leak: at least 4 MiB under AddressSanitizer, which holds back what is let go."""
    return max(kib, 4096) if "libasan" in os.environ.get("LD_PRELOAD", "") else kib
