"""ProxSparse: weights learn where zeros belong; the original weights are masked there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.errors import Problems
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Phase, Projection, Row
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.methods.maskpro import grouped, ungrouped

PASSES = 100
"""Passes over the coordinates of a group, at most."""


@dataclass(slots=True, kw_only=True)
class ProxSparseOptions(MethodOptions):
    """Options of ProxSparse."""

    targets: str | list[str] = "all"
    """Layers, see :class:`MethodOptions`; all linear layers of the blocks get masks."""
    strength: Annotated[float, "> 0"] = 0.25
    """λ of the regularizer (Llama-2-7B); the learning rate does not multiply it."""
    frozen_strength: Annotated[float, "≥ 0"] = 0.0
    """λ₂ of the pull of each weight to 0 or to its original value; 0: none."""
    frozen_epsilon: Annotated[float, "> 0"] = 0.1
    """ε of that pull: original weights far below it hardly feel it."""

    def problems(self) -> Problems:
        yield from MethodOptions.problems(self)
        if 1 <= self.n <= self.m and (self.n, self.m) != (2, 4):
            yield "n", f"must be 2 with m=4: the regularizer is that of 2:4, got {self.n}:{self.m}"
        if self.window.start > 0 or self.window.stop < 1:
            yield "window", "must be the whole run: evaluation always masks the original weights"


@register("method", "proxsparse")
class ProxSparse(Method):
    """Train W dense while a regularizer pulls groups to 2:4; then mask the weights of the start.

    ProxSparse (arXiv:2502.00258). Each step of the optimizer is followed by the proximal operator
    of λ·Σ |w_i·w_j·w_k| over the four triples of each group, which is 0 for 2:4 weights:
    :func:`proximal_24`. Evaluation multiplies by the original weights, ``state.original``, under
    the mask of the two largest magnitudes of the learned ones. All other Parameters are frozen.

    With ``frozen_strength`` λ₂ > 0, training also minimizes

        λ₂ Σ (W·(W - W₀)/(W₀ + ε·sign(W₀)))²   with sign(0) = 1,

    which is 0 where a weight is pruned or keeps its original value W₀ (``prox_linear.py`` of the
    authors' code, in its scripts named ``full``).
    """

    Options = ProxSparseOptions
    options: ProxSparseOptions
    summary = "a proximal step regularizes each group to 2:4; its mask is for the first weights"
    paper = "arXiv:2502.00258 (ICML 2025)"
    finetuning = FineTuning("asp")
    trains = "weights"
    trains_another_weight = True
    dense_training = "training multiplies by the learned weights, which are dense"

    @property
    def sparse_row(self) -> Row:
        return Row(self.nm("M∘W₀"))

    def phase_of(self, step: int) -> Phase:
        return super().phase_of(step)._replace(row=Row())

    @property
    def reads_initial_weights(self) -> bool:
        return True

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        return {"original": weight.clone()}

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        mask = self.mask(weight, state.dim)
        return Projection(kernels.apply_mask(state.original, mask), mask)

    def project_in_training(self, weight: Tensor, state: LayerState) -> Projection:
        return Projection(None, None)

    @property
    def has_penalty(self) -> bool:
        return self.options.frozen_strength > 0

    def penalty_gradients(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        original = state.original
        epsilon = self.options.frozen_epsilon
        scale = original + torch.where(original < 0, -epsilon, epsilon)
        moved = weight * (weight - original) / scale
        slope = (2 * weight - original) / scale
        return {"weight": 2 * self.options.frozen_strength * moved * slope}

    def proximal_step(self, weight: Tensor, state: LayerState) -> Tensor:
        return proximal_24(weight, self.options.strength, dim=state.dim)


def proximal_24(x: Tensor, strength: float, *, dim: int = -1) -> Tensor:
    """Return the proximal operator of the 2:4 regularizer of ProxSparse (arXiv:2502.00258).

    For each group z of four it minimizes ½‖w - z‖² + λ·Σ |w_i·w_j·w_k| over the four triples. A
    minimum keeps the largest magnitudes: two of them, unchanged, or three or four of them, shrunk
    by coordinate descent from z. The best of the three is returned.

    Args:
        x: fp32 or wider; its size along ``dim`` is a multiple of 4.
        strength: λ ≥ 0.
        dim: axis of the groups.

    Returns:
        tensor of the same shape.
    """
    groups = grouped(x, 4, dim)
    z, order = groups.abs().sort(stable=True, dim=-1, descending=True)
    two = z * (torch.arange(4, device=x.device) < 2)
    found = [two, _descend(z, 3, strength), _descend(z, 4, strength)]
    values = torch.stack([_objective(w, z, strength) for w in found])
    best = values.argmin(0)[..., None]  # of equal ones the sparsest
    kept = torch.where(best == 0, found[0], torch.where(best == 1, found[1], found[2]))
    unsorted = torch.zeros_like(groups).scatter_(-1, order, kept)
    return ungrouped(unsorted.copysign(groups), dim)


def _descend(z: Tensor, count: int, strength: float) -> Tensor:
    """Minimize over the first ``count`` entries of sorted magnitudes; the others are 0."""
    columns = [z[..., i].clone() for i in range(count)]
    # Each group stops by itself, so that its result does not depend on the groups next to it: a
    # shard of a weight gets the bits of the whole weight.
    moves = torch.ones_like(z[..., 0], dtype=torch.bool)
    limit = torch.finfo(z.dtype).eps * z[..., 0]
    for _ in range(PASSES):
        before = list(columns)
        for k in range(count):
            others = [w for i, w in enumerate(columns) if i != k]
            pairs = sum(a * b for i, a in enumerate(others) for b in others[:i])
            new = (z[..., k] - strength * pairs).clamp(min=0)
            columns[k] = torch.where(moves, new, columns[k])
        moved = [(new - old).abs() for new, old in zip(columns, before, strict=True)]
        moves = torch.stack(moved).amax(0) > limit
        # A wait on a GPU, but few of the hundred passes are needed where products of weights are
        # far below 1, and each pass launches more than ten kernels.
        if not moves.any():
            break
    return torch.stack([*columns, *[torch.zeros_like(z[..., 0])] * (4 - count)], -1)


def _objective(w: Tensor, z: Tensor, strength: float) -> Tensor:
    a, b, c, d = w.unbind(-1)
    triples = a * b * c + a * b * d + a * c * d + b * c * d
    return (w - z).square().sum(-1) / 2 + strength * triples
