"""Sums over the calibration inputs of a layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kept = Literal["nothing", "squares", "moments"]
"""Sums that a method reads: none, Σ x² per input channel, or Σ x·xᵀ too."""


class InputSums:
    """Sums over tokens of the inputs x of a layer, in fp64.

    Published code divides them by the number of sequences. No method here depends on that factor.

    Args:
        width: in_features.
        device: device of the sums.
        moments: also sum x·xᵀ, (in_features, in_features).
    """

    def __init__(self, width: int, device: torch.device, *, moments: bool = False) -> None:
        self.tokens = 0
        self._squares = torch.zeros(width, dtype=torch.float64, device=device)
        self._moments = self._squares.new_zeros(width, width) if moments else None

    def add(self, inputs: Tensor) -> None:
        """Add inputs of shape (…, in_features)."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        rows = rows if rows.dtype == torch.float64 else rows.float()
        self.tokens += len(rows)
        if self._moments is None:
            self._squares += rows.square().sum(0, dtype=torch.float64)
        else:
            # one GEMM in the precision of the inputs: consumer GPUs have few units for fp64
            self._moments += rows.t() @ rows

    @property
    def moments(self) -> Tensor:
        """Σ x·xᵀ, (in_features, in_features)."""
        assert self._moments is not None
        return self._moments

    @property
    def norms(self) -> Tensor:
        """‖X_j‖₂ of each input channel j over all tokens, (in_features,)."""
        squares = self._squares if self._moments is None else self._moments.diagonal()
        return squares.sqrt()

    def permute(self, order: Tensor) -> None:
        """Reorder the channels: channel ``order[j]`` becomes channel j."""
        self._squares = self._squares[order]
        if self._moments is not None:
            self._moments = self._moments[order][:, order]
