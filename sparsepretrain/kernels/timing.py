"""Time of work on a CUDA device: captured graphs in interleaved rounds, by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROUND_MS = 2.0
"""One round of one work lasts at least so long: events resolve half a microsecond."""
ROUNDS = 5
"""Rounds of :func:`medians`."""

DELAY = 1_000_000
"""Clock cycles of the device, about 0.6 ms, in which the host launches the work that is timed."""

Calls = Sequence[Callable[[], Any]]
"""The same work on different buffers, called in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Microseconds of one call in every round."""

    us: list[float]
    mode: str
    """``graph``: replayed; ``eager``: launched one by one, because it cannot be captured."""


def medians(works: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Return the median seconds of a call of each work on ``device``, timed in turns."""
    calls: dict[str, Calls] = {name: [call] for name, call in works.items()}
    with torch.cuda.device(device):
        found = measure(calls, rounds=ROUNDS)
    return {name: statistics.median(series.us) / 1e6 for name, series in found.items()}


def once(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call on ``device``, to rank works that are warm.

    The device is kept busy until the call is launched: launch overhead is not counted.
    """
    with torch.cuda.device(device):
        torch.cuda._sleep(DELAY)
        return _event_ms(call, waits=False) / 1e3


def measure(works: dict[str, Calls], *, rounds: int) -> dict[str, Series]:
    """Time works in one process: rounds A, B, C, B, C, A, … of captured graphs.

    If a capture fails, all works are launched one by one instead: times of a graph and of launches
    cannot be compared. The mode of each series says which.
    """
    try:
        return _measure(works, rounds, graphs=True)
    except RuntimeError:  # of a capture; one of the work itself comes again
        torch.cuda.synchronize()
        return _measure(works, rounds, graphs=False)


def _measure(works: dict[str, Calls], rounds: int, *, graphs: bool) -> dict[str, Series]:
    ready = {name: _Prepared(calls, graphs) for name, calls in works.items()}
    names = list(works)
    us: dict[str, list[float]] = {name: [] for name in names}
    for index in range(-2, rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            measured = ready[name].time()
            if index >= 0:
                us[name].append(measured)
    return {name: Series(us=us[name], mode=ready[name].mode) for name in names}


class _Prepared:
    """A work that is warm, captured if it can be, and repeated until a round is long enough."""

    def __init__(self, calls: Calls, graphs: bool) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in (*calls[:2], *calls[:2]):  # compiles, tunes, fills the allocator
                call()
        torch.cuda.current_stream().wait_stream(side)
        once = _event_ms(lambda: [call() for call in calls]) / len(calls)
        turns = max(1, round(ROUND_MS / max(once, 1e-3) / len(calls)))
        self.count = turns * len(calls)
        self.run: Callable[[], Any] = lambda: [call() for _ in range(turns) for call in calls]
        self.mode = "graph" if graphs and not _waits(calls[0]) else "eager"
        if self.mode == "graph":
            self.run = self._capture(calls, turns)
        self.run()

    @staticmethod
    def _capture(calls: Calls, turns: int) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those that pin memory, may call CUDA in the meantime. The outer
        # context restores the stream where a capture fails.
        stream = torch.cuda.stream(torch.cuda.current_stream())
        with stream, torch.cuda.graph(graph, capture_error_mode="thread_local"):
            # results live until their next turn, so that written lines leave the cache too
            alive = [call() for call in calls]
            for _ in range(turns - 1):
                for index, call in enumerate(calls):
                    alive[index] = None
                    alive[index] = call()
            del alive
        return graph.replay

    def time(self) -> float:
        """Microseconds per call."""
        return 1e3 * _event_ms(self.run) / self.count


def _waits(call: Callable[[], Any]) -> bool:
    """Return True if the host waits for the device in ``call``, which no graph can capture.

    Found before a capture: a capture that fails in torch up to 2.12 leaves the allocator in a state
    in which every later capture fails too (pytorch#180395).
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _event_ms(work: Callable[[], Any], *, waits: bool = True) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if waits:
        torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)
