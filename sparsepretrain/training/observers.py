# ruff: noqa: D102 - overrides are documented at Observer
"""Observers of every run: throughput, flips, and averages of the weights."""

from __future__ import annotations

import time
from typing import Any

import torch

from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.training.observer import Observer
from sparsepretrain.training.session import Session
from sparsepretrain.training.step import Step


class Throughput(Observer[Session]):
    """Items per second and share of time spent waiting for data, since the previous line.

    Evaluations and checkpoints are excluded.

    Args:
        peak_items: items per second at the dense peak of the device, for MFU; None: unknown.
    """

    def __init__(self, peak_items: float | None) -> None:
        self._peak_items = peak_items
        self._started = self._seconds = self._waited = 0.0
        self._items = 0

    def before_step(self, session: Session) -> None:
        self._started = time.perf_counter()

    def after_step(self, session: Session, step: Step) -> None:
        self._seconds += time.perf_counter() - self._started
        self._waited += step.waited
        self._items += step.items

    def at_log(self, session: Session, *, per_layer: bool) -> dict[str, Any]:
        rate = self._items / self._seconds
        result = {"tokens_per_second": rate, "data_wait": self._waited / self._seconds}
        if self._peak_items is not None:
            result["mfu_dense"] = rate / self._peak_items
        self._seconds = 0.0
        self._waited = 0.0
        self._items = 0
        return result


class FlipObserver(Observer[Session]):
    """Metrics of the sparse weights; a flip rate is the mean since the last logged one.

    Flips are summed on the device and read only when a line is logged. There are two sums: one per
    line, one per line with values of each layer, which are rarer. Checkpoints keep both, so a mean
    does not depend on where a run was stopped.
    """

    name = "flips"

    def __init__(self, sparsifier: Sparsifier) -> None:
        weights = {name: layer.weight for name, layer in sparsifier.layers.items()}
        self._entries = {name: weight.numel() for name, weight in weights.items()}
        device = next(iter(weights.values())).device
        # (2, layers): since the last line, and since the last line with values of each layer
        self._sums = torch.zeros(2, len(weights), dtype=torch.int64, device=device)
        self._compared = [0, 0]
        # of the slices of banks, since the last line with values of each layer
        self._slices = {
            name: torch.zeros(layer.sparsity.slices, dtype=torch.int64, device=device)
            for name, layer in sparsifier.layers.items()
            if layer.sparsity.slice_rows is not None
        }

    def after_step(self, session: Session, step: Step) -> None:
        """Add the flips of this step, if masks were compared, without waiting for the device."""
        flips = session.sparsifier.flips
        if session.updated and flips is not None:
            self._sums += flips
            if self._slices:
                for name, each in session.sparsifier.slice_flips.items():
                    self._slices[name] += each
            self._compared = [count + 1 for count in self._compared]

    def at_log(self, session: Session, *, per_layer: bool) -> dict[str, Any]:
        sparsifier = session.sparsifier
        values, sums = sparsifier.metrics_with(self._sums, per_layer=per_layer)
        last = {key: values.pop(key) for key in list(values) if key.startswith("flip_")}
        values |= self._rates(*sums, per_layer=per_layer)
        # without an update no masks were compared: the last flips are those of an older step
        if "flip_rate" in last and session.updated:
            values["flip_rate_last"] = last["flip_rate"]
            values |= {k: v for k, v in last.items() if k == "flip_interval"}
        return values

    def _rates(
        self, since_line: list[int], since_layers: list[int], *, per_layer: bool
    ) -> dict[str, float]:
        """Return ``flip_rate``, and ``flip_rate/<layer>`` with ``per_layer``; reset the sums."""
        result = {}
        if self._compared[0]:
            entries = sum(self._entries.values())
            result["flip_rate"] = sum(since_line) / (self._compared[0] * entries)
        if per_layer and self._compared[1]:
            for (name, entries), flips in zip(self._entries.items(), since_layers, strict=True):
                result[f"flip_rate/{name}"] = flips / (self._compared[1] * entries)
            for name, sums in self._slices.items():
                of_slice = self._compared[1] * self._entries[name] / len(sums)
                for number, flips in enumerate(sums.tolist()):
                    result[f"flip_rate/{name}/{number}"] = flips / of_slice
                sums.zero_()
        for index in range(1 + per_layer):
            self._sums[index], self._compared[index] = 0, 0
        return result

    def state_dict(self) -> dict[str, Any]:
        slices = {name: sums.tolist() for name, sums in self._slices.items()}
        return {"sums": self._sums.tolist(), "compared": self._compared, "slices": slices}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.copy_(torch.as_tensor(state["sums"]))
        self._compared = list(state["compared"])
        for name, sums in self._slices.items():
            sums.copy_(torch.as_tensor(state["slices"][name]))


class Averaging(Observer[Session]):
    """Average in the weights after each update."""

    def after_step(self, session: Session, step: Step) -> None:
        if session.updated and session.ema is not None:
            session.ema.update()
