"""A CUDA device for benchmarks: inputs that left the L2 cache, ceilings, present state."""

from __future__ import annotations

import statistics
import subprocess
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sparsepretrain.kernels.cusparselt.packed24 import version
from sparsepretrain.kernels.timing import Calls, Series, measure

COLD = 3
"""Inputs are rotated over so many times the size of the L2 cache."""
COPY_BYTES = 1 << 30
PRODUCT = 8192
"""Rows and columns of the matrices of :func:`ceilings`."""


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
        "cusparselt": version(),
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


def median_ratio(over: Series, under: Series) -> float:
    """Median over rounds of ``over / under``."""
    return statistics.median(a / b for a, b in zip(over.us, under.us, strict=True))
