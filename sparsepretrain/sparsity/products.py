"""The one autograd function: it asks the method what each product sees, the execution for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsepretrain.sparsity.execution import Execution, Geometry, Like, Operands
from sparsepretrain.sparsity.method import DGRAD, WGRAD

if TYPE_CHECKING:
    from sparsepretrain.sparsity.state import LayerState


class SparseProducts(torch.autograd.Function):
    """Y = fprop(Xf(X), A); dX = dgrad(P(G), B); dW = wgrad(U(G), Xw(X))."""

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
        how: Geometry,
        execution: Execution,
    ) -> Tensor:
        """Y in the dtype of ``x``; ``weight``, as stored, receives dW, its values are not used.

        ``clock`` is the reading that the draws in the backward belong to, ``state`` gives Xf, Xw, P
        and U of the layer; None: X and G as they are.
        """
        # attributes, not only saved tensors: recomputation by activation checkpointing keeps them
        ctx.clock, ctx.state, ctx.how, ctx.execution = clock, state, how, execution
        ctx.x_like, ctx.weight_like = Like(x.shape, x.dtype), Like(weight.shape, weight.dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        xs = (x, x) if state is None else _inputs(state, x)
        operands = Operands(forward_weight, backward_weight, wgrad_scale)
        y, kept = execution.fprop(how, xs, operands, bias)
        dgrad_weight = forward_weight if backward_weight is None else backward_weight
        ctx.save_for_backward(dgrad_weight, wgrad_scale, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """DX, dW and db."""
        backward_weight, wgrad_scale, *kept = ctx.saved_tensors
        how, execution, state = ctx.how, ctx.execution, ctx.state
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if state is not None and not torch.compiler.is_compiling():
            state.model.backward_runs()
        if need_db:
            wide = torch.promote_types(grad.dtype, torch.float32)
            db = how.bgrad(grad, wide).to(ctx.bias_dtype)
        if need_dx:
            pruned = grad if state is None else _pruned(state, how, ctx.clock, grad)
            dx = execution.dgrad(how, pruned, backward_weight, ctx.x_like)
        if need_dw:

            def estimate(grad: Tensor) -> Tensor:
                return grad if state is None else _sampled(state, how, ctx.clock, grad)

            dw = execution.wgrad(how, grad, estimate, tuple(kept), ctx.weight_like)
            dw = dw if wgrad_scale is None else dw * wgrad_scale
        return dx, dw, db, *[None] * 7


def _inputs(state: LayerState, x: Tensor) -> tuple[Tensor, Tensor]:
    """Xf(X) and Xw(X); one tensor where they are the same."""
    method, (fprop, wgrad, _, _) = state.method, state.method.changes
    seen = method.fprop_input(x) if fprop else x
    return seen, by_groups_of_tokens(x, method.wgrad_input) if wgrad else x


def _pruned(state: LayerState, how: Geometry, clock: Any, grad: Tensor) -> Tensor:
    """P(G)."""
    if not state.method.changes[2]:
        return grad
    tokens = how.tokens(grad)
    rows = tokens.numel() // tokens.shape[-1]  # one counter per token
    key = state.key_at(clock, DGRAD, rows)
    return how.from_tokens(state.method.dgrad_gradient(tokens, key), grad.shape)


def _sampled(state: LayerState, how: Geometry, clock: Any, grad: Tensor) -> Tensor:
    """U(G). Groups of four tokens never straddle a micro-batch; each has one counter."""
    if not state.method.changes[3]:
        return grad

    def sample(rows: Tensor) -> Tensor:
        key = state.key_at(clock, WGRAD, -(-rows.shape[0] // 4), per=4)
        return state.method.wgrad_gradient(rows, key)

    return how.from_tokens(by_groups_of_tokens(how.tokens(grad), sample), grad.shape)


def by_groups_of_tokens(tokens: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function`` of (…, tokens of a sample, features) as rows, in groups of four tokens.

    A sample of another length is filled with zero tokens (197 become 200), so that cutting the
    batch elsewhere changes no group.
    """
    length, features = tokens.shape[-2:] if tokens.dim() > 2 else (0, tokens.shape[-1])
    filled = F.pad(tokens, (0, 0, 0, -length % 4)) if length % 4 else tokens
    result = function(filled.reshape(-1, features)).view(filled.shape)
    return result[..., :length, :] if length % 4 else result
