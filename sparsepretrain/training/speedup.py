"""FLOPs of the matmuls of sparse layers, and the bound that they set to the speed-up of a step."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import NamedTuple

import torch

from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.sparsity.backend import Backend, LayerSize, objection
from sparsepretrain.sparsity.products import MATMUL_OF
from sparsepretrain.tracking.console import count
from sparsepretrain.training.assembly import META


class MatmulFlops(NamedTuple):
    """FLOPs of one optimizer step, counted as dense matmuls."""

    step: float
    layers: Counter[str]
    """Product -> FLOPs in linear layers that are sparse."""
    sparse: Counter[str]
    """FLOPs of matmuls that could be 2:4."""
    reasons: list[str]
    """Reasons for which matmuls with an N:M operand stay dense."""

    @property
    def bound(self) -> float:
        """Largest speed-up if 2:4 matmuls are twice as fast as dense ones (Amdahl)."""
        return 1 / (1 - self.sparse.total() / self.step / 2)

    def rows(self) -> list[tuple[str, str]]:
        """Return lines of the dry run."""
        if not self.layers:
            return []
        cells = [
            f"{product} {count(flops)}"
            + (f" ({count(self.sparse[product])} 2:4)" if self.sparse[product] else "")
            for product, flops in self.layers.items()
        ]
        if self.sparse:
            text = (
                f"at most {self.bound:.2f}×: {self.sparse.total() / self.step:.1%} of all FLOPs "
                "could be 2:4 matmuls, twice as fast at best (Amdahl)"
            )
        else:
            text = "none: " + (
                statistics.mode(self.reasons) if self.reasons else "no product has an N:M operand"
            )
        return [("FLOPs per step", f"sparse layers: {', '.join(cells)}"), ("speed-up", text)]


def matmul_flops(
    sparsifier: Sparsifier,
    inputs: dict[str, torch.Size],
    micro_batches: int,
    dtype: torch.dtype,
    step: float,
) -> MatmulFlops:
    """Count the FLOPs of sparse linear layers, on any GPU that has 2:4 matmuls.

    Args:
        sparsifier: of a model on the meta device.
        inputs: name of a layer -> shape of its input in a micro-batch.
        micro_batches: of a step.
        dtype: of the matmuls.
        step: FLOPs of the whole step.
    """
    row, backend = sparsifier.method.sparse_row, Backend("auto")
    found = MatmulFlops(step, Counter(), Counter(), [])
    for name, layer in sparsifier.layers.items():
        if layer.weight.dim() != 2:
            continue
        state, tokens = layer.sparsity, tuple(inputs[name][:-1])
        flops = 2 * micro_batches * math.prod(tokens) * layer.weight.numel()
        found.layers.update(dict.fromkeys(row.products, flops))
        size, base = LayerSize(tuple(layer.weight.shape), state.dim, META), state.products.base
        for operand, why in backend.reasons(row, size, base).items():
            if reason := why or objection(operand, tokens, dtype, base):
                found.reasons.append(reason)
            else:
                found.sparse[MATMUL_OF[operand]] += flops
    return found
