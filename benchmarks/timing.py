"""How time is taken: on the device, on the host, and of a first call.

Device: CUDA events around one call. Before each timed call a buffer larger than the L2 cache is overwritten, so that
the call finds nothing of its own there, and the device is kept waiting for longer than the host needs to enqueue the
call, so that no host time falls between the events. The flush leaves dirty lines that the timed call writes back, and
the call leaves as many for the next flush: it pays for the writes that it owes. What a call writes over is filled again
before the flush (by its method ``refill``). Peers take turns call by call, each round in another order, because the
card's power limit drifts within a run.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

Thunk = Callable[[], Any]


class Clock(Protocol):
    """What :func:`interleave` needs; the tests bring one without a GPU."""

    def host_us(self, call: Thunk) -> float: ...
    def start(self, call: Thunk, host_us: float) -> Any: ...
    def synchronize(self) -> None: ...
    def read(self, started: Any) -> float: ...


class CudaClock:
    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties().L2_cache_size
        self._flushed = torch.empty(max(256 << 20, 2 * l2), dtype=torch.int8, device="cuda")
        # A card that has idled is faster than one that works.
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until:
            self._flushed.zero_()
            torch.cuda.synchronize()

    def host_us(self, call: Thunk) -> float:
        """How long the host needs to enqueue the call when nothing waits."""
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            before = time.perf_counter_ns()
            call()
            best = min(best, (time.perf_counter_ns() - before) / 1e3)
        torch.cuda.synchronize()
        return best

    def start(self, call: Thunk, host_us: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueue a flush, a wait twice as long as the call's host time, and the call between two events."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flushed.zero_()
        torch.cuda._sleep(int(2000 * min(2 * host_us + 20, 5000)))  # in cycles, about 2000 a microsecond
        begin.record()
        call()
        end.record()
        return begin, end

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def read(self, started: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        return started[0].elapsed_time(started[1])


def orders(names: Sequence[str], rounds: int) -> list[list[str]]:
    """An order for each round: every second one backwards, the start moving on, so that each follows each other."""
    made = []
    for r in range(rounds):
        turn = (r // 2) % max(1, len(names))
        order = [*names[turn:], *names[:turn]]
        made.append(order[::-1] if r % 2 else order)
    return made


def interleave(calls: Mapping[str, Thunk], rounds: int, clock: Clock, heat_s: float = 0.0) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, after running all of them for ``heat_s`` seconds."""
    heated = time.perf_counter() + heat_s
    while time.perf_counter() < heated:
        for call in calls.values():
            call()
        clock.synchronize()
    lead = {name: clock.host_us(call) for name, call in calls.items()}
    started: dict[str, list[Any]] = {name: [] for name in calls}
    for order in orders(list(calls), rounds):
        for name in order:
            call = calls[name]
            refill = getattr(call, "refill", None)
            if refill is not None:
                refill()
            started[name].append(clock.start(call, lead[name]))
    clock.synchronize()
    return {name: [clock.read(one) for one in several] for name, several in started.items()}


def host_time(
    calls: Mapping[str, Thunk],
    batches: int,
    batch: int,
    synchronize: Callable[[], None],
    now: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, list[float]]:
    """Microseconds of host time a call, one number a batch.

    Batches are short enough that the launch queue never fills, and each starts with an idle device and a few calls that
    aren't counted.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for order in orders(list(calls), batches):
            for name in order:
                call = calls[name]
                synchronize()
                for _ in range(10):
                    call()
                before = now()
                for _ in itertools.repeat(None, batch):
                    call()
                took[name].append((now() - before) / batch / 1e3)
        synchronize()
    finally:
        if collecting:
            gc.enable()
    return took


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, smallest and count."""
    if not samples:
        raise ValueError("no samples")
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(samples), "n": len(samples)}
