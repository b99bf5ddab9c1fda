"""Launch Triton kernels: strided rows, tiles of groups, operators.

Imported only if a Triton kernel runs; the references need torch alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsepretrain.kernels.common import packed_shape

P = ParamSpec("P")
T = TypeVar("T")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on CPU tensors, for tests: Triton reads this variable when it is imported."""
BLOCK_SIZE = 2048
"""Elements per program of the streaming kernels: 16 per thread with 4 warps."""
MAX_STRIDED_ROWS = 128
"""Rows per program where groups are strided: loads coalesce over neighboring rows."""
if INTERPRETED:  # a program costs milliseconds at any size
    BLOCK_SIZE, MAX_STRIDED_ROWS = BLOCK_SIZE * 32, MAX_STRIDED_ROWS * 32


class Tile(NamedTuple):
    """Rows and groups of one program, and how to address them: a ``tl.constexpr``."""

    ROWS: int
    GROUPS: int
    CONTIGUOUS: bool
    """Groups are contiguous in input and output."""
    INT64_OFFSETS: bool
    """Offsets need 64 bits."""
    OUT_CONTIGUOUS: bool = False
    """Groups are contiguous in the output only."""


class StridedRows(NamedTuple):
    """Strided view of a tensor as rows along one axis; kernels get ``ptr`` as a pointer.

    Element i of row r is at ``(r // inner)·outer_stride + (r % inner)·inner_stride + i·stride``.
    """

    ptr: Tensor
    inner: int
    outer_stride: int
    inner_stride: int
    stride: int


def as_rows(x: Tensor, dim: int) -> StridedRows:
    """View ``x`` as rows along ``dim``; copy if strides of three axes cannot describe it."""
    strides = _row_strides(x.shape, x.stride(), dim)
    if strides is None:
        x = x.contiguous()
        strides = _row_strides(x.shape, x.stride(), dim)
        assert strides is not None
    return StridedRows(x, *strides)


Strides = tuple[int, int, int, int]
"""Fields of :class:`StridedRows` after ``ptr``."""


# Cached by shape: launch overhead is visible where kernels are short.
@lru_cache(4096)
def _row_strides(shape: torch.Size, stride: tuple[int, ...], dim: int) -> Strides | None:
    """Return the fields of :class:`StridedRows` after ``ptr``, or None if a copy is needed."""
    dim %= len(shape)
    outer = _collapsed_stride(shape[:dim], stride[:dim])
    inner = _collapsed_stride(shape[dim + 1 :], stride[dim + 1 :])
    if outer is None or inner is None:
        return None
    if shape[:dim].numel() == 1:  # one stride from row to row: divisions by 1 vanish when compiled
        return 1, inner, 0, stride[dim]
    return shape[dim + 1 :].numel(), outer, inner, stride[dim]


def _collapsed_stride(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the stride of several axes taken as one, or None if they cannot be collapsed."""
    axes = [axis for axis in zip(shape, stride, strict=True) if axis[0] != 1]
    if any(outer != n * inner for (_, outer), (n, inner) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else 1


class Tiling(NamedTuple):
    """Grid of a launch over groups."""

    n_rows: int
    n_groups: int
    """Per row."""
    tile: Tile
    n_programs: int
    flat_strides: Strides | None
    """Strides of the tensor as a single row, or None."""


@lru_cache(4096)
def _tiling(
    shape: torch.Size,
    dim: int,
    m: int,
    indexed: bool,
    source: Strides,
    target: Strides,
    other_strides: tuple[Strides, ...],
) -> Tiling:
    length = shape[dim]
    n_rows, all_strides = shape.numel() // length, (source, target, *other_strides)
    contiguous = source[3] == target[3] == 1
    out_contiguous = target[3] == 1 and not contiguous
    flat_strides = None
    if not indexed and all(_gapless(strides, n_rows, length) for strides in (source, target)):
        # Kernels without row indices require m to divide the length, so a group never crosses the
        # end of a row, and one long row leaves no partly filled tile per row.
        n_rows, length = 1, shape.numel()
        flat_strides = 1, length, 0, 1
        all_strides = (flat_strides,)
    n_groups = length // m

    def power_of_two(n: int) -> int:
        return 1 << (n - 1).bit_length()

    tile_size = BLOCK_SIZE // power_of_two(m)
    if contiguous:
        max_groups = tile_size if n_rows == 1 else min(tile_size, max(512 // power_of_two(m), 1))
        tile_groups = min(max_groups, power_of_two(n_groups))
        tile_rows = min(tile_size // tile_groups, power_of_two(n_rows))
    else:
        max_rows = MAX_STRIDED_ROWS // 2 if out_contiguous else MAX_STRIDED_ROWS
        tile_rows = min(max_rows, tile_size, power_of_two(n_rows))
        tile_groups = min(tile_size // tile_rows, power_of_two(n_groups))
    max_offset = max(
        n_rows // inner * outer_stride + inner * inner_stride + length * stride
        for inner, outer_stride, inner_stride, stride in all_strides
    )
    tile = Tile(tile_rows, tile_groups, contiguous, max_offset >= 2**31, out_contiguous)
    n_programs = -(-n_rows // tile_rows) * -(-n_groups // tile_groups)
    return Tiling(n_rows, n_groups, tile, n_programs, flat_strides)


def _gapless(strides: Strides, n_rows: int, length: int) -> bool:
    """Return True if the rows follow each other in memory, in order and without gaps."""
    inner, outer_stride, inner_stride, stride = strides
    in_order = outer_stride == length * inner or n_rows == inner
    return stride == 1 and in_order and (inner_stride == length or inner == 1)


_operators = torch.library.Library("sparsepretrain", "FRAGMENT")


def operator(
    name: str, fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as ``sparsepretrain::name``, without the checks of ``custom_op``.

    Those checks add 10 µs to every launch. Without them, an output that aliases an argument or a
    backward pass through the operator goes unnoticed. The function increments the versions of
    arguments that it ``mutates`` itself: a kernel writes behind the back of torch, and a backward
    must fail if a tensor that it saved was overwritten. ``fake`` gives shapes and dtypes for
    tracing.
    """

    def register(function: Callable[P, T]) -> Callable[P, T]:
        _operators.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        _operators.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sparsepretrain::{name}", fake, lib=_operators)
        return getattr(torch.ops.sparsepretrain, name).default

    return register


def launch_elements(
    kernel: Any,
    tensors: Sequence[Tensor],
    n_elements: int,
    *args: Any,
    block_size: int = BLOCK_SIZE,
    **options: Any,
) -> None:
    """Launch ``kernel`` on blocks of ``range(n_elements)``.

    The kernel takes pointers to ``tensors``, ``n_elements``, ``args`` and the constants
    ``BLOCK_SIZE``, ``INT64_OFFSETS`` (offsets need 64 bits) and ``options``.
    """
    if not n_elements:
        return
    constants = {"BLOCK_SIZE": block_size, "INT64_OFFSETS": n_elements >= 2**31 - block_size}
    with torch.cuda.device_of(tensors[0]):
        kernel[(-(-n_elements // block_size),)](
            *tensors, n_elements, *args, enable_fp_fusion=False, **constants, **options
        )


def axis_order(x: Tensor) -> list[int]:
    """Return the axes of ``x``, largest stride first; a dense ``x`` is contiguous in this order."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda axis: -strides[axis])


def empty_out(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Empty tensor like ``x``; contiguous where :func:`as_rows` would copy the strides of ``x``."""
    out = torch.empty_like(x, dtype=dtype)
    if x.is_contiguous():
        return out
    dim %= x.dim()
    try:
        out.view(x.shape[:dim].numel(), x.shape[dim], x.shape[dim + 1 :].numel())
    except (RuntimeError, ValueError):  # the latter from fake tensors
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    return out


def launch_groups(
    kernel: Any,
    m: int,
    dim: int,
    x: Tensor,
    out: Tensor,
    *args: Any,
    out2: Tensor | None = None,
    indexed: bool = False,
    **options: Any,
) -> None:
    """Launch ``kernel`` on tiles of whole groups of ``m`` along ``dim``.

    The kernel takes ``x`` and ``out`` as :class:`StridedRows`, ``n_rows``, ``n_groups`` (per row),
    ``out2`` (strides of ``out``) as StridedRows unless it is None, ``args``, and the constants
    ``TILE`` (a :class:`Tile`) and ``options``. ``indexed``: the kernel depends on row and
    group indices, so rows are not merged; without it, m must divide the length of a row. Elements
    after the last whole group are not touched.
    """
    if not x.numel() or x.shape[dim] < m:
        return
    source, target = as_rows(x, dim), as_rows(out, dim)
    other_strides = tuple(arg[1:] for arg in args if isinstance(arg, StridedRows))  # may have gaps
    indexed |= bool(other_strides)
    tiling = _tiling(x.shape, dim, m, indexed, source[1:], target[1:], other_strides)
    if tiling.flat_strides is not None:
        source, target = (StridedRows(rows.ptr, *tiling.flat_strides) for rows in (source, target))
    if out2 is not None:
        args = (target._replace(ptr=out2), *args)
    # No fused multiply-adds: results are compared bit for bit with the reference.
    options |= {"TILE": tiling.tile, "enable_fp_fusion": False}
    with torch.cuda.device_of(x):
        kernel[(tiling.n_programs,)](
            source, target, tiling.n_rows, tiling.n_groups, *args, **options
        )


def can_pack_mask(x: Tensor, out: Tensor) -> bool:
    """Return True if :func:`store_packed_mask` can store the 2:4 mask of ``x``."""
    matrices = x.dim() == 2 and x.is_contiguous() and out.is_contiguous()
    return matrices and x.shape == out.shape and x.shape[1] >= 8 and x.numel() > 0


def empty_packed_mask(x: Tensor) -> Tensor:
    """Empty mask of ``x`` in the format of :func:`sparsepretrain.kernels.pack_rows`."""
    return torch.empty(packed_shape(x.shape), dtype=torch.uint8, device=x.device)
