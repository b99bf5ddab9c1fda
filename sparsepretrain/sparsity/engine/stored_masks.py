"""Refuse stored masks that are not N:M, as averages of several models are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import nonzeros_per_group, unpacked
from sparsepretrain.sparsity.engine.attachments import read_together
from sparsepretrain.sparsity.engine.operands import LayerOperands


@torch.no_grad()
def require_masks(layers: Iterable[LayerOperands]) -> None:
    """Refuse masks that keep more than N of M; layers whose masks follow the weight have none.

    Packed bits that were averaged as integers are other bits: a soup of models, or an average of
    clients, passes every check of counters if all models took as many steps.

    Args:
        layers: that are not sharded.

    Raises:
        ConfigError: names the first layer, with the number of its wrong groups.
    """
    patterns = {}
    counts = {}
    for operands in layers:
        n, m = operands.method.pattern
        state = operands.state
        mask = state._buffers.get("mask")
        if mask is None or mask.is_meta:
            continue
        nonzeros = nonzeros_per_group(unpacked(mask, state.shape), m, dim=state.dim)
        counts[state.layer_name] = (nonzeros > n).sum()
        patterns[state.layer_name] = n, m
    wrong = {name: count for name, count in read_together(counts).items() if count}
    for name, count in wrong.items():
        n, m = patterns[name]
        more = f" (and of {len(wrong) - 1} more layers)" if len(wrong) > 1 else ""
        raise ConfigError(
            f"the mask of {name!r}{more} keeps more than {n} of {m} in {count:,} groups: masks of "
            "several models were averaged; average densified models and choose masks anew, or copy "
            "the buffers of one of them"
        )
