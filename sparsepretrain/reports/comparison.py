"""Several runs: what each of them is away from the dense one, and the curves themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain.reports.plots import (
    COLOURS,
    DASHES,
    GREY,
    MARKERS,
    _drawable,
    _flip_axis,
    _footer,
    _intervals,
    _loss_label,
    _new,
    _points,
    _positive,
    _step_axis,
    means_label,
    over,
)
from sparsepretrain.reports.runs import RunData, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SETTING = ("seed", "data", "task")
"""With ``batch.size``: what two runs share that see the same samples in the same order."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Runs beside the one that each is compared with.

    Of runs with the same name, which are those of several seeds, differences are averaged.
    """

    reference: str
    """Name of what is subtracted."""
    names: list[str]
    """Of the runs, without their seeds."""
    runs: Sequence[RunData]
    partners: list[RunData | None]
    """The run to subtract, of the same seed and data; None: there is none."""

    def groups(self) -> dict[str, list[tuple[RunData, RunData]]]:
        """Name -> (run, its partner) of everything that is not the reference itself."""
        found: dict[str, list[tuple[RunData, RunData]]] = {}
        for name, run, partner in zip(self.names, self.runs, self.partners, strict=True):
            if partner is not None and partner is not run:
                found.setdefault(name, []).append((run, partner))
        return found

    def unpaired(self) -> list[str]:
        """Names of the runs that have no partner."""
        alone = [n for n, p in zip(self.names, self.partners, strict=True) if p is None]
        return list(dict.fromkeys(alone))

    def spread(self, key: str) -> tuple[float, int] | None:
        """Standard deviation of the last validation value of the reference, and over how many."""
        same = [r for r, name in zip(self.runs, self.names, strict=True) if name == self.reference]
        last = [
            values[-1] for r in same for values in [r.series(key, "validation")[1]] if len(values)
        ]
        return (float(np.std(last, ddof=1)), len(last)) if len(last) > 1 else None


def pair(runs: Sequence[RunData], labels: Sequence[str]) -> Paired:
    """Find the dense run of the same seed and data for each run; without any, one like the first.

    Of several dense runs the one with the model of the run is taken.
    """
    names = [re.sub(r" ?\bseed=\S+", "", label).strip() or label for label in labels]
    dense = [
        i for i, r in enumerate(runs) if (r.config.get("sparsity") or {}).get("name") == "dense"
    ]
    candidates = dense or [i for i, name in enumerate(names) if name == names[0]]
    models = [run.config.get("model") for run in runs]
    settings = [
        [run.config.get(key) for key in SETTING] + [(run.config.get("batch") or {}).get("size")]
        for run in runs
    ]
    # a narrower dense model is compared with the one that the methods have
    main = names[max(candidates, key=lambda i: models.count(models[i]))]
    partners: list[RunData | None] = []
    for i, run in enumerate(runs):
        if names[i] == main and i in candidates:
            partners.append(run)
            continue
        same = [k for k in candidates if k != i and settings[k] == settings[i]]
        same.sort(key=lambda k: (models[k] != models[i], names[k] != main))
        partners.append(runs[same[0]] if same else run if i in candidates else None)
    return Paired(main, names, runs, partners)


def difference(
    pairs: Sequence[tuple[RunData, RunData]], key: str, split: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Steps that all have, and ``key`` of a run minus that of its partner, the mean over pairs."""
    series = [run.series(key, split) for both in pairs for run in both]
    steps = series[0][0]
    for other, _ in series[1:]:
        steps = np.intersect1d(steps, other)
    values = np.array([v[np.searchsorted(s, steps)] for s, v in series])
    return steps, np.mean(values[0::2] - values[1::2], axis=0)


def difference_figure(paired: Paired) -> Figure | None:
    """Train loss, validation loss, and the last evaluation as numbers, all minus the reference's.

    The grey band is one standard deviation of the reference over its seeds, where it has several.
    None where no run has a partner.
    """
    groups = paired.groups()
    if not groups:
        return None
    metric = next((run.metric for run in paired.runs if run.metric is not None), None)
    keys = ["loss"] if metric is None else ["loss", metric]
    figure, panels = _new((12 + 4 * (len(keys) - 1), 5.2), columns=2 + len(keys))
    unit = f"minus that of {paired.reference}"
    for index, (name, pairs) in enumerate(groups.items()):
        style = _style(index)
        steps, values = difference(pairs, "loss")
        mean = smooth(values)[0] if len(values) else values
        label = name if len(pairs) == 1 else f"{name} ({len(pairs)} seeds)"
        late = slice(len(mean) // 10, None)  # the start would press all differences together
        plain = {k: v for k, v in style.items() if k != "marker"} | {"linewidth": 1.3}
        panels[0].plot(steps[late], mean[late], marker=_points(mean[late]), label=label, **plain)
        steps, values = difference(pairs, "loss", "validation")
        panels[1].plot(steps, values, markersize=4, linewidth=1, **style)
    for axes, what in zip(panels, ("train", "validation"), strict=False):
        _step_axis(axes)
        axes.axhline(0, color="black", linewidth=1)
        axes.set_title(f"{what} loss {unit}", fontsize=9, loc="left")
    panels[0].set_ylabel(f"difference in {_loss_label(paired.runs[0])}")
    for axes, key in zip(panels[2:], keys, strict=True):
        _last(axes, paired, groups, key)
        axes.set_title(
            f"last validation {key}{' (%)' * (key != 'loss')} {unit}", fontsize=9, loc="left"
        )
    figure.legend(loc="outside upper left", ncols=min(len(groups), 6), frameon=False, fontsize=8)
    return figure


def last_difference(
    pairs: Sequence[tuple[RunData, RunData]], key: str = "loss"
) -> tuple[float, list[float]] | None:
    """Of the last evaluation that both have: the mean over pairs, and each; None: there is none."""
    found = [values[-1] for both in pairs for _, values in [difference([both], key, "validation")]
             if len(values) and np.isfinite(values[-1])]  # fmt: skip
    return (float(np.mean(found)), [float(value) for value in found]) if found else None


def _last(axes: Axes, paired: Paired, groups: dict[str, Any], key: str) -> None:
    """One row per run: its difference as a dot with the number, single seeds as small ones."""
    rows = list(groups)
    for index, name in enumerate(rows):
        if (found := last_difference(groups[name], key)) is None:
            continue
        style = {k: v for k, v in _style(index).items() if k != "linestyle"}
        axes.plot([found[0]], [index], linestyle=" ", markersize=7, **style)
        if len(found[1]) > 1:
            every = {"marker": ".", "linestyle": " ", "color": style["color"], "alpha": 0.5}
            axes.plot(found[1], [index] * len(found[1]), **every)
        text = f"{found[0]:+.4f}" if key == "loss" else f"{found[0]:+.2f}"
        axes.annotate(text, (found[0], index), (0, 7), textcoords="offset points", ha="center",
                      fontsize=7)  # fmt: skip
    axes.axvline(0, color="black", linewidth=1)
    if (spread := paired.spread(key)) is not None:
        axes.axvspan(-spread[0], spread[0], color=GREY, alpha=0.15)
        axes.set_xlabel(f"grey: ±1 sd of {paired.reference} over {spread[1]} seeds", fontsize=8)
    else:
        axes.set_xlabel(f"one seed of {paired.reference}: no spread to compare with", fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.margins(x=0.15)


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def overlay_figure(runs: Sequence[RunData], labels: Sequence[str]) -> Figure:
    """Several runs: loss (train and validation) on the left, flip rate (log axis) on the right.

    Between them the score of the task, where there is one.
    """
    from matplotlib.lines import Line2D

    metric = next((run.metric for run in runs if run.metric is not None), None)
    figure, panels = _new((12, 5.2) if metric is None else (16, 5.2), columns=3 - (metric is None))
    left, right = panels[0], panels[-1]
    handles, tops, switched = [], [], False
    intervals = _intervals(runs)
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        dots = _style(index) | {"markersize": 5}
        line = _style(index) | {"linewidth": 1.3, "marker": None}
        points = dots | {"linestyle": " "}
        if len(intervals) > 1 and run.flip_interval() in intervals:
            label += f" (flips{over(run) or ' over 1 step'})"
        handles.append(Line2D([], [], **(line | dots), label=label))
        steps, loss = run.series("loss")
        mean = smooth(loss)[0]
        left.plot(steps, mean, **line)
        if _drawable(late := mean[len(mean) // 10 :]):
            tops.append(float(np.nanmax(late)))
        left.plot(*run.series("loss", "validation"), zorder=3, **points)
        if metric is not None:
            panels[1].plot(*run.series(metric, "validation"), **(line | dots))
        steps, flips = run.series("flip_rate")
        if _drawable(flips, log=True):
            shown = _positive(smooth(flips)[0])
            right.plot(steps, shown, **(line | {"marker": _points(shown), "markersize": 4}))
        for step, _ in run.switches():
            switched = True
            for axes in panels:
                axes.axvline(step, color=line["color"], linewidth=0.8, linestyle=":")
    note = "; dotted: dense ↔ sparse" if switched else ""
    losses, rates = means_label(runs, "loss"), means_label(runs, "flip_rate")
    left.set_title(f"lines: train, {losses}; markers: validation", fontsize=9, loc="left")
    right.set_title(f"lines: {rates}{note}", fontsize=9, loc="left")
    left.set_ylabel(_loss_label(runs[0]))
    for axes in panels:
        _step_axis(axes)
    if metric is not None:
        panels[1].set_ylabel(f"{metric} (%)")
        panels[1].set_title("validation", fontsize=9, loc="left")
    _leave_out_the_start(left, tops)
    if any(_drawable(run.series("flip_rate")[1], log=True) for run in runs):
        _flip_axis(right, runs)
    else:
        right.set_yticks([])
        right.text(0.5, 0.5, "no flip rate recorded", ha="center", transform=right.transAxes)
    columns = min(len(runs), 4 if max(map(len, labels)) < 40 else 2)
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False)
    figure.supxlabel(_footer(runs, 170), fontsize=7, color=GREY, x=0.01, ha="left")
    return figure


def _leave_out_the_start(axes: Axes, tops: list[float]) -> None:
    """Cut the loss axis above ``tops``, the highest of each run after its first tenth."""
    bottom, top = axes.get_ylim()
    cut = max(tops) + 0.05 * (max(tops) - bottom) if tops else top
    if cut < top:
        # the first steps fall by several nats and would press all differences together
        axes.set_ylim(bottom, cut)
        axes.set_xlabel("step (the first 10 % may leave the axis)")
