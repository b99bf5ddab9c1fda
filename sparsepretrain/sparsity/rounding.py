"""Warn if masked decay is lost to rounding, as with weights in bf16."""

from __future__ import annotations

import warnings

from torch import Tensor

from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.kernels import unpacked


def warn_if_decay_is_lost(
    name: str, before: Tensor, after: Tensor, weight: Tensor, mask: Tensor
) -> None:
    """Warn if rounding loses the decay of most masked entries of a layer.

    Args:
        name: of the layer.
        before, after: gradient without and with the decay.
        weight: decayed weight; zeros are ignored.
        mask: bool or packed by rows; entries that it keeps are ignored.
    """
    masked = ~unpacked(mask, weight.shape)
    lost = (after == before) & masked & (weight != 0)
    share = float(lost.sum() / masked.sum().clamp(min=1))
    if share > 0.5:
        warnings.warn(
            f"masked decay changes only {1 - share:.0%} of the masked gradients of layer {name!r}: "
            f"{share:.0%} is lost to rounding in {str(weight.dtype).removeprefix('torch.')}; keep "
            "fp32 parameters and autocast",
            SparsePretrainWarning,
            stacklevel=6,
        )
