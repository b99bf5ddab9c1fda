"""Lifetimes of mask entries, and groups whose masks keep changing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity.engine.weights import SparseWeight
from sparsepretrain.training.observer import Probe, ProbeOptions
from sparsepretrain.training.session import Session
from sparsepretrain.training.step import Step

COUNTS = ("deaths", "births", "resurrections")


@dataclass(slots=True, kw_only=True)
class LifetimeOptions(ProbeOptions):
    """Options of the probe of lifetimes."""

    bins: Annotated[int, "[1, 255]"] = 8
    """Classes of equally many groups of a layer, by their L1 gap."""


@register("probe", "lifetime")
class Lifetime(Probe["Session"]):
    """Changes of the masks, followed at every comparison; a line sums up those since the last line.

    ``deaths``, ``births``, ``resurrections``: entries that a mask drops, takes up, takes up again,
    per entry and comparison. ``age_10``, ``age_50``, ``age_90``: quantiles of the steps since a
    kept entry was taken up. ``restless``: share of groups that changed at two comparisons or more;
    ``untouched``: share that never changed. ``flips_gap_<k>``: share of groups that change at a
    comparison, among those whose L1 gap |t3| - |t2| at the last line was in class k of their layer;
    class 0 has the smallest gaps.
    """

    name = "lifetime"
    Options = LifetimeOptions

    def __init__(self, options: LifetimeOptions, session: Session) -> None:
        super().__init__(options, session)
        self._layers: dict[str, dict[str, Tensor]] = {}
        self._counts = dict.fromkeys(COUNTS, 0)
        self._compared = 0
        self._device = session.device

    def before_step(self, session: Session) -> None:
        """Start from the masks that the first comparison reads."""
        if self._layers:
            return
        for name, layer in session.sparsifier.layers.items():
            mask = compared_mask(layer)
            bins = self._bins(layer)
            # 6 bytes per entry and 5 per group, on the device and in checkpoints
            self._layers[name] = {
                "mask": mask,
                "since": torch.zeros_like(mask, dtype=torch.int32),
                "died": torch.zeros_like(mask),
                "flips": torch.zeros_like(bins, dtype=torch.int32),
                "bins": bins,
            }

    def after_step(self, session: Session, step: Step) -> None:
        """Follow the masks if the step compared them, and write a line when one is due."""
        layers = session.sparsifier.layers
        if session.updated and session.sparsifier.flips is not None:
            self._compared += 1
            for name, history in self._layers.items():
                self._follow(session, layers[name], history)
        if session.step % self.options.every == 0 and self._compared:
            self.write(session, self._summary(session))
            for name, history in self._layers.items():
                history["flips"].zero_()
                history["bins"] = self._bins(layers[name])
            self._counts = dict.fromkeys(COUNTS, 0)
            self._compared = 0

    def _follow(self, session: Session, layer: SparseWeight, history: dict[str, Tensor]) -> None:
        new = compared_mask(layer)
        changed = new ^ history["mask"]
        dead = changed & ~new
        born = changed & new
        for key, entries in zip(COUNTS, (dead, born, born & history["died"]), strict=True):
            self._counts[key] += int(entries.sum())
        history["died"] |= dead
        history["since"].masked_fill_(changed, session.step)
        history["flips"] += self._grouped(layer, changed).any(-1)
        history["mask"] = new

    def _summary(self, session: Session) -> dict[str, float]:
        layers = session.sparsifier.layers
        flips = []
        bins = []
        touched = []
        ages = []
        for name, history in self._layers.items():
            flips.append(history["flips"].flatten())
            bins.append(history["bins"].flatten())
            groups = self._grouped(layers[name], history["since"])
            touched.append((groups > 0).any(-1).flatten())
            ages.append(session.step - history["since"][history["mask"]])
        entries = sum(history["mask"].numel() for history in self._layers.values())
        line = {k: n / (entries * self._compared) for k, n in self._counts.items()}
        # Ages are integers below the number of steps: a histogram gives quantiles without sorting.
        at_most = torch.bincount(torch.cat(ages)).cumsum(0)
        for share in (10, 50, 90):
            line[f"age_{share}"] = int((at_most * 100 < at_most[-1] * share).sum())
        changes = torch.cat(flips)
        bin_of = torch.cat(bins).long()
        line["restless"] = float((changes > 1).double().mean())
        line["untouched"] = 1 - float(torch.cat(touched).double().mean())
        count = self.options.bins
        sums = torch.bincount(bin_of, changes.double(), minlength=count).tolist()
        sizes = torch.bincount(bin_of, minlength=count).tolist()
        for index, (total, size) in enumerate(zip(sums, sizes, strict=True)):
            line[f"flips_gap_{index}"] = total / max(size * self._compared, 1)
        return line

    def _bins(self, layer: SparseWeight) -> Tensor:
        """Return the class of each group by its L1 gap, uint8."""
        n, m = layer.operands.method.final_pattern
        weight = layer.operands.rows.local(layer.weight.detach())
        low, high = kernels.boundary_magnitudes(weight, n, m, dim=layer.sparsity.dim)
        gap = (high - low).movedim(layer.sparsity.dim, -1)
        ranks: Tensor = gap.flatten().argsort(stable=True).argsort()
        ranks = ranks * self.options.bins // gap.numel()
        return ranks.view(gap.shape).to(torch.uint8)

    def _grouped(self, layer: SparseWeight, values: Tensor) -> Tensor:
        """Return values by groups, (…, groups, M)."""
        _, m = layer.operands.method.final_pattern
        groups: Tensor = values.movedim(layer.sparsity.dim, -1).unflatten(-1, (-1, m))
        return groups

    def state_dict(self) -> dict[str, Any]:
        return {"layers": self._layers, "counts": self._counts, "compared": self._compared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._layers = {
            name: {key: value.to(self._device) for key, value in history.items()}
            for name, history in state["layers"].items()
        }
        self._counts = dict(state["counts"])
        self._compared = int(state["compared"])


def compared_mask(layer: SparseWeight) -> Tensor:
    """Return the mask of the last comparison; bool, shape of the weight, of a bank as a matrix."""
    return kernels.unpack_rows(layer.sparsity.previous_mask, layer.sparsity.shape)
