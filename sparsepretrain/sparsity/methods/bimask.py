"""Bi-Mask: separate masks for the forward and the backward weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity import MethodOptions, Operand, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.methods.srste import MaskedDecay
from sparsepretrain.sparsity.operand_table import DGRAD


@dataclass(slots=True, kw_only=True)
class BiMaskOptions(MethodOptions):
    """Options of Bi-Mask."""

    decay: Annotated[float, "≥ 0"] = 2.0e-4
    """λ of the masked decay on gradients, with the forward mask."""
    every: Annotated[int, "≥ 1"] = 100
    """Optimizer steps between two searches for a row permutation."""
    candidates: Annotated[int, "≥ 1"] = 100
    """Random permutations per search; the current one is always a candidate too."""


@register("method", "bimask")
class BiMask(MaskedDecay):
    """dX uses a second mask that is N:M along out_features after a permutation of the rows."""

    Options = BiMaskOptions
    options: BiMaskOptions
    summary = "forward and backward masks, rows permuted for the backward one"
    paper = "arXiv:2302.06058 (ICML 2023)"
    # no grouped convolutions: the permutation would mix rows of several groups
    layer_kinds = ("linear", "convolution", "bank", "transposed bank")
    needs_whole = True

    @property
    def sparse_row(self) -> Row:
        """Mb is N:M among permuted rows only, so B has no pattern along out_features as stored."""
        backward = Operand("Mb∘W (rows permuted)")
        return Row(self.nm("Mf∘W"), backward, J=self.decayed("Mf"))

    @property
    def multiples(self) -> tuple[int, int]:
        return self.options.m, self.options.m

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        """Return the identity, of each slice of a bank; the first search follows at once."""
        first, *_ = _slices(weight, state)
        identity = torch.arange(first.shape[1 - state.dim], device=weight.device)
        if state.slice_rows is None:
            return {"permutation": identity}
        return {"permutation": identity.repeat(len(weight) // state.slice_rows, 1)}

    def update_(self, weight: Tensor, state: LayerState) -> None:
        """Every ``every`` steps keep the permutation whose backward mask has the most ones."""
        if (self.schedule.step - self.schedule.start) % self.options.every or weight.is_meta:
            return  # shapes alone (dry runs) hold nothing to find, and take minutes
        parts = _slices(weight, state)
        permutations = [state.permutation] if state.slice_rows is None else [*state.permutation]
        count = self.options.candidates
        size = permutations[0].numel()
        draws = kernels.uniform_noise(state.key(DGRAD), count, size, 1, weight.device)[0]
        drawn = draws.argsort(dim=1, stable=True)  # the slices of a bank share the candidates
        for part, current in zip(parts, permutations, strict=True):
            rows = part if state.dim == 1 else part.t().contiguous()
            candidates = torch.cat([current[None], drawn])
            ones = kernels.bimask_ones(rows, candidates, *self.pattern)
            current.copy_(candidates[ones.argmax()])  # the first of equals

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        if state.slice_rows is None:
            return Projection(*self._project(weight, state.permutation, state.dim))
        pairs = zip(_slices(weight, state), state.permutation, strict=True)
        parts = [self._project(part, permutation, state.dim) for part, permutation in pairs]
        return Projection(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def _project(self, weight: Tensor, order: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return A(W), the mask and B(W) of one matrix."""
        rows = weight if dim == 1 else weight.t()
        parts = kernels.bimask_prune(rows, order, *self.pattern)
        forward, mask, backward = parts if dim == 1 else (part.t() for part in parts)
        return forward, mask, backward


def _slices(weight: Tensor, state: LayerState) -> tuple[Tensor, ...]:
    """Return the matrices of a bank, or the weight of a layer alone."""
    return (weight,) if state.slice_rows is None else weight.split(state.slice_rows)
