"""Measure the ceilings of a GPU, and see if a matmul of cuSPARSELt can be captured in a graph.

A copy bounds every kernel that streams, and a dense matmul every step; the launch overhead decides
from which size on the GPU waits for Python. Takes 20 seconds. Without a GPU, sizes are tiny.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from harness import (
    CPU,
    CUDA,
    TOLERANCE,
    Case,
    Options,
    Work,
    difference,
    interleave,
    main,
    needs_gpu,
)
from sparsepretrain.kernels import compress_24, matmul_24, nm_prune
from sparsepretrain.kernels.cusparselt.packed24 import searching

COPY = 1 << 31
"""Bytes of the copied tensor."""
SIDES = (2048, 4096, 8192)
"""Rows and columns of the multiplied matrices."""
LAUNCHES = 2000
LINEAR = (3072, 768, 16384)
"""out_features, in_features and tokens of GPT-2 124M's first FFN layer."""


def works(options: Options) -> dict[str, Work]:
    """Return the measurements, tiny ones without a GPU."""
    cuda = torch.cuda.is_available()
    device = CUDA if cuda else CPU
    sides = SIDES if cuda else (64,)
    found: dict[str, Work] = {"copy": partial(copy, device, COPY if cuda else 1 << 20)}
    found |= {f"matmul {n}": partial(matmul, device, n) for n in sides}
    found["launch"] = partial(launch, device)
    found["2:4 matmul"] = partial(sparse, device) if cuda else partial(needs_gpu, "2:4 matmul")
    return found


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of a call."""
    return statistics.median(interleave({"": call}, 10, device=device)[""].us) / 1e6


def copy(device: torch.device, size: int) -> list[Case]:
    """Measure the bandwidth of a copy: bytes read and bytes written."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / seconds(partial(target.copy_, source), device)
    return [Case(name="device copy", value=rate / 1e12, unit="TB/s")]


def matmul(device: torch.device, n: int) -> list[Case]:
    """Measure a square matmul in bf16; random numbers, since zeros let a GPU clock higher."""
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in "ab")
    rate = 2 * n**3 / seconds(partial(torch.matmul, a, b), device)
    return [Case(name=f"matmul, bf16, {n}³", value=rate / 1e12, unit="TFLOP/s")]


def launch(device: torch.device) -> list[Case]:
    """Measure the time that Python takes to launch a small operation."""
    x = torch.zeros(8, device=device)
    x.add_(1)
    started = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    us = 1e6 * (time.perf_counter() - started) / LAUNCHES
    return [Case(name="launch overhead of x.add_(1)", value=us)]


def sparse(device: torch.device) -> list[Case]:
    """Compare a packed matmul with the dense one, launched and replayed from a graph."""
    out, inner, tokens = LINEAR
    random = torch.Generator(device).manual_seed(0)
    w = nm_prune(torch.randn(out, inner, generator=random, device=device))[0].bfloat16()
    x = torch.randn(tokens, inner, generator=random, device=device).bfloat16()
    run = partial(matmul_24, compress_24(w), x, transpose_dense=True, transpose_result=True)
    name = f"2:4 matmul, bf16, {out} × {inner} × {tokens}"
    expected = (x.float() @ w.float().t()).bfloat16()
    with searching():
        error = difference(run(), expected)
    if not error <= TOLERANCE:
        return [Case(name=name, status=f"wrong: differs from the dense matmul by {error:.3g}")]
    series = interleave({"2:4": run, "dense": partial(torch.matmul, x, w.t())}, 10, device=device)
    us = {label: statistics.median(each.us) for label, each in series.items()}
    case = Case(name=name, value=us["2:4"], detail={"max_err": error, "mode": series["2:4"].mode})
    case.detail["times_as_fast_as"] = {"dense": us["dense"] / us["2:4"]}
    if series["2:4"].mode != "graph":
        case.status = "failed: the matmul cannot be captured in a CUDA graph"
    return [case]


if __name__ == "__main__":
    sys.exit(main("facts", works))
