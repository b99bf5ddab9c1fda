"""Sparse layers and their one autograd function.

Sparse layers are subclasses of the layers that they replace. The method defines the operands of
each matmul; :mod:`sparsepretrain.sparsity.matmuls` multiplies them.
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
from sparsepretrain.sparsity.clock import ClockReading, MicroBatches
from sparsepretrain.sparsity.engine.operands import LayerOperands
from sparsepretrain.sparsity.engine.weights import SparseWeight, is_dtensor
from sparsepretrain.sparsity.matmuls.geometry import Geometry, Linear
from sparsepretrain.sparsity.matmuls.three import Estimate, MatmulCall, Matmuls, Operands, Prepared
from sparsepretrain.sparsity.method import Method
from sparsepretrain.sparsity.operand_table import DGRAD, WGRAD, G, Operand, X


class SparseMatmul(torch.autograd.Function):
    """Y = fprop(Xf(X), A) + b; dX = dgrad(P(G), B); dW = wgrad(U(G), Xw(X)).

    The forward multiplies by A; the gradient of A is returned for ``target``. For most methods this
    is the stored weight W, although A was computed from W without autograd: the straight-through
    estimator. A differentiable method passes A itself, and autograd goes on from there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        bias: Tensor | None,
        operands: Operands,
        layer_operands: LayerOperands | None,
        geometry: Geometry,
        matmuls: Matmuls,
        reading: ClockReading,
        call: int,
        micro_batches: MicroBatches | None,
    ) -> Tensor:
        """Return Y in the dtype of X.

        Args:
            x: input of the layer; (…, in_features) or (N, C, H, W).
            target: receives dW, in the layout of the stored weight; its values are not read.
            bias: added in fprop.
            operands: A, B and the factor of dW.
            layer_operands: their method computes Xf, Xw, P and U; None: X and G are unchanged.
            geometry: linear layer or convolution.
            matmuls: compute the three matmuls.
            reading: (completed steps, micro-batch), which key the draws of the backward.
            call: number of the call within the micro-batch, which keys them too.
            micro_batches: notified when the backward runs; None in compiled graphs and evaluation.
        """
        # Attributes of ctx stay those of this forward when activation checkpointing computes the
        # saved tensors again: the draws of the backward must not change.
        ctx.reading = reading
        ctx.call = call
        ctx.micro_batches = micro_batches
        ctx.layer_operands = layer_operands
        ctx.geometry = geometry
        ctx.matmuls = matmuls
        ctx.shapes = x.shape, target.shape
        ctx.dtypes = x.dtype, target.dtype, None if bias is None else bias.dtype
        fprop, _, wgrad = matmuls
        xf, xw = _inputs(layer_operands, x)
        left = fprop.prepare(xf, "Xf")
        same = xw is xf and wgrad.format("Xw") == fprop.format("Xf")
        saved_x = left if same else wgrad.prepare(xw, "Xw")
        shape = *x.shape[:-1], geometry.out_features(target)
        y = fprop(MatmulCall("fprop", geometry, shape, x.dtype), left, operands.A, bias)
        b = operands.A if operands.B is None else operands.B
        ctx.kinds = b.kind, saved_x.kind
        # Saved tensors, although B is also in the cache of the layer: stored operands are rewritten
        # in place after a step, and autograd raises an error if this backward comes later. Under
        # FSDP2 this memory is empty until the gather before the backward fills it again.
        ctx.save_for_backward(b.data, b.scale, operands.wgrad_scale, saved_x.data, saved_x.scale)
        return y

    # Masks and draws are constants here, so second derivatives would be silently wrong.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return dX, dW and db."""
        b, b_scale, wgrad_scale, x, x_scale = ctx.saved_tensors
        layer_operands = ctx.layer_operands
        geometry = ctx.geometry
        _, dgrad, wgrad = ctx.matmuls
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if ctx.micro_batches is not None:
            ctx.micro_batches.backward_runs()
        if need_db:
            # a sum over tokens in bf16 would lose most of its digits
            wide = torch.promote_types(grad.dtype, torch.float32)
            db = geometry.bgrad(grad, wide).to(ctx.dtypes[2])
        if need_dx:
            p = _dgrad_gradient(layer_operands, geometry, ctx.reading, ctx.call, grad)
            call = MatmulCall("dgrad", geometry, ctx.shapes[0], grad.dtype)
            weight = Prepared(ctx.kinds[0], b, b_scale)
            dx = dgrad(call, dgrad.prepare(p, "P"), weight).to(ctx.dtypes[0])
        if need_dw:
            # The matmul draws U(G) when it prepares it, in the memory order that it reads.
            draw = partial(_wgrad_gradient, layer_operands, geometry, ctx.reading, ctx.call)
            u = wgrad.prepare(Estimate(grad, draw), "U")
            call = MatmulCall("wgrad", geometry, ctx.shapes[1], torch.float32)
            dw = wgrad(call, u, Prepared(ctx.kinds[1], x, x_scale)).to(ctx.dtypes[1])
            dw = dw if wgrad_scale is None else dw * wgrad_scale
        return dx, dw, db, None, None, None, None, None, None, None


def _inputs(layer_operands: LayerOperands | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return Xf(X) and Xw(X); the same tensor if they are equal."""
    if layer_operands is None:
        return x, x
    method = layer_operands.method
    row = method.phase.row
    for_fprop = method.fprop_input(x) if row.Xf != X else x
    if row.Xw == X:
        return for_fprop, x
    return for_fprop, by_groups_of_tokens(x, method.wgrad_input, _tokens_per_group(row.Xw))


def _dgrad_gradient(
    layer_operands: LayerOperands | None,
    geometry: Geometry,
    reading: ClockReading,
    call: int,
    grad: Tensor,
) -> Tensor:
    """Return P(G)."""
    if layer_operands is None or layer_operands.method.phase.row.P == G:
        return grad
    tokens = geometry.tokens(grad)
    rows = tokens.numel() // tokens.shape[-1]  # one counter per token
    key = layer_operands.state.key_at(reading, DGRAD, rows, call=call)
    return geometry.from_tokens(layer_operands.method.dgrad_gradient(tokens, key), grad.shape)


def _wgrad_gradient(
    layer_operands: LayerOperands | None,
    geometry: Geometry,
    reading: ClockReading,
    call: int,
    grad: Tensor,
    order: str | None,
) -> Tensor:
    """Return U(G), in the memory order ``order`` if the method uses the default MVUE.

    No group of tokens spans two samples; each group has one counter.
    """
    if layer_operands is None or layer_operands.method.phase.row.U == G:
        return grad
    method = layer_operands.method
    m = _tokens_per_group(method.phase.row.U)
    # `capacity` counts the tokens of samples that are padded to multiples of four; padded to eight,
    # they have more groups than an eighth of it.
    per = m if 4 % m == 0 else 1
    is_mvue = type(method).wgrad_gradient is Method.wgrad_gradient

    def sample(rows: Tensor) -> Tensor:
        groups = -(-rows.shape[0] // m)
        key = layer_operands.state.key_at(reading, WGRAD, groups, per=per, call=call)
        if is_mvue:
            return method.wgrad_gradient(rows, key, order)
        return method.wgrad_gradient(rows, key)

    sampled = by_groups_of_tokens(geometry.tokens(grad), sample, m)
    return geometry.from_tokens(sampled, grad.shape)


def _tokens_per_group(operand: Operand) -> int:
    """Return M of an operand that is N:M along tokens; 4 if the method declares no such pattern."""
    return operand.pattern[1] if operand.pattern and operand.axis == "tokens" else 4


def by_groups_of_tokens(tokens: Tensor, function: Callable[[Tensor], Tensor], m: int) -> Tensor:
    """Apply ``function`` to (…, tokens of a sample, features) as rows, in groups of M tokens.

    A sample whose length is no multiple of M is padded with zero tokens (197 to 200 for M = 4), so
    groups do not depend on how the batch is cut. A 2-D input is one sample.
    """
    length, features = tokens.shape[-2:] if tokens.dim() > 1 else (1, tokens.shape[-1])
    if not length % m:
        return function(tokens.reshape(-1, features)).view(tokens.shape)
    filled = F.pad(tokens.view(*tokens.shape[:-2], length, features), (0, 0, 0, -length % m))
    result = function(filled.reshape(-1, features)).view(filled.shape)
    return result[..., :length, :].reshape(tokens.shape)


class SparseLayer(SparseWeight):
    """Mixin before a linear layer class: equal parameters, operands of the method."""

    casts_weight: ClassVar[bool] = False
    """True if the replaced class casts weight and bias to the dtype of the input."""
    fixed_attributes: frozenset[str] = frozenset()
    """Attributes that the replaced forward reads; setting them would change nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Return Y = X·A(W)ᵀ + b for X of shape (…, in_features), called ``input`` as in torch."""
        x = input
        dtype = self._matmul_dtype(x)
        micro_batches = None
        if not torch.compiler.is_compiling():
            self.follow_counters()
            if self.training:
                micro_batches = self._begin_training_forward(x, dtype)
            elif torch.is_grad_enabled():
                self.operands.ran_in_evaluation = True
        target, operands = self.operands.get(self.weight, dtype, self.training)
        if x.is_nested:
            return self._nested(x, operands)
        y: Tensor
        if operands is None:
            y = self.replaces.forward(self, x)
        else:
            y = self._multiply(x, target, operands, dtype, micro_batches)
        if self.casts_weight:
            x = x.to(self.weight.dtype)
        method = self.operands.method
        residual: Tensor | None = None
        if not method.without_residual:
            residual = method.residual(x, self.sparsity)
        return y if residual is None else y + residual.to(y.dtype)

    def _multiply(
        self,
        x: Tensor,
        target: Tensor,
        operands: Operands,
        dtype: torch.dtype,
        micro_batches: MicroBatches | None,
    ) -> Tensor:
        """Compute fprop with prepared weights; ``target`` receives the gradient of wgrad."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        padded, geometry = self.geometry(x.to(dtype) if autocast else x)
        matmuls = self.operands.matmuls.now(dtype, self.training)
        layer_operands = self.operands if self.training else None
        reading = self.sparse_model.clock.read()
        # in this order: a graph that reads the switch would be compiled again after the first step
        if not torch.compiler.is_compiling() and self.sparse_model.watches_reads:
            target = self.operands.watch(target) if target is self.weight else target
        # Compiled calls share number 0: a number would be a constant of the graph.
        call = 0 if micro_batches is None else self.operands.number_call()
        bias = self.bias
        if self.casts_weight and bias is not None:
            bias = bias.to(x.dtype)
        in_fp32 = autocast and matmuls.fprop.rounds  # dequantized operands keep fp32
        with torch.autocast(device, enabled=False) if in_fp32 else nullcontext():
            y: Tensor = SparseMatmul.apply(
                padded,
                target,
                bias,
                operands,
                layer_operands,
                geometry,
                matmuls,
                reading,
                call,
                micro_batches,
            )
        return y

    def _begin_training_forward(self, x: Tensor, dtype: torch.dtype) -> MicroBatches:
        """Begin a micro-batch if this forward is its first; try sparse matmuls once."""
        self.operands.has_run = True
        micro_batches = self.sparse_model.micro_batches
        micro_batches.layer_runs()
        if not (x.is_nested or self.operands.matmuls.is_final):
            has_bias = self.bias is not None
            self.operands.try_matmuls(self.weight, x.shape, dtype, bias=has_bias)
        return micro_batches

    def _matmul_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of the matmuls: that of autocast, of a cast weight, or of the weight."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return x.dtype if self.casts_weight else self.weight.dtype

    def _nested(self, x: Tensor, operands: Operands | None) -> Tensor:
        """Evaluate samples of several lengths, which nn.TransformerEncoder passes on."""
        if self.training or self.operands.method.residual(x[0], self.sparsity) is not None:
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

    def become_dense(self) -> None:
        super().become_dense()
        self.__dict__.pop("fixed_attributes", None)
        self.__class__ = self.replaces  # type: ignore[assignment]

    def register_parameter(self, name: str, param: Any) -> None:
        """Refuse a weight that tensor parallelism shards; ``fully_shard`` does not call this."""
        if is_dtensor(param) and not is_dtensor(self._parameters.get(name)):
            raise ConfigError(
                f"{name} of a sparse {self.replaces.__name__} was sharded by something other than "
                "fully_shard: tensor parallelism of sparse layers is not supported"
            )
        super().register_parameter(name, param)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.operands.rows.is_sharded and not keep_vars:
            # writers of files need memory, which the wrapper that FSDP gathers does not have
            from sparsepretrain.sparsity.fsdp.sharding import unwrapped

            destination[f"{prefix}weight"] = unwrapped(destination[f"{prefix}weight"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        loaded = self.load(state_dict, f"{prefix}weight", f"{prefix}sparsity.")
        super()._load_from_state_dict(state_dict, prefix, *rest)
        loaded()
