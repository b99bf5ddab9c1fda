"""Square 2:4 products beside dense ones, in TFLOP/s (``suite=products``).

S-STE Table 11 has this form, in fp8 at 16384³. The FLOPs are those of the dense product. Packing is
not part of it: ``suite=linear`` and ``suite=block`` have whole layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepretrain.bench import gpu
from sparsepretrain.bench.kernels import CUDA, Timed, Work, difference, draw, failure, skipped
from sparsepretrain.bench.linear import CPU, TOLERANCE, durations
from sparsepretrain.kernels import compress_24, matmul_24, matmul_fp8
from sparsepretrain.training.hardware import known_gpu

__all__ = ["cases", "draw", "report"]

SIZES = (2048, 4096, 8192, 16384)
TINY = 128
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8 e4m3": torch.float8_e4m3fn}
DENSE, SPARSE = "dense", "2:4"


def cases(quick: bool) -> list[Timed | Work]:
    """Every type and size; without a GPU these are skipped, and a tiny one is computed."""
    if torch.cuda.is_available():
        sizes, rounds = SIZES[: 1 if quick else None], 5 if quick else 25
        return [partial(_product, name, n, CUDA, rounds) for name in TYPES for n in sizes]
    found = [skipped(_title(name), []) for name in TYPES]
    return [*found, *(partial(_product, name, TINY, CPU, 2) for name in TYPES)]


def _title(name: str) -> str:
    return f"product, {name}"


def _product(name: str, n: int, device: torch.device, rounds: int) -> list[Timed]:
    """Y = A·Xᵀ of (n, n) matrices; the sparse one is compared with fp32 before it is timed."""
    dtype, random = TYPES[name], torch.Generator(device).manual_seed(0)
    a, x = (torch.randn(n, n, generator=random, device=device).to(dtype) for _ in "ax")
    a[:, 2::4], a[:, 3::4] = 0, 0
    out = torch.bfloat16 if dtype.itemsize == 1 else dtype
    rows = {impl: Timed(case=_title(name), shape=[n] * 3, impl=impl) for impl in (DENSE, SPARSE)}
    expected = (a.float() @ x.float().t()).to(out)
    works: dict[str, Callable[[], Tensor]] = {}
    try:
        flags: Any = {"transpose_dense": True, "out_dtype": out}
        one = torch.ones((), device=device)
        works[DENSE] = partial(torch.matmul, a, x.t())
        if dtype.itemsize == 1:
            works[DENSE] = partial(matmul_fp8, a, x, one, one, out_dtype=out)
        works[SPARSE] = partial(matmul_24, compress_24(a), x, **flags)
        for impl, work in list(works.items()):
            row = rows[impl]
            row.max_err = difference(work(), expected)
            if not row.max_err <= TOLERANCE:
                row.status = "wrong"
                del works[impl]
    except RuntimeError as error:  # this device or library has no such product
        why = f"skipped: {' '.join(str(error).split())[:160]}"
        return [Timed(case=_title(name), shape=[n] * 3, impl=impl, status=why) for impl in rows]
    try:
        measured = durations(works, device, rounds)
    except RuntimeError as error:
        return [skipped(_title(name), [n] * 3, failure(error))]
    for impl, series in measured.items():
        rows[impl].mode, rows[impl].us = series.mode, series.percentiles()
        if DENSE in measured:
            rows[impl].ratio_to = {DENSE: gpu.median_ratio(measured[DENSE], series)}
    return list(rows.values())


def report(result: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown in the form of S-STE Table 11: TFLOP/s reached, and the data sheet's."""
    sheet = known_gpu(result["environment"]["hardware"]["device"])
    found = {
        (row["case"], row["shape"][0], row["impl"]): 2
        * row["shape"][0] ** 3
        / row["us"]["p50"]
        / 1e6
        for row in result["cases"]
        if row["us"]
    }
    yield "| type | m = n = k | dense, TFLOP/s | 2:4, TFLOP/s | 2:4, data sheet |"
    yield "| --- | --- | --- | --- | --- |"
    for case, n in dict.fromkeys(key[:2] for key in found):
        name = case.removeprefix("product, ")
        speeds = [
            f"{found[case, n, i]:.3g}" if (case, n, i) in found else "" for i in (DENSE, SPARSE)
        ]
        peak = 0.0 if sheet is None else 2e-12 * sheet.flops * (2 if "fp8" in name else 1)
        yield f"| {name} | {n} | {speeds[0]} | {speeds[1]} | {f'{peak:.4g}' if peak else ''} |"
