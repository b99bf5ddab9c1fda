"""Time square 2:4 matmuls against dense ones, in TFLOP/s of the dense matmul.

As S-STE Table 11, which has fp8 at 16384³. Packing is excluded; `linear.py` and `blocks.py` time
whole layers.
"""

from __future__ import annotations

import sys
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
    reason,
    timed,
)
from sparsepretrain.kernels import compress_24, matmul_24, matmul_fp8
from sparsepretrain.kernels.cusparselt.packed24 import searching

SIZES = (2048, 4096, 8192, 16384)
TINY = 128
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8 e4m3": torch.float8_e4m3fn}
DENSE, SPARSE = "dense", "2:4"


def works(options: Options) -> dict[str, Work]:
    """Return a work per type and size; without a GPU for a tiny size."""
    sizes, rounds, device = SIZES[: 1 if options.quick else None], 5 if options.quick else 25, CUDA
    if not torch.cuda.is_available():
        sizes, rounds, device = (TINY,), 2, CPU
    pairs = [(name, n) for name in TYPES for n in sizes]
    return {title(*pair): partial(square, *pair, device, rounds) for pair in pairs}


def title(name: str, n: int) -> str:
    """Return the prefix of the cases of a type and size."""
    return f"matmul, {name}, {n}³"


def square(name: str, n: int, device: torch.device, rounds: int) -> list[Case]:
    """Time Y = A·Xᵀ of (n, n) matrices after a comparison with fp32."""
    dtype, random = TYPES[name], torch.Generator(device).manual_seed(0)
    a, x = (torch.randn(n, n, generator=random, device=device).to(dtype) for _ in "ax")
    a[:, 2::4], a[:, 3::4] = 0, 0
    out = torch.bfloat16 if dtype.itemsize == 1 else dtype
    expected = (a.float() @ x.float().t()).to(out)
    flags: Any = {"transpose_dense": True, "out_dtype": out}
    one = torch.ones((), device=device)
    try:
        calls = {DENSE: partial(torch.matmul, a, x.t())}
        if dtype.itemsize == 1:
            calls[DENSE] = partial(matmul_fp8, a, x, one, one, out_dtype=out)
        calls[SPARSE] = partial(matmul_24, compress_24(a), x, **flags)
        with searching():
            errors = {impl: difference(call(), expected) for impl, call in calls.items()}
    except RuntimeError as error:  # this device or library has no such matmul
        return [Case(name=title(name, n), status=f"skipped: {reason(error)}")]
    found = [
        Case(name=f"{title(name, n)}, {impl}", status=f"wrong: differs from fp32 by {error:.3g}")
        for impl, error in errors.items()
        if not error <= TOLERANCE
    ]
    right = {impl: call for impl, call in calls.items() if errors[impl] <= TOLERANCE}
    for impl, series in (series_of := interleave(right, rounds, device=device)).items():
        dense = {DENSE: series_of[DENSE]} if DENSE in series_of else {}
        case = timed(f"{title(name, n)}, {impl}", series, dense, max_err=errors[impl])
        case.value, case.unit = 2e-6 * n**3 / case.detail["p50"], "TFLOP/s"
        found.append(case)
    return found


if __name__ == "__main__":
    sys.exit(main("square", works))
