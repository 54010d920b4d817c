"""The first use of everything, by eight threads at once: import, NVRTC, torch, the cache."""

import os
import tempfile
import threading

os.environ["TKJIT_CACHE_DIR"] = tempfile.mkdtemp()
start = threading.Barrier(8)
found: list = []
errors: list = []


def first(i: int) -> None:
    try:
        start.wait()
        from engine import instance
        from tkjit import _core, cache

        k = instance("template <int N> __global__ void fill(float *x) { x[0] = N; }", i % 2).compiled("sm_90a")
        import torch

        op = _core.Planned(lambda scalars, tensors: (0, (0,), (), ()))
        x = torch.zeros(i + 1)
        assert op.raw(x) is x
        found.append((i % 2, k.lowered_name, id(k), cache.folders()))
    except BaseException as error:
        errors.append(error)


threads = [threading.Thread(target=first, args=(i,)) for i in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert len(found) == 8 and len({item[:3] for item in found}) == 2 and len({item[3] for item in found}) == 1

from tkjit import _core  # noqa: E402

assert _core.stats()["compiles"] == 2, _core.stats()
