"""The three products of a layer, and the one autograd function that executes an operand policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from sparsepretrain.kernels import dequantize_fp8, quantize_fp8
from sparsepretrain.sparsity.fp8 import FP8Recipe, round_fp8
from sparsepretrain.sparsity.policy import DGRAD, WGRAD

if TYPE_CHECKING:
    from sparsepretrain.sparsity.state import LayerState


class LinearProducts(NamedTuple):
    """Y = X·Wᵀ + b for X (…, in_features) and operands W (out_features, in_features)."""

    dim: int
    """Axis of the stored weight that holds in_features: dW is laid out like the weight."""

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Y, shape (…, out_features)."""
        return F.linear(x, weight, bias)

    def dgrad(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """G·W, of ``shape``, that of X."""
        return grad.matmul(weight)

    def wgrad(self, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Gᵀ·X, of ``shape``, that of the stored weight."""
        rows, tokens = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return rows.t() @ tokens if self.dim == 1 else tokens.t() @ rows

    def bgrad(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum of G over the tokens, accumulated in ``dtype``."""
        return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=dtype)

    def tokens(self, grad: Tensor) -> Tensor:
        """G as (…, tokens of one sample, out_features)."""
        return grad

    def from_tokens(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        """Inverse of :meth:`tokens` for G of ``shape``."""
        return tokens


class ConvolutionProducts(NamedTuple):
    """Y = X ∗ W + b for X (N, C, H, W) and W (out_channels, in_channels / groups, kh, kw).

    The tokens are the output positions, in the order (N, H, W): wgrad reduces over them. Dgrad
    reduces over output channels, fprop over input channels, both at every kernel position.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Y, shape (N, out_channels, H', W')."""
        return F.conv2d(x, weight, bias, *self)

    def dgrad(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the input, of ``shape``."""
        return conv2d_input(shape, weight, grad, *self)

    def wgrad(self, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the weight, of ``shape``."""
        return conv2d_weight(x, shape, grad, *self)

    def bgrad(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum of G over the positions, accumulated in ``dtype``."""
        return grad.sum((0, 2, 3), dtype=dtype)

    def tokens(self, grad: Tensor) -> Tensor:
        """G as (N, H'·W', out_channels)."""
        return grad.flatten(2).transpose(1, 2)

    def from_tokens(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        """Inverse of :meth:`tokens` for G of ``shape``."""
        return tokens.transpose(1, 2).reshape(shape)


class SparseProducts(torch.autograd.Function):
    """Y = fprop(X, A); dX = dgrad(P(G), B); dW = wgrad(U(G), X)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        forward_weight: Tensor,
        backward_weight: Tensor | None,
        wgrad_scale: Tensor | None,
        clock: Any,
        state: LayerState | None,
        products: LinearProducts | ConvolutionProducts,
        recipe: FP8Recipe | None,
    ) -> Tensor:
        """Y in the dtype of ``x``.

        Args:
            ctx: of autograd.
            x: as the products want it; in the dtype of the operands, or any under ``recipe``.
            weight: the stored weight, which receives dW; its values are not used.
            bias: or None; added, and its gradient summed, in high precision under ``recipe``.
            forward_weight: A in the compute dtype; under ``recipe`` fp8 values in fp32.
            backward_weight: B; None: A.
            wgrad_scale: factor of dW; None: 1.
            clock: reading that the draws in the backward belong to.
            state: of the layer, for P and U; None: G as it is (dense phases).
            products: how this kind of layer multiplies.
            recipe: formats of simulated fp8; None: none.
        """
        # attributes, not only saved tensors: recomputation by activation checkpointing keeps them
        ctx.clock, ctx.state, ctx.products, ctx.recipe = clock, state, products, recipe
        ctx.x_dtype, ctx.weight_dtype, ctx.weight_shape = x.dtype, weight.dtype, weight.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        kept, scale = x, None
        if recipe is not None:
            kept, scale = quantize_fp8(x, recipe.backward)
            same = recipe.backward == recipe.forward
            x = dequantize_fp8(kept, scale) if same else round_fp8(x, recipe.forward)
        if backward_weight is None:
            backward_weight = forward_weight
        ctx.save_for_backward(kept, scale, backward_weight, wgrad_scale)
        if recipe is None:
            return products.fprop(x, forward_weight, bias)
        bias = None if bias is None else bias.float()
        return products.fprop(x, forward_weight, bias).to(ctx.x_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """DX, dW and db."""
        x, scale, backward_weight, wgrad_scale = ctx.saved_tensors
        products, recipe = ctx.products, ctx.recipe
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if need_db:
            wide = torch.promote_types(grad.dtype, torch.float32)
            db = products.bgrad(grad, wide).to(ctx.bias_dtype)
        if recipe is not None:  # P and U in high precision, rounded once
            x, grad = dequantize_fp8(x, scale), grad.float()
        pruned = _prune(ctx, grad) if need_dx else grad
        sampled = _sample(ctx, grad) if need_dw else grad
        if recipe is not None:
            same = pruned is sampled
            pruned = round_fp8(pruned, recipe.gradient) if need_dx else pruned
            if need_dw:
                sampled = pruned if same and need_dx else round_fp8(sampled, recipe.gradient)
        if need_dx:
            dx = products.dgrad(pruned, backward_weight, x.shape)
            dx = dx if recipe is None else dx.to(ctx.x_dtype)
        if need_dw:
            dw = products.wgrad(sampled.to(x.dtype), x, ctx.weight_shape).to(ctx.weight_dtype)
            dw = dw if wgrad_scale is None else dw * wgrad_scale
        return dx, dw, db, *[None] * 7


def _prune(ctx: Any, grad: Tensor) -> Tensor:
    """P(G)."""
    state: LayerState | None = ctx.state
    if state is None or not state.method.prunes_dgrad:
        return grad
    tokens = ctx.products.tokens(grad)
    rows = tokens.numel() // tokens.shape[-1]
    # one counter per token
    key = state.key(DGRAD, ctx.clock[0], state.first_counter(ctx.clock[1], rows))
    return ctx.products.from_tokens(state.method.dgrad_gradient(tokens, key), grad.shape)


def _sample(ctx: Any, grad: Tensor) -> Tensor:
    """U(G). Groups of four tokens never straddle a micro-batch."""
    state: LayerState | None = ctx.state
    if state is None or not state.method.samples_wgrad:
        return grad
    tokens = ctx.products.tokens(grad)
    length, features = tokens.shape[-2:] if tokens.dim() > 2 else (0, tokens.shape[-1])
    if length % 4:
        # a sample is filled with zero tokens, so that cutting the batch elsewhere changes nothing
        tokens = F.pad(tokens, (0, 0, 0, -length % 4))
    rows = tokens.reshape(-1, features)
    groups = -(-rows.shape[0] // 4)  # counted over the global batch, one counter each
    key = state.key(WGRAD, ctx.clock[0], state.first_counter(ctx.clock[1], groups, per=4))
    sampled = state.method.wgrad_gradient(rows, key).view(tokens.shape)
    if length % 4:
        sampled = sampled[..., :length, :]
    return ctx.products.from_tokens(sampled, grad.shape)
