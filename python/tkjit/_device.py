"""What planners may know of a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import _core, _emulator, _nvrtc

if TYPE_CHECKING:
    from ._plan import Spec


@dataclass(frozen=True)
class Device:
    """A GPU, as far as the choice of tiles depends on it.

    Attributes:
        arch: Exact architecture, such as ``sm_90a``.
        cc: Compute capability.
        sms: Multiprocessors.
        smem_block: Most shared memory of a block, in bytes.
        smem_sm: Shared memory of a multiprocessor, in bytes.
        l2: L2 cache, in bytes.
        threads_sm: Most threads of a multiprocessor.
        emulated: Its kernels run on the CPU.
    """

    arch: str
    cc: tuple[int, int]
    sms: int
    smem_block: int
    smem_sm: int
    l2: int
    threads_sm: int
    emulated: bool = False

    @property
    def bulk_copy(self) -> bool:
        """Bulk copies with mbarriers, clusters and distributed shared memory."""
        return self.cc >= (9, 0)

    @property
    def max_cluster(self) -> int:
        """Most blocks of a cluster.

        Above 8 is what CUDA calls non-portable: sm_12x does not have it, and 16 blocks of a multiprocessor each want as many in
        one GPC, which only GPUs with nearly all of theirs have.
        """
        if not self.bulk_copy:
            return 1
        return 16 if self.cc[0] in (9, 10) and self.sms >= 132 else 8

    @staticmethod
    def of(index: int) -> Device:
        """The GPU with torch's index; of -1, the CPU's, the one that the emulator stands for."""
        return Device._of(index) if index >= 0 else replace(Device.of_arch(_emulator.arch()), emulated=True)

    @staticmethod
    @functools.cache
    def _of(index: int) -> Device:
        info = _core.device_info(index)
        cc = info["cc"]
        return Device(
            _nvrtc.arch_of(cc),
            cc,
            info["sms"],
            info["smem_block"],
            info["smem_sm"],
            info["l2_bytes"],
            info["max_threads_sm"],
        )

    @staticmethod
    def of_arch(arch: str) -> Device:
        """A typical GPU of an architecture, where there is none to ask."""
        if arch not in _TYPICAL:
            raise ValueError(f"{arch} is none of the architectures {', '.join(_TYPICAL)}")
        return _TYPICAL[arch]


# The CUDA programming guide's table of compute capabilities; multiprocessors and L2 of T4, A100, A10, L4, H200, B200, RTX 5090.
_TYPICAL = {
    "sm_75": Device("sm_75", (7, 5), 40, 65536, 65536, 4 << 20, 1024),
    "sm_80": Device("sm_80", (8, 0), 108, 166912, 167936, 40 << 20, 2048),
    "sm_86": Device("sm_86", (8, 6), 72, 101376, 102400, 6 << 20, 1536),
    "sm_89": Device("sm_89", (8, 9), 58, 101376, 102400, 48 << 20, 1536),
    "sm_90a": Device("sm_90a", (9, 0), 132, 232448, 233472, 50 << 20, 2048),
    "sm_100a": Device("sm_100a", (10, 0), 148, 232448, 233472, 126 << 20, 2048),
    "sm_120a": Device("sm_120a", (12, 0), 170, 101376, 102400, 96 << 20, 1536),
}
ARCHS = tuple(_TYPICAL)


def device_of(spec: Spec) -> Device:
    """The device that a planner plans for."""
    return Device.of(spec.device)
