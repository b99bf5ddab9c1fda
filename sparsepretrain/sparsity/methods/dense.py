"""Dense training; the baseline that logs the flips its masks would make."""

from __future__ import annotations

from sparsepretrain.registry import register
from sparsepretrain.sparsity.policy import Method, Products


@register("method", "dense")
class Dense(Method):
    """Every product is dense; the magnitude mask is computed for the record only."""

    summary = "ordinary layers; logs the mask that magnitude would choose"
    paper = "–"
    products = Products()
