"""Start-up test of sparse matmuls and layout of packed matrices (``suite=trust``).

The layout of a packed matrix is internal to cuSPARSELt. This suite compares it with a formula that
FlagGems decoded on Hopper (``ops/_cslt_sparse_mm.py``). Where the formula holds, the packed size of
any shape is known, and a kernel of ours could write packed matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparsepretrain.bench.kernel_cases import normal
from sparsepretrain.bench.kernels import CUDA, SKIPPED, Timed, Work, failure, skipped
from sparsepretrain.kernels import nm_prune
from sparsepretrain.kernels.cusparselt.packed24 import unsupported

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = [
    *((64, 32), (128, 128), (3072, 768), (4096, 11008)),
    *((16, 16), (48, 80), (80, 64), (64, 80), (80, 4096), (3072, 784)),
]
"""(rows, columns): multiples of (64, 32), then sizes that fill no tile of metadata."""


def cases(quick: bool) -> list[Timed | Work]:
    """The start-up test of each kind of type, then the layout of every size."""
    if not torch.cuda.is_available():
        return [skipped(name, [], SKIPPED) for name in ("start-up test", "layout")]
    tests = [partial(_start_up, fp8) for fp8 in (False, True)]
    sizes = SIZES[:2] if quick else SIZES
    layouts = [partial(layout, torch._cslt_compress, n, *size) for n in TYPES for size in sizes]
    return [*tests, *layouts]


def _start_up(fp8: bool) -> list[Timed]:
    why = unsupported(CUDA, fp8=fp8)
    name = f"start-up test, {'fp8' if fp8 else 'fp16 and bf16'}"
    return [skipped(name, [], "ok" if why is None else f"skipped: {why}")]


def layout(
    compress: Callable[[Tensor], Tensor],
    name: str,
    rows: int,
    columns: int,
    device: torch.device = CUDA,
) -> list[Timed]:
    """``ok`` if the published formula gives the size of a packed matrix and unpacks it exactly."""
    row = skipped(f"layout, {name}", [rows, columns], "ok")
    x = nm_prune(normal((rows, columns), device))[0].to(TYPES[name])
    try:
        packed = compress(x).view(torch.uint8).flatten()
        expected = packed_bytes(rows, columns)
        if packed.numel() != expected:
            row.status = f"wrong: {packed.numel()} bytes, the formula gives {expected}"
        elif not torch.equal(unpack(packed, rows, columns, x.dtype), x):
            row.status = "wrong: the formula unpacks another matrix"
    except RuntimeError as error:  # a size that the library refuses
        row.status = failure(error)
    return [row]


def packed_bytes(rows: int, columns: int) -> int:
    """Bytes of a packed matrix of 16-bit values: half of them, and 256 bytes per 64×32 tile."""
    return rows * columns + -(-rows // 64) * -(-columns // 32) * 256


def unpack(packed: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The matrix that the bytes ``packed`` stand for, by the published formula.

    Values lie row by row. Four bits for each group of four, the columns of its two values, follow
    in tiles of 64 rows and 8 groups.
    """
    device = packed.device
    values = packed[: rows * columns].view(dtype).view(rows, columns // 4, 2)
    meta = packed[rows * columns :]
    nibbles = torch.stack([meta & 15, meta >> 4], 1).flatten()
    row = torch.arange(rows, device=device)[:, None]
    group = torch.arange(columns // 4, device=device)
    tile = row // 64 * -(-columns // 32) + group // 8
    in_tile = row // 32 % 2 * 256 + row // 16 % 2 * 128 + row // 8 % 2 + row % 8 * 16
    kept = nibbles[tile * 512 + in_tile + group % 4 * 4 + group % 8 // 4 * 2].long()
    fours = torch.zeros(rows, columns // 4, 4, dtype=dtype, device=device)
    return fours.scatter_(2, torch.stack([kept & 3, kept >> 2], 2), values).flatten(1)
