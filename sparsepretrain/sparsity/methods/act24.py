"""Activation sparsity: two of every four activations are kept; weights stay dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.errors import Problems
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Operand, Row
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.operand_table import X


@dataclass(slots=True, kw_only=True)
class Act24Options(MethodOptions):
    """Options of activation sparsity; n:m is the pattern of the activations."""

    targets: str | list[str] = "ffn_out"
    """Layers to prune; default: those behind the activation, a squared ReLU in the paper."""
    fprop: Literal["in", "none"] = "in"
    """Axis along which the input of fprop is pruned: in_features."""
    wgrad: Literal["tokens", "none"] = "tokens"
    """Axis along which the input of wgrad is pruned: groups of tokens."""

    def problems(self) -> Problems:
        yield from MethodOptions.problems(self)
        if self.m > 0 and self.m != 4 and self.wgrad == "tokens":
            yield "m", f"must be 4 with wgrad=tokens (groups of four tokens), got {self.m}"


@register("method", "act24")
class Act24(Method):
    """Y = N:M(X)·Wᵀ, dW = Gᵀ·N:M(X): the largest activations of every group are kept.

    Demonstrates matmuls with a pruned input, as in Haziza et al., arXiv:2503.16672 (squared
    ReLU, FFN of a transformer). It reproduces no paper: the published recipe also permutes tokens,
    keeps the densest 5 % of the features dense and prunes dX. Evaluation sees all activations, as a
    densified model does. Linear layers only.
    """

    Options = Act24Options
    options: Act24Options
    summary = "2:4 activations by magnitude: along in-features (fprop), along tokens (wgrad)"
    paper = "arXiv:2503.16672 (slot only)"
    finetuning = FineTuning("dense")
    layer_kinds = ("linear", "bank", "transposed bank")

    @property
    def sparse_row(self) -> Row:
        fprop = self.nm("N:M(X)") if self.options.fprop == "in" else X
        wgrad = Operand("N:M(X)", (self.options.n, 4), "tokens")
        return Row(Xf=fprop, Xw=wgrad if self.options.wgrad == "tokens" else X)

    def fprop_input(self, x: Tensor) -> Tensor:
        return kernels.nm_prune(x, *self.pattern, dim=-1)[0]

    def wgrad_input(self, x: Tensor) -> Tensor:
        return kernels.nm_prune(x, *self.pattern, dim=0)[0]
