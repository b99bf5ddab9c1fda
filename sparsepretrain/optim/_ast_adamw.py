"""AdamW of AST, whose masked decay is part of the update (Huang et al., AAAI 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain.optim._masked_adamw import MaskedAdamW


class ASTAdamW(MaskedAdamW):
    """AdamW whose update of a masked weight is u = m + λ(1-M)∘W (arXiv:2407.20584, annealed decay).

    The decay does not enter the first moment m, and the second moment is that of u. This is the
    paper's equation; the optimizer of the authors' GPT-2 code inverts an integer mask bit by bit,
    so that weights grow (docs/published_defects.md). Arguments: see :class:`MaskedAdamW`.
    """

    decay: float = 0.0
    """λ of the next step, which the method sets."""

    def direction(self, momentum: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, momentum, momentum.add(weight, alpha=self.decay))
