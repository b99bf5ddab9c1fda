"""One launch for the weights of all layers, where each takes microseconds: as long as a launch.

A table on the device says how far the tensors of a layer lie from those of the first layer. It is
made where addresses change, so not in every training step: weights and operands stay in place.
Each function returns None where the tensors do not fit together; its caller then launches one by
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.common import packed_room, packed_shape, whole_bytes
from sparsepretrain.kernels.triton.launch import BLOCK, Rows, Tile
from sparsepretrain.kernels.triton.masks import count_bits, select_kept
from sparsepretrain.kernels.triton.nm import code_tile, prune_tile
from sparsepretrain.kernels.triton.soft import soft_tile
from sparsepretrain.kernels.triton.tiles import block_offsets, tile_of

GROUPS: dict[str, Any] = {"TILE": Tile(1, BLOCK // 4, True, False)}
"""For kernels over groups of four: a weight, whose rows follow each other, is one row."""
APART = 16
"""Distances are multiples of so many elements: what is read together stays aligned."""


def foreach_nm_mask(
    xs: Sequence[Tensor], n: int, m: int, dim: int, low: bool
) -> list[Tensor] | None:
    """See :func:`sparsepretrain.kernels.foreach_nm_mask`."""
    if (n, m) != (2, 4) or not all(whole_bytes(x, dim) for x in xs):
        return None
    codes = packed_room(xs)
    return codes if _launch(_foreach_code_24, 4, xs, codes, LOW=low, **GROUPS) else None


def foreach_nm_prune(
    xs: Sequence[Tensor], n: int, m: int, dim: int, low: bool, outs: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]] | None:
    """See :func:`sparsepretrain.kernels.foreach_nm_prune`."""
    if (n, m) != (2, 4) or not _matrices(dim, xs, outs):
        return None
    codes = packed_room(xs)
    if not _launch(_foreach_prune_24, 4, xs, outs, codes, LOW=low, **GROUPS):
        return None
    torch.autograd.graph.increment_version(outs)
    return list(zip(outs, codes, strict=True))


def foreach_soft_prune(
    xs: Sequence[Tensor],
    n: int,
    m: int,
    gamma: float,
    dim: int,
    scales: Sequence[Tensor],
    outs: Sequence[Tensor],
) -> list[tuple[Tensor, Tensor]] | None:
    """See :func:`sparsepretrain.kernels.foreach_soft_prune`."""
    if (n, m) != (2, 4) or not _matrices(dim, xs, outs):
        return None
    codes, constants = packed_room(xs), {"BETWEEN": gamma != 0.0, **GROUPS}
    weights = 1.0 - gamma, gamma
    if not _launch(_foreach_soft_24, 4, xs, outs, codes, scales, args=weights, **constants):
        return None
    torch.autograd.graph.increment_version(outs)
    return list(zip(outs, codes, strict=True))


def foreach_apply_mask(
    xs: Sequence[Tensor], masks: Sequence[Tensor], outs: Sequence[Tensor]
) -> list[Tensor] | None:
    """See :func:`sparsepretrain.kernels.foreach_apply_mask`."""
    packed = all(
        mask.dtype == torch.uint8 and mask.shape == packed_shape(x.shape) and mask.is_contiguous()
        for x, mask in zip(xs, masks, strict=True)
    )
    if not packed or not _matrices(-1, xs, outs):
        return None
    if not _launch(_foreach_select, 1, xs, outs, masks, BLOCK=BLOCK):
        return None
    torch.autograd.graph.increment_version(outs)
    return list(outs)


def foreach_packed_flip_count(
    previous: Sequence[Tensor], current: Sequence[Tensor], replace: bool
) -> Tensor | None:
    """See :func:`sparsepretrain.kernels.foreach_packed_flip_count`."""
    words = []
    for codes in (previous, current):
        if not all(c.is_contiguous() and c.data_ptr() % 4 == c.numel() % 16 == 0 for c in codes):
            return None
        words.append([code.view(-1).view(torch.int32) for code in codes])
    total = torch.zeros(len(previous), dtype=torch.int64, device=previous[0].device)
    constants = {"BLOCK": BLOCK, "REPLACE": replace}
    if not _launch(_foreach_differing_bits, 1, *words, args=(total,), **constants):
        return None
    if replace:
        torch.autograd.graph.increment_version(previous)
    return total


def _matrices(dim: int, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
    """Whether all are of :func:`whole_bytes`."""
    return all(
        whole_bytes(x, dim) and out.is_contiguous() and out.shape == x.shape
        for x, out in zip(xs, outs, strict=True)
    )


def _launch(
    kernel: Any, per_count: int, *columns: Sequence[Tensor], args: Any = (), **constants: Any
) -> bool:
    """Launch ``kernel`` on programs of all layers; False: they do not fit into one launch.

    They do not on several devices, in several dtypes, beyond 2³¹ elements, or at distances that are
    no multiples of APART.

    The kernel takes the table, the first tensor of each column (of fours, matrices of numbers as
    Rows), ``args`` and ``constants``. A row of the table: the distances of the columns in elements,
    and how many units of ``per_count`` elements of the first column there are.
    """
    first = columns[0]
    kinds = [{(x.dtype, x.device) for x in column} for column in columns]
    devices = {device for kind in kinds for _, device in kind}
    if max(map(len, kinds)) > 1 or len(devices) > 1:
        return False
    if any(x.numel() >= 2**31 - BLOCK for x in first):
        return False
    table = _distances(columns, per_count)
    if table is None:
        return False
    programs = max(-(-x.numel() // BLOCK) for x in first)
    firsts: list[Any] = [column[0] for column in columns]
    if per_count == 4:
        matrix = [x.dim() == 2 and x.is_floating_point() for x in firsts]
        firsts = [Rows(x, 1, 0, 0, 1) if m else x for x, m in zip(firsts, matrix, strict=True)]
    with torch.cuda.device_of(first[0]):
        kernel[(programs, len(first))](table, *firsts, *args, enable_fp_fusion=False, **constants)
    return True


def _distances(columns: Sequence[Sequence[Tensor]], per_count: int) -> Tensor | None:
    """(layers, columns + 1) int64 on the device; None: kernels could not rely on alignment."""
    rows = []
    for column in columns:
        start, size = column[0].data_ptr(), column[0].element_size()
        rows.append([(x.data_ptr() - start) // size for x in column])
        if column[0].dim() and any(distance % APART for distance in rows[-1]):
            return None
    rows.append([x.numel() // per_count for x in columns[0]])
    return _on_device(tuple(map(tuple, rows)), columns[0][0].device)


@lru_cache(64)
def _on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        table = torch.tensor(rows, device="cpu").t().contiguous()
        if device.type == "cuda":  # the host does not wait for a copy from pinned memory
            table = table.pin_memory().to(device, non_blocking=True)
        return table


@triton.jit
def _entry(table, column, COLUMNS: tl.constexpr):
    """Of this program's layer, whose numbers follow each other."""
    return tl.load(table + tl.program_id(1) * COLUMNS + column)


@triton.jit
def _distance(table, column, COLUMNS: tl.constexpr):
    # of the load itself, since Triton 3.6 forgets what is said of the result of a function
    return tl.multiple_of(tl.load(table + tl.program_id(1) * COLUMNS + column), 16)


@triton.jit
def _foreach_code_24(table, x, code, TILE: tl.constexpr, LOW: tl.constexpr):
    groups = tl.multiple_of(_entry(table, 2, 3).to(tl.int32), 2)
    row, first = tile_of(1, groups, TILE)
    start = _distance(table, 0, 3) + row * 0
    code_tile(x, start, row, first, 1, groups, code + _distance(table, 1, 3), TILE, LOW)


@triton.jit
def _foreach_prune_24(table, x, out, code, TILE: tl.constexpr, LOW: tl.constexpr):
    groups = tl.multiple_of(_entry(table, 3, 4).to(tl.int32), 2)
    row, first = tile_of(1, groups, TILE)
    starts = _distance(table, 0, 4) + row * 0, _distance(table, 1, 4) + row * 0
    code += _distance(table, 2, 4)
    prune_tile(x, out, starts, row, first, 1, groups, code, TILE, LOW)


@triton.jit
def _foreach_soft_24(
    table, x, out, code, scale, near_dropped, near_kept, TILE: tl.constexpr, BETWEEN: tl.constexpr
):  # fmt: skip
    groups = tl.multiple_of(_entry(table, 4, 5).to(tl.int32), 2)
    row, first = tile_of(1, groups, TILE)
    starts = _distance(table, 0, 5) + row * 0, _distance(table, 1, 5) + row * 0
    code += _distance(table, 2, 5)
    scale += _entry(table, 3, 5)
    soft_tile(
        x, out, starts, row, first, 1, groups, scale, code, near_dropped, near_kept, TILE,
        True, BETWEEN, True,
    )  # fmt: skip


@triton.jit
def _foreach_select(table, x, out, mask, BLOCK: tl.constexpr):
    count = tl.multiple_of(_entry(table, 3, 4).to(tl.int32), 8)
    offsets = block_offsets(BLOCK, False)
    x += _distance(table, 0, 4)
    out += _distance(table, 1, 4)
    select_kept(x, mask + _distance(table, 2, 4), out, count, offsets, True)


@triton.jit
def _foreach_differing_bits(
    table, previous, current, total, BLOCK: tl.constexpr, REPLACE: tl.constexpr
):  # fmt: skip
    count = tl.multiple_of(_entry(table, 2, 3).to(tl.int32), 4)
    offsets = block_offsets(BLOCK, False)
    previous += _distance(table, 0, 3)
    current += _distance(table, 1, 3)
    count_bits(previous, current, total + tl.program_id(1), count, offsets, REPLACE)
