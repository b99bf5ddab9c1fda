"""Proof that the weights which evaluation uses have the pattern they claim."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsepretrain.sparsity.sparsifier import Sparsifier


@dataclass(slots=True, kw_only=True)
class Proof:
    """Counts over all sparse layers; :attr:`holds` says whether every group is N:M."""

    pattern: str
    sparse: bool  # False: a dense method or phase, nothing to prove
    why_dense: str = ""  # the dense phase, if it is one
    groups: int = 0
    zeros: int = 0  # exact zeros
    entries: int = 0
    violations: tuple[str, ...] = ()  # layers with a group of more than N, or with a -0.0

    @property
    def holds(self) -> bool:
        """Every group of every layer has at most N non-zeros, and all zeros are +0.0."""
        return self.sparse and not self.violations

    def __str__(self) -> str:
        if not self.sparse:
            return f"dense weights {self.why_dense}".rstrip()
        if self.violations:
            return f"NOT {self.pattern}: {', '.join(self.violations)}"
        share = self.zeros / self.entries
        return f"{self.pattern} in all {self.groups:,} groups, {share:.1%} exact zeros"


@torch.no_grad()
def prove(sparsifier: Sparsifier) -> Proof:
    """Count non-zeros per group of M along in_features in every forward weight."""
    n, m = sparsifier.method.pattern
    phase = sparsifier.method.phase
    why = "" if phase.evaluation else phase.why
    proof = Proof(pattern=f"{n}:{m}", sparse=False, why_dense=why)
    for name, layer in sparsifier.layers.items():
        weight = layer.sparsity.project(layer.weight).forward
        if weight is None:
            continue
        proof.sparse = True
        dim = layer.sparsity.dim
        nonzeros = (weight != 0).unflatten(dim, (-1, m)).sum(dim + 1)
        zero = weight == 0
        if bool((nonzeros > n).any()) or bool((zero & weight.signbit()).any()):
            proof.violations += (name,)
        proof.groups += nonzeros.numel()
        proof.zeros += int(zero.sum())
        proof.entries += weight.numel()
    return proof
