"""ASP-like one-shot pruning: dense training, then one mask that never changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Operand, Phase, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.operand_table import FPROP

TIED = 0.1
"""Share of tied groups above which a layer is named; of Gaussian weights in bf16 0.4 % tie."""
EXCEPTIONS = 0.1
"""Share of groups with too many entries below which the weight was meant to be N:M."""
PRUNED = 0.1
"""Share of exact zeros above which the weight was pruned."""


@dataclass(slots=True, kw_only=True)
class ASPOptions(MethodOptions):
    """Options of one-shot pruning."""

    at: Annotated[float, "[0, 1)"] = 0.5
    """When the zeros are written, as a fraction of the run; 0: before the first forward."""


class LayerMask(Method):
    """Keep a mask in the layer, packed."""

    def __init__(self, options: MethodOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        # layer, its groups, how many of them tie and have more than N non-zeros, and its zeros
        self._counts: list[tuple[str, int, Tensor]] = []

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        return {"mask": kernels.pack_rows(weight.new_zeros(weight.shape).bool())}

    def keep(self, mask: Tensor, state: LayerState) -> None:
        """Keep ``mask``, bool, from now on."""
        state.mask.copy_(kernels.pack_rows(mask))

    def choose(self, weight: Tensor, state: LayerState) -> Tensor:
        """Return the mask of the largest magnitudes, to be kept for good; equal ones are drawn.

        The tie rule of :func:`kernels.nm_mask` would give all groups of a zero weight one mask, and
        projections are often initialized with zeros (nanochat).
        """
        n, m = self.pattern
        magnitude = kernels.widen(weight).abs()
        dropped, kept = kernels.boundary_magnitudes(weight, n, m, dim=state.dim)
        least = kept.repeat_interleave(m, state.dim)  # smallest kept magnitude of the group
        draws = kernels.uniform_like(weight, state.key(FPROP), state.dim)
        score = torch.where(magnitude == least, 0.5 + draws / 4, 0.0)
        score = torch.where((magnitude > least) | magnitude.isnan(), 1.0, score)
        if not weight.is_meta:
            nonzeros = kernels.nonzeros_per_group(weight, m, dim=state.dim)
            zeros = weight.numel() - nonzeros.sum()
            counts = [(dropped == kept).sum(), (nonzeros > n).sum(), zeros]
            self._counts.append((state.layer_name, kept.numel(), torch.stack(counts)))
        return kernels.nm_mask(score, n, m, dim=state.dim)

    def take_remarks(self) -> dict[str, list[str]]:
        """Remark on layers with many tied groups, and on a few groups with too many entries."""
        counted, self._counts = self._counts, []
        n, m = self.pattern
        if counted and n < m:
            rows = torch.stack([each.to(counted[0][2].device) for *_, each in counted]).tolist()
            for (layer, groups, _), (tied, full, zeros) in zip(counted, rows, strict=True):
                pruned = PRUNED * groups * m < zeros < groups * m
                if tied > TIED * groups and pruned:
                    self.remark(
                        f"some zeros of pruned weights, which are sparser than {n}:{m}, train "
                        "unless keep_zeros() (init.mask=zeros) keeps them:",
                        layer,
                    )
                elif tied > TIED * groups:
                    self.remark(
                        "fixed masks are random where magnitudes are equal, in many groups of",
                        layer,
                    )
                if 0 < full < EXCEPTIONS * groups:
                    self.remark(
                        f"pruned groups of weights that are {n}:{m} otherwise, of",
                        f"{layer} ({full:,} of {groups:,} groups had more than {n} non-zeros)",
                    )
                elif full and pruned:
                    self.remark(
                        f"pruned weights whose zeros have another pattern than {n}:{m},",
                        f"{layer} ({full:,} of {groups:,} groups had more than {n} non-zeros)",
                    )
        return super().take_remarks()


class StoredMask(LayerMask):
    """A = M∘W with a mask that the layer keeps; what it drops receives no gradient."""

    reads_packed_masks = True

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        return Projection(kernels.apply_mask(weight, state.mask, out=state.out), state.mask)

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        kernels.apply_mask(grad, mask, out=grad)


@register("method", "asp")
class ASP(StoredMask):
    """Dense until ``at``, then one mask; pruned weights receive no gradient.

    ASP writes the zeros into the weight. Here they are projected, which is the same function and
    the same updates of the kept weights; pruned ones still move by momentum and weight decay.
    """

    Options = ASPOptions
    options: ASPOptions
    summary = "magnitude mask once, at a chosen step; kept from then on"
    paper = "arXiv:2104.08378"
    finetuning = FineTuning(options={"at": 0.0}, zero="at")

    def __init__(self, options: ASPOptions, total_steps: int | None = None) -> None:
        super().__init__(options, total_steps)
        self._at = self.schedule.begin_of(options.at, "at")

    @property
    def sparse_row(self) -> Row:
        return Row(A=self.nm("M∘W"), J=Operand("M∘dW"))

    @property
    def fixed_from(self) -> int:
        return self._at

    @property
    def update_needs_whole(self) -> bool:
        return self.schedule.step == self._at  # ties are drawn by position

    def phase_of(self, step: int) -> Phase:
        phase = Method.phase_of(self, step)
        if phase.training and step < self._at:
            return Phase(False, False, f"until step {self._at} (at)")
        return phase

    def update_(self, weight: Tensor, state: LayerState) -> None:
        if self.schedule.step == self._at:
            self.keep(self.choose(weight, state), state)
