"""Flip rates of the record: means over everything that was compared since the line before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsepretrain.sparsity import Sparsifier


class Flips:
    """Sums the flips of every comparison on the device; only a line of the record reads them.

    One sum belongs to the lines of the run, another to those with values of each layer, which are
    rarer. Both are part of a checkpoint, so a mean does not depend on where a run was stopped.

    Args:
        sparsifier: attached; its layers give the entries that flips are divided by.
    """

    def __init__(self, sparsifier: Sparsifier) -> None:
        weights = {name: layer.weight for name, layer in sparsifier.layers.items()}
        self._entries = {name: weight.numel() for name, weight in weights.items()}
        device = next(iter(weights.values())).device
        # (2, layers): since the last line, and since the last one with layers
        self._sums = torch.zeros(2, len(weights), dtype=torch.int64, device=device)
        self._compared = [0, 0]

    def add(self, flips: Tensor | None) -> None:
        """Count a comparison: (layers,) int64, as :attr:`Sparsifier.flips`; None: there was none.

        Does not wait for the device.
        """
        if flips is not None:
            self._sums += flips
            self._compared = [count + 1 for count in self._compared]

    def rates(self, *, per_layer: bool) -> dict[str, float]:
        """``flip_rate``, and ``flip_rate/<layer>`` if asked for; then counting starts anew.

        Empty where nothing was compared.
        """
        result = {}
        since_line, since_layers = self._sums.tolist()
        if self._compared[0]:
            entries = sum(self._entries.values())
            result["flip_rate"] = sum(since_line) / (self._compared[0] * entries)
        if per_layer and self._compared[1]:
            for (name, entries), flips in zip(self._entries.items(), since_layers, strict=True):
                result[f"flip_rate/{name}"] = flips / (self._compared[1] * entries)
        for index in range(1 + per_layer):
            self._sums[index], self._compared[index] = 0, 0
        return result

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint between two lines keeps."""
        return {"sums": self._sums, "compared": self._compared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._sums.copy_(state["sums"])
        self._compared = list(state["compared"])
