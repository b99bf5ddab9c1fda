"""A probe of your own: lifetimes of mask entries, and groups whose masks keep changing.

sparsepretrain train 'plugins=[docs/examples/lifetime.py]' 'probe.lifetime={every: 100}'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.training.observer import Probe, ProbeOptions

if TYPE_CHECKING:
    from torch import Tensor

    from sparsepretrain.sparsity.layers import SparseLayer
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
    """Masks as they are compared, step by step; a line has what happened since the line before.

    ``deaths``, ``births``, ``resurrections``: entries that a mask drops, takes up, takes up again,
    over all entries and comparisons. ``age_10``, ``age_50``, ``age_90``: quantiles of the steps
    since a kept entry was taken up. ``restless``: groups that changed at two comparisons or more;
    ``untouched``: groups that never did. ``flips_gap_<k>``: groups that changed at a comparison,
    of those whose L1 gap |t3| - |t2| at the line before was in class k of their layer, 0 the
    smallest.
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
        """Begin with the masks that the first comparison is against."""
        import torch

        if self._layers:
            return
        for name, layer in session.sparsifier.layers.items():
            mask = compared_mask(layer)
            bins = self._bins(session, layer)
            self._layers[name] = {
                "mask": mask,
                "since": torch.zeros_like(mask, dtype=torch.int32),
                "died": torch.zeros_like(mask),
                "flips": torch.zeros_like(bins, dtype=torch.int32),
                "bins": bins,
            }

    def after_step(self, session: Session, step: Step) -> None:
        """Follow the masks if they were compared, and sum up when a line is due."""
        layers = session.sparsifier.layers
        if session.updated and session.sparsifier.flips is not None:
            self._compared += 1
            for name, kept in self._layers.items():
                self._follow(session, layers[name], kept)
        if session.step % self.options.every == 0 and self._compared:
            self.write(session, self._summary(session))
            for name, kept in self._layers.items():
                kept["flips"].zero_()
                kept["bins"] = self._bins(session, layers[name])
            self._counts, self._compared = dict.fromkeys(COUNTS, 0), 0

    def _follow(self, session: Session, layer: SparseLayer, kept: dict[str, Tensor]) -> None:
        new, old = compared_mask(layer), kept["mask"]
        changed = new ^ old
        dead, born = old & changed, new & changed
        for key, which in zip(COUNTS, (dead, born, born & kept["died"]), strict=True):
            self._counts[key] += int(which.sum())
        kept["died"] |= dead
        kept["since"].masked_fill_(changed, session.step)
        kept["flips"] += self._grouped(session, layer, changed).any(-1)
        kept["mask"] = new

    def _summary(self, session: Session) -> dict[str, float]:
        import torch

        layers = session.sparsifier.layers
        flips, bins, touched, ages = [], [], [], []
        for name, kept in self._layers.items():
            flips.append(kept["flips"].flatten())
            bins.append(kept["bins"].flatten())
            groups = self._grouped(session, layers[name], kept["since"])
            touched.append((groups > 0).any(-1).flatten())
            ages.append(session.step - kept["since"][kept["mask"]])
        entries = sum(kept["mask"].numel() for kept in self._layers.values())
        line = {k: n / (entries * self._compared) for k, n in self._counts.items()}
        found = torch.bincount(torch.cat(ages)).cumsum(0)
        for share in (10, 50, 90):
            line[f"age_{share}"] = int((found * 100 < found[-1] * share).sum())
        changes, which = torch.cat(flips), torch.cat(bins).long()
        line["restless"] = float((changes > 1).double().mean())
        line["untouched"] = 1 - float(torch.cat(touched).double().mean())
        size = self.options.bins
        sums = torch.bincount(which, changes.double(), minlength=size).tolist()
        groups_of = torch.bincount(which, minlength=size).tolist()
        for index, (total, count) in enumerate(zip(sums, groups_of, strict=True)):
            line[f"flips_gap_{index}"] = total / max(count * self._compared, 1)
        return line

    def _bins(self, session: Session, layer: SparseLayer) -> Tensor:
        """Return the class of each group by its L1 gap, uint8."""
        import torch

        n, m = session.sparsifier.method.options.n, session.sparsifier.method.options.m
        low, high = kernels.boundary_magnitudes(layer.weight.detach(), n, m, dim=layer.sparsity.dim)
        gap = (high - low).movedim(layer.sparsity.dim, -1)
        ranks: Tensor = gap.flatten().argsort(stable=True).argsort()
        ranks = ranks * self.options.bins // gap.numel()
        return ranks.view(gap.shape).to(torch.uint8)

    def _grouped(self, session: Session, layer: SparseLayer, values: Tensor) -> Tensor:
        """By groups: (…, groups, M)."""
        m = session.sparsifier.method.options.m
        groups: Tensor = values.movedim(layer.sparsity.dim, -1).unflatten(-1, (-1, m))
        return groups

    def state_dict(self) -> dict[str, Any]:
        return {"layers": self._layers, "counts": self._counts, "compared": self._compared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._layers = {
            name: {key: value.to(self._device) for key, value in kept.items()}
            for name, kept in state["layers"].items()
        }
        self._counts, self._compared = dict(state["counts"]), int(state["compared"])


def compared_mask(layer: SparseLayer) -> Tensor:
    """Return the mask of the last comparison; bool, shape of the weight."""
    return kernels.unpack_rows(layer.sparsity.previous_mask, layer.weight.shape)
