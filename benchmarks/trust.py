"""Run the start-up test of sparse matmuls, and compare the layout of packed matrices.

The layout of a packed matrix is internal to cuSPARSELt. This script compares it with a formula that
FlagGems decoded on Hopper (``ops/_cslt_sparse_mm.py``), with whole tiles of 64 columns, which an
H200 showed. Where the formula holds, the packed size of any shape is known, and a kernel of the
project could write packed matrices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from harness import CUDA, Case, Options, Work, main, needs_gpu, reason
from kernel_cases import normal
from sparsepretrain.kernels import nm_prune
from sparsepretrain.kernels.cusparselt.startup import unsupported

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = [
    *((64, 64), (128, 128), (3072, 768), (4096, 11008)),
    *((64, 32), (48, 80), (80, 64), (64, 80), (80, 4096), (3072, 784)),
]
"""(rows, columns): multiples of 64, then sizes that fill no tile of metadata."""


def works(options: Options) -> dict[str, Work]:
    """Name the start-up test of each kind of type, then the layout of every size."""
    cuda = torch.cuda.is_available()
    types = TYPES | {"fp8": torch.float8_e4m3fn}
    found: dict[str, Work] = {
        f"start-up test, {name}": partial(start_up, name, dtype) for name, dtype in types.items()
    }
    for name in TYPES:
        for size in SIZES[: 2 if options.quick else None]:
            work = partial(layout, torch._cslt_compress, name, *size)
            found[f"layout, {name}, {size[0]}×{size[1]}"] = work
    return found if cuda else {name: partial(needs_gpu, name) for name in found}


def start_up(name: str, dtype: torch.dtype) -> list[Case]:
    """Ask the package if small sparse matmuls of every layout are right on this device."""
    why = unsupported(CUDA, dtype)
    return [Case(name=f"start-up test, {name}", status="ok" if why is None else f"skipped: {why}")]


def layout(
    compress: Callable[[Tensor], Tensor],
    name: str,
    rows: int,
    columns: int,
    device: torch.device = CUDA,
) -> list[Case]:
    """Check that the published formula gives the size of a packed matrix and unpacks it exactly."""
    case = Case(name=f"layout, {name}, {rows}×{columns}")
    x = nm_prune(normal((rows, columns), device))[0].to(TYPES[name])
    try:
        packed = compress(x).view(torch.uint8).flatten()
    except RuntimeError as error:  # the library refuses the size
        case.status = f"failed: {reason(error)}"
        return [case]
    expected = packed_bytes(rows, columns)
    # torch ≥ 2.10 returns a matrix of `rows` rows: its bytes are rounded up to whole columns
    column = rows * x.itemsize
    whole = -(-expected // column) * column
    if packed.numel() not in (expected, whole):
        case.status = f"wrong: {packed.numel()} bytes, the formula gives {expected}"
    elif not torch.equal(unpack(packed, rows, columns, x.dtype), x):
        case.status = "wrong: the formula unpacks another matrix"
    return [case]


def packed_bytes(rows: int, columns: int) -> int:
    """Return the size of a packed matrix: half of its 16-bit values, 512 bytes per 64×64 tile."""
    return rows * columns + -(-rows // 64) * -(-columns // 64) * 512


def unpack(packed: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix that the bytes `packed` stand for, by the published formula.

    Values lie row by row. Four bits for each group of four, the columns of its two values, follow
    in tiles of 64 rows and 8 groups.
    """
    device = packed.device
    values = packed[: rows * columns].view(dtype).view(rows, columns // 4, 2)
    meta = packed[rows * columns :]
    nibbles = torch.stack([meta & 15, meta >> 4], 1).flatten()
    row = torch.arange(rows, device=device)[:, None]
    group = torch.arange(columns // 4, device=device)
    tile = row // 64 * (2 * -(-columns // 64)) + group // 8
    in_tile = row // 32 % 2 * 256 + row // 16 % 2 * 128 + row // 8 % 2 + row % 8 * 16
    kept = nibbles[tile * 512 + in_tile + group % 4 * 4 + group % 8 // 4 * 2].long()
    fours = torch.zeros(rows, columns // 4, 4, dtype=dtype, device=device)
    return fours.scatter_(2, torch.stack([kept & 3, kept >> 2], 2), values).flatten(1)


if __name__ == "__main__":
    sys.exit(main("trust", works))
