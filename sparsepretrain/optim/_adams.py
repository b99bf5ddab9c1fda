"""AdamS of CAST: an Adam that drives masked weights to zero (arXiv:2509.25996)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain.optim._masked_adamw import MaskedAdamW


class AdamS(MaskedAdamW):
    """AdamW whose masked entries go over from the loss to a decay of constant size (CAST, AdamS).

    Their update is u = (1-α)·m + α·λ·sign(W), where α rises from 0 to 1 over the run; kept entries
    follow u = m. Second moments are those of u, also of kept entries, so towards the end masked
    entries move by about lr per step, whatever λ is. Arguments: see :class:`MaskedAdamW`.
    """

    decay: float = 0.0
    """λ, which the method sets."""
    share: float = 0.0
    """α of the next step, which the method sets."""

    def direction(self, momentum: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        pull = weight.sign().mul_(self.share * self.decay)
        return torch.where(mask, momentum, pull.add_(momentum, alpha=1 - self.share))
