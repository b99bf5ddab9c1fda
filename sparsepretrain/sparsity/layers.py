"""Sparse layers and their one autograd function.

Sparse layers are subclasses of the layers that they replace. The method defines the operands of
each matmul; :mod:`products` computes the matmuls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import attachments
from sparsepretrain.sparsity.clock import Moment
from sparsepretrain.sparsity.geometry import Geometry, Linear
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.loading import LoadableLayer
from sparsepretrain.sparsity.method import title
from sparsepretrain.sparsity.operand_table import DGRAD, WGRAD, G, X
from sparsepretrain.sparsity.products import Estimate, Matmul, Operands, Prepared, Products


class SparseProducts(torch.autograd.Function):
    """Y = fprop(Xf(X), A) + b; dX = dgrad(P(G), B); dW = wgrad(U(G), Xw(X))."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        bias: Tensor | None,
        operands: Operands,
        state: LayerState | None,
        geometry: Geometry,
        products: Products,
        clock: Moment,
    ) -> Tensor:
        """Return Y in the dtype of X.

        Args:
            x: input of the layer; (…, in_features) or (N, C, H, W).
            target: receives dW, in the layout of the stored weight; its values are not read.
            bias: added in fprop.
            operands: A, B and the factor of dW.
            state: gives Xf, Xw, P and U of the layer; None: X and G as they are.
            geometry: linear layer or convolution.
            products: compute the three matmuls.
            clock: (completed steps, micro-batch), which key the draws of the backward.
        """
        # Attributes keep the values of this forward when checkpointing recomputes saved tensors.
        ctx.clock, ctx.state, ctx.geometry, ctx.products = clock, state, geometry, products
        ctx.shapes = x.shape, target.shape
        ctx.dtypes = x.dtype, target.dtype, None if bias is None else bias.dtype
        fprop, _, wgrad = products
        xf, xw = _inputs(state, x)
        left = fprop.prepare(xf, "Xf")
        same = xw is xf and wgrad.format("Xw") == fprop.format("Xf")
        kept = left if same else wgrad.prepare(xw, "Xw")
        shape = *x.shape[:-1], geometry.out_features(target)
        y = fprop(Matmul("fprop", geometry, shape, x.dtype), left, operands.A, bias)
        b = operands.A if operands.B is None else operands.B
        ctx.kinds = b.kind, kept.kind
        # Saved tensors, although B is also in the cache of the layer: stored operands are rewritten
        # in place after a step, and autograd raises an error if this backward comes later.
        ctx.save_for_backward(b.data, b.scale, operands.wgrad_scale, kept.data, kept.scale)
        return y

    # Masks and draws are constants here, so second derivatives would be silently wrong.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return dX, dW and db."""
        b, b_scale, wgrad_scale, x, x_scale = ctx.saved_tensors
        state, geometry, (_, dgrad, wgrad) = ctx.state, ctx.geometry, ctx.products
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if state is not None and not torch.compiler.is_compiling():
            state.model.micro_batches.backward_runs()
        if need_db:
            # a sum over tokens in bf16 would lose most of its digits
            wide = torch.promote_types(grad.dtype, torch.float32)
            db = geometry.bgrad(grad, wide).to(ctx.dtypes[2])
        if need_dx:
            pruned = dgrad.prepare(_pruned(state, geometry, ctx.clock, grad), "P")
            matmul = Matmul("dgrad", geometry, ctx.shapes[0], grad.dtype)
            dx = dgrad(matmul, pruned, Prepared(ctx.kinds[0], b, b_scale)).to(ctx.dtypes[0])
        if need_dw:
            draw = partial(_sampled, state, geometry, ctx.clock)
            estimate = wgrad.prepare(Estimate(grad, draw), "U")
            matmul = Matmul("wgrad", geometry, ctx.shapes[1], torch.float32)
            dw = wgrad(matmul, estimate, Prepared(ctx.kinds[1], x, x_scale)).to(ctx.dtypes[1])
            dw = dw if wgrad_scale is None else dw * wgrad_scale
        return dx, dw, db, *[None] * 5


def _inputs(state: LayerState | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return Xf(X) and Xw(X); the same tensor if they are equal."""
    if state is None:
        return x, x
    method, row = state.method, state.method.phase.row
    seen = method.fprop_input(x) if row.Xf != X else x
    return seen, by_groups_of_tokens(x, method.wgrad_input) if row.Xw != X else x


def _pruned(state: LayerState | None, geometry: Geometry, clock: Moment, grad: Tensor) -> Tensor:
    """Return P(G)."""
    if state is None or state.method.phase.row.P == G:
        return grad
    tokens = geometry.tokens(grad)
    rows = tokens.numel() // tokens.shape[-1]  # one counter per token
    key = state.key_at(clock, DGRAD, rows)
    return geometry.from_tokens(state.method.dgrad_gradient(tokens, key), grad.shape)


def _sampled(
    state: LayerState | None, geometry: Geometry, clock: Moment, grad: Tensor, order: str | None
) -> Tensor:
    """Return U(G), in a memory order of :func:`kernels.mvue` if the method offers a choice.

    Groups of four tokens never straddle a micro-batch; each group has one counter.
    """
    if state is None or state.method.phase.row.U == G:
        return grad

    def sample(rows: Tensor) -> Tensor:
        key = state.key_at(clock, WGRAD, -(-rows.shape[0] // 4), per=4)
        options = {"order": order} if order and state.takes_order else {}
        return state.method.wgrad_gradient(rows, key, **options)

    return geometry.from_tokens(by_groups_of_tokens(geometry.tokens(grad), sample), grad.shape)


def by_groups_of_tokens(tokens: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``function`` to (…, tokens of a sample, features) as rows, in groups of four tokens.

    A sample whose length is no multiple of four is padded with zero tokens (197 to 200), so groups
    do not depend on how the batch is cut. A 2-D input is one sample.
    """
    length, features = tokens.shape[-2:] if tokens.dim() > 1 else (1, tokens.shape[-1])
    if not length % 4:
        return function(tokens.reshape(-1, features)).view(tokens.shape)
    filled = F.pad(tokens.view(*tokens.shape[:-2], length, features), (0, 0, 0, -length % 4))
    result = function(filled.reshape(-1, features)).view(filled.shape)
    return result[..., :length, :].reshape(tokens.shape)


class SparseLayer(LoadableLayer):
    """Mixin before a linear layer class: equal parameters, operands of the method."""

    in_dim: ClassVar[int] = 1
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return Y = X·A(W)ᵀ + b for X of shape (…, in_features)."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.weight.dtype
        state, training, weight = self.sparsity, self.training, self.weight
        model = state.model
        if not torch.compiler.is_compiling():
            model.sync()
            if training:
                model.micro_batches.layer_runs()
            if training and not (x.is_nested or state.products.is_final):
                state.try_products(weight, x.shape, dtype, bias=self.bias is not None)
        target: Tensor = weight
        operands: Operands | None
        if training and model.method.differentiable and model.method.phase.training:
            target, operands = state.cache.differentiable(weight, dtype)
        else:
            operands = state.cache.operands(weight, dtype, training)
        if not (training or weight.requires_grad or operands is None):
            attachments.warn_if_frozen_changed(self)
        if x.is_nested:
            return self._nested(x, operands)
        y: Tensor
        if operands is None:
            y = self.replaces.forward(self, x)
        else:
            padded, geometry = self.geometry(x.to(dtype) if autocast else x)
            products = state.products.now(dtype, training)
            own = state if training else None
            in_fp32 = autocast and products.fprop.rounds  # dequantized operands keep fp32
            with torch.autocast(device, enabled=False) if in_fp32 else nullcontext():
                y = SparseProducts.apply(
                    padded, target, self.bias, operands, own, geometry, products, model.clock.now()
                )
        residual: Tensor | None = model.method.residual(x, state)
        return y if residual is None else y + residual

    def _nested(self, x: Tensor, operands: Operands | None) -> Tensor:
        """Evaluate samples of several lengths, which nn.TransformerEncoder passes on."""
        if self.training or self.sparsity.method.residual(x[0], self.sparsity) is not None:
            raise ConfigError(
                "nested tensors are supported in evaluation, of methods without adapters: build "
                "nn.TransformerEncoder with enable_nested_tensor=False"
            )
        weight = operands.A.data if operands is not None else self.weight
        if operands is None and self.in_dim == 0:
            weight = weight.t()
        return F.linear(x, weight, self.bias)

    def geometry(self, x: Tensor) -> tuple[Tensor, Geometry]:
        """Return X, padded if the layer pads by itself, and the geometry of the matmuls."""
        return x, Linear(self.in_dim)

    def extra_repr(self) -> str:
        """Return the original representation and the method."""
        model = self.sparsity.model
        words = (super().extra_repr(), title(model.method), model.label)
        return ", ".join(filter(None, words))
