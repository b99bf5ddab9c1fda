"""Triton kernels of :mod:`sparsepretrain.kernels.glu`, forward and backward, one pass each.

gelu_tanh(g) = g·½(1 + tanh u) = g·σ(2u) with u = √(2/π)(g + 0.044715 g³): the sigmoid needs one
exponential and does not cancel where the gate is negative. Arithmetic is fp32, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsepretrain.kernels.triton.launch import as_rows, launch_groups
from sparsepretrain.kernels.triton.tiles import (
    element_offsets,
    maximum,
    minimum,
    narrow,
    program_tile,
    widen,
)

_SLOPE: tl.constexpr = tl.constexpr(2 * (2 / torch.pi) ** 0.5)
_CUBE: tl.constexpr = tl.constexpr(0.044715)
_SATURATED: tl.constexpr = tl.constexpr(16.0)
"""Gates are clamped here: σ(2u) is 0 or 1 in fp32 beyond, and the cube could overflow."""


@triton.jit
def _activation(gate, GELU: tl.constexpr):
    """Return the activation of the gate and its derivative."""
    if GELU:
        g = maximum(minimum(gate, _SATURATED), -_SATURATED)
        square = g * g * _CUBE
        exponent, slope = (g + g * square) * _SLOPE, (1 + 3 * square) * _SLOPE
    else:
        g, exponent, slope = gate, gate, 1.0
    sigmoid = 1 / (1 + tl.exp(-exponent))
    return gate * sigmoid, sigmoid * (1 + g * (1 - sigmoid) * slope)


@triton.jit
def _load_glu(x, gate_ptr, n_rows, n_cols, TILE: tl.constexpr, GELU: tl.constexpr):
    """Load this program's tile: (row, column, mask, value, activation, derivative)."""
    row, start = program_tile(n_rows, n_cols, TILE)
    col = start + tl.arange(0, TILE.GROUPS)
    mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
    offsets = element_offsets(x, row, col)
    value = widen(tl.load(x.ptr + offsets, mask, 0))
    act, derivative = _activation(widen(tl.load(gate_ptr + offsets, mask, 0)), GELU)
    return row, col, mask, value, act, derivative


@triton.jit
def _glu_forward_kernel(x, out, n_rows, n_cols, gate_ptr, TILE: tl.constexpr, GELU: tl.constexpr):
    row, col, mask, value, act, _ = _load_glu(x, gate_ptr, n_rows, n_cols, TILE, GELU)
    result = narrow(value * act, out.ptr)
    tl.store(out.ptr + element_offsets(out, row, col), result, mask)


@triton.jit
def _glu_backward_kernel(
    x, dx, n_rows, n_cols, gate_ptr, dgate_ptr, dout, TILE: tl.constexpr, GELU: tl.constexpr
):  # fmt: skip
    row, col, mask, value, act, derivative = _load_glu(x, gate_ptr, n_rows, n_cols, TILE, GELU)
    grad = widen(tl.load(dout.ptr + element_offsets(dout, row, col), mask, 0))
    offsets = element_offsets(dx, row, col)
    tl.store(dx.ptr + offsets, narrow(grad * act, dx.ptr), mask)
    tl.store(dgate_ptr + offsets, narrow(grad * value * derivative, dx.ptr), mask)


def _as_2d(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


@torch.library.custom_op("sparsepretrain::gated", mutates_args=())
def gated(x: Tensor, gelu: bool) -> Tensor:
    """Return GeGLU (``gelu``) or SwiGLU of ``x`` (…, 2h)."""
    value, gate = _as_2d(x).chunk(2, dim=1)
    out = torch.empty_like(value)
    launch_groups(_glu_forward_kernel, 1, 1, value, out, gate, GELU=gelu)
    return out.view(*x.shape[:-1], out.shape[1])


@gated.register_fake
def _(x: Tensor, gelu: bool) -> Tensor:
    out = torch.empty_like(_as_2d(x).chunk(2, dim=1)[0])
    return out.view(*x.shape[:-1], out.shape[1])


@torch.library.custom_op("sparsepretrain::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, x: Tensor, gelu: bool) -> Tensor:
    """Gradient of :func:`gated` with respect to x; ``grad`` is (…, h)."""
    rows = _as_2d(x)
    dx = torch.empty_like(rows)
    (value, gate), (dvalue, dgate) = rows.chunk(2, dim=1), dx.chunk(2, dim=1)
    dout = as_rows(_as_2d(grad), 1)
    launch_groups(_glu_backward_kernel, 1, 1, value, dvalue, gate, dgate, dout, GELU=gelu)
    return dx.view(x.shape)


gated_backward.register_fake(lambda grad, x, gelu: torch.empty_like(_as_2d(x)).view(x.shape))


def _setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
    x, ctx.gelu = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return gated_backward(grad, *ctx.saved_tensors, ctx.gelu), None


gated.register_autograd(_backward, setup_context=_setup_context)


def geglu(x: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.geglu`."""
    return gated(x, True)


def swiglu(x: Tensor) -> Tensor:
    """See :func:`sparsepretrain.kernels.swiglu`."""
    return gated(x, False)
