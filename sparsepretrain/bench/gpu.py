"""Timing on a CUDA device: captured graphs, interleaved rounds, inputs that left the L2 cache."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

ROUND_MS = 2.0
"""One round of one work lasts at least so long: events resolve half a microsecond."""
COLD = 3
"""Inputs are rotated over so many times the size of the L2 cache."""
COPY_BYTES = 1 << 30
PRODUCT = 8192
"""Rows and columns of the matrices of :func:`ceilings`."""

Calls = Sequence[Callable[[], Any]]
"""The same work on different buffers, called in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Microseconds of one call in every round."""

    us: list[float]
    mode: str
    """``graph``: replayed; ``eager``: launched one by one, because it cannot be captured."""

    def percentiles(self) -> dict[str, float]:
        """p10, median and p90, and how many rounds."""
        ordered = sorted(self.us)
        last = len(ordered) - 1
        return {
            "p10": ordered[round(0.1 * last)],
            "p50": statistics.median(ordered),
            "p90": ordered[round(0.9 * last)],
            "rounds": len(ordered),
        }


def copies_for(size: int, *, rotate: bool = True) -> int:
    """How many sets of inputs of ``size`` bytes leave nothing of a set in L2 before its turn."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, -(-COLD * cache // max(size, 1))) if rotate else 1


def device_copy(device: torch.device) -> Calls:
    """A large device-to-device copy: the ceiling of everything that streams."""
    source = torch.randn(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return [lambda: target.copy_(source)]


def bandwidth(copy: Series) -> list[float]:
    """Bytes per microsecond, read and written, of every round of :func:`device_copy`."""
    return [2 * COPY_BYTES / us for us in copy.us]


def ceilings(device: torch.device) -> dict[str, float]:
    """What a GPU reaches now: GB/s of a copy, TFLOP/s of a large dense product in bf16."""
    size = PRODUCT
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    found = measure({"copy": device_copy(device), "product": [lambda: a @ b]}, rounds=5)
    product = statistics.median(found["product"].us)
    return {
        "copy_gbps": statistics.median(bandwidth(found["copy"])) / 1e3,
        "bf16_tflops": 2 * size**3 / product / 1e6,
    }


def measure(works: dict[str, Calls], *, rounds: int) -> dict[str, Series]:
    """Time works in one process: rounds A, B, C, B, C, A, … of captured graphs."""
    ready = {name: _Prepared(calls) for name, calls in works.items()}
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

    def __init__(self, calls: Calls) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in (*calls[:2], *calls[:2]):  # compiles, tunes, fills the allocator
                call()
        torch.cuda.current_stream().wait_stream(side)
        once = _event_ms(lambda: [call() for call in calls]) / len(calls)
        turns = max(1, round(ROUND_MS / max(once, 1e-3) / len(calls)))
        self.count = turns * len(calls)
        self.mode = "graph"
        try:
            self.run: Callable[[], Any] = self._capture(calls, turns)
        except RuntimeError:  # it synchronises
            torch.cuda.synchronize()
            self.mode = "eager"
            self.run = lambda: [call() for _ in range(turns) for call in calls]
        self.run()

    @staticmethod
    def _capture(calls: Calls, turns: int) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
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


def _event_ms(work: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def size_of(values: Any) -> int:
    """Bytes of all tensors in nested lists and tuples."""
    return sum(t.nbytes for t in tree_leaves(values) if isinstance(t, Tensor))


def state() -> dict[str, Any]:
    """The device and what it is doing now; clocks and limits are read, never set."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    result: dict[str, Any] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "l2": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "cusparselt": _cusparselt(),
    }
    for fields in (
        "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu",
        "clocks_event_reasons.active",
    ):
        # nvidia-smi counts all GPUs of the machine, torch those of CUDA_VISIBLE_DEVICES
        result |= _query(fields, f"GPU-{properties.uuid}")
    return result


def _query(fields: str, gpu: str) -> dict[str, str]:
    """What nvidia-smi reports; nothing where it is missing or does not know a field."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={gpu}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = map(str.strip, done.stdout.split(","))
    return dict(zip(fields.split(","), values, strict=False))


def _cusparselt() -> int | None:
    """Version of the loaded library: torch 2.11 pins 0.8.0, later ones do not."""
    library = torch.backends.cusparselt
    return library.version() if library.is_available() else None


def median_ratio(over: Series, under: Series) -> float:
    """Median over rounds of ``over / under``."""
    return statistics.median(a / b for a, b in zip(over.us, under.us, strict=True))
