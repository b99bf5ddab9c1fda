"""Bi-Mask: separate masks for the forward and the backward weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.errors import Problems
from sparsepretrain.registry import register
from sparsepretrain.sparsity import MethodOptions, Operand, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.methods.srste import MaskedDecay
from sparsepretrain.sparsity.operand_table import DGRAD


@dataclass(slots=True, kw_only=True)
class BiMaskOptions(MethodOptions):
    """Options of Bi-Mask; the pattern is 2:4."""

    decay: Annotated[float, "≥ 0"] = 2.0e-4
    """λ of the masked decay on gradients, with the forward mask."""
    every: Annotated[int, "≥ 1"] = 100
    """Optimizer steps between two searches for a row permutation."""
    candidates: Annotated[int, "≥ 1"] = 100
    """Random permutations per search; the current one is always a candidate too."""

    def problems(self) -> Problems:
        yield from MethodOptions.problems(self)
        yield from self.two_of_four("Bi-Mask")


@register("method", "bimask")
class BiMask(MaskedDecay):
    """dX uses a second mask that is 2:4 along out_features after a permutation of the rows."""

    Options = BiMaskOptions
    options: BiMaskOptions
    summary = "forward and backward masks, rows permuted for the backward one"
    paper = "arXiv:2302.06058 (ICML 2023)"
    layer_kinds = ("linear", "convolution")  # the permutation mixes rows of all groups
    needs_whole = True

    @property
    def sparse_row(self) -> Row:
        """Mb is 2:4 among permuted rows only, so B has no pattern along out_features as stored."""
        backward = Operand("Mb∘W (rows permuted)")
        return Row(self.nm("Mf∘W"), backward, J=self.decayed("Mf"))

    @property
    def multiples(self) -> tuple[int, int]:
        return 4, 4

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        """Return the identity; the first search follows at once."""
        return {"permutation": torch.arange(weight.shape[1 - state.dim], device=weight.device)}

    def update_(self, weight: Tensor, state: LayerState) -> None:
        """Every ``every`` steps keep the permutation whose backward mask has the most ones."""
        if (self.schedule.step - self.schedule.start) % self.options.every or weight.is_meta:
            return  # shapes alone (dry runs) hold nothing to find, and take minutes
        rows = weight if state.dim == 1 else weight.t().contiguous()
        count = self.options.candidates
        size = rows.shape[0]
        draws = kernels.uniform_noise(state.key(DGRAD), count, size, 1, weight.device)[0]
        current = state.permutation
        candidates = torch.cat([current[None], draws.argsort(dim=1, stable=True)])
        best = kernels.bimask_ones(rows, candidates).argmax()  # the first of equals
        current.copy_(candidates[best])

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        rows = weight if state.dim == 1 else weight.t()
        parts = kernels.bimask_prune(rows, state.permutation)
        forward, mask, backward = parts if state.dim == 1 else (part.t() for part in parts)
        return Projection(forward, mask, backward)
