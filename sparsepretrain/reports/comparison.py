"""Several runs: what each of them is away from the dense one, and the curves themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain.reports import plots
from sparsepretrain.reports.plots import COLOURS, DASHES, GREY, MARKERS, drawable, point_marker
from sparsepretrain.reports.runs import RunData, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        last = [value for r in same if (value := r.last(key, "validation")) is not None]
        return (float(np.std(last, ddof=1)), len(last)) if len(last) > 1 else None


def pair(runs: Sequence[RunData], labels: Sequence[str]) -> Paired:
    """Find the dense run of the same seed and data for each run; without any, one like the first.

    Paired runs see the same samples in the same order: they share seed, data, task and batch size.
    Of several dense runs the one with the model of the run is taken.
    """
    names = [re.sub(r" ?\bseed=\S+", "", label).strip() or label for label in labels]
    dense = [i for i, run in enumerate(runs) if run.option("sparsity") == "dense"]
    candidates = dense or [i for i, name in enumerate(names) if name == names[0]]
    models = [run.config.get("model") for run in runs]
    settings = [
        [*map(run.config.get, ("seed", "data", "task")), run.option("batch", "size")]
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
    figure, panels = plots.new_figure((8 + 4 * len(keys), 5.2), columns=2 + len(keys))
    unit = f"minus that of {paired.reference}"
    titles = ["train loss", "validation loss", "last validation loss"]
    for axes, what in zip(panels, [*titles, f"last validation {metric} (%)"], strict=False):
        axes.set_title(f"{what} {unit}", fontsize=9, loc="left")
    for index, (name, pairs) in enumerate(groups.items()):
        label = name if len(pairs) == 1 else f"{name} ({len(pairs)} seeds)"
        steps, values = difference(pairs, "loss")
        start = len(steps) // 10  # which would press all differences together
        steps, mean = steps[start:], smooth(values)[0][start:]
        style = _style(index) | {"linewidth": 1.3, "marker": point_marker(mean)}
        panels[0].plot(steps, mean, label=label, **style)
        steps, values = difference(pairs, "loss", "validation")
        panels[1].plot(steps, values, label=label, markersize=4, linewidth=1, **_style(index))
    for axes in panels[:2]:
        plots.step_axis(axes)
        axes.axhline(0, color="black", linewidth=1)
    panels[0].set_ylabel(f"difference in {plots.loss_label(paired.runs[0])}")
    for axes, key in zip(panels[2:], keys, strict=True):
        _last(axes, paired, groups, key)
    figure.legend(loc="outside upper left", ncols=min(len(groups), 6), frameon=False, fontsize=8)
    return figure


def last_difference(
    pairs: Sequence[tuple[RunData, RunData]], key: str = "loss"
) -> tuple[float, list[float]] | None:
    """Of the last evaluation that both have: the mean over pairs, and each; None: there is none."""
    ends = [difference([both], key, "validation")[1][-1:] for both in pairs]
    found = [float(end[0]) for end in ends if np.isfinite(end).any()]
    return (float(np.mean(found)), found) if found else None


def _last(axes: Axes, paired: Paired, groups: dict[str, Any], key: str) -> None:
    """One row per run: its difference as a dot with the number, single seeds as small ones."""
    rows = list(groups)
    for index, name in enumerate(rows):
        if (found := last_difference(groups[name], key)) is None:
            continue
        mean, each = found
        style = _style(index) | {"linestyle": " "}
        axes.plot([mean], [index], markersize=7, **style)
        if len(each) > 1:
            axes.plot(each, [index] * len(each), **(style | {"marker": ".", "alpha": 0.5}))
        text = f"{mean:+.4f}" if key == "loss" else f"{mean:+.2f}"
        place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 7}
        axes.annotate(text, (mean, index), (0, 7), **place)
    axes.axvline(0, color="black", linewidth=1)
    if (spread := paired.spread(key)) is not None:
        axes.axvspan(-spread[0], spread[0], color=GREY, alpha=0.15)
        note = f"grey: ±1 sd of {paired.reference} over {spread[1]} seeds"
    else:
        note = f"one seed of {paired.reference}: no spread to compare with"
    axes.set_xlabel(note, fontsize=8)
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
    columns = 2 if metric is None else 3
    figure, panels = plots.new_figure((4 + 4 * columns, 5.2), columns)
    left, right = panels[0], panels[-1]
    handles, tops = [], []
    intervals = plots.flip_intervals(runs)
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        both = _style(index) | {"markersize": 5, "linewidth": 1.3, "label": label}
        line, points = both | {"marker": None}, both | {"linestyle": " "}
        if len(intervals) > 1 and run.flip_interval() in intervals:
            label += f" (flips{plots.over(run) or ' over 1 step'})"
        handles.append(Line2D([], [], **(both | {"label": label})))
        steps, loss = run.series("loss")
        mean = smooth(loss)[0]
        left.plot(steps, mean, **line)
        if drawable(late := mean[len(mean) // 10 :]):
            tops.append(float(np.nanmax(late)))
        left.plot(*run.series("loss", "validation"), zorder=3, **points)
        if metric is not None:
            panels[1].plot(*run.series(metric, "validation"), **both)
        steps, flips = run.series("flip_rate")
        if drawable(flips, log=True):
            shown = plots.visible(smooth(flips)[0])
            right.plot(steps, shown, **(line | {"marker": point_marker(shown), "markersize": 4}))
        for step, _ in run.switches():
            for axes in panels:
                axes.axvline(step, color=line["color"], linewidth=0.8, linestyle=":")
    note = "; dotted: dense ↔ sparse" if any(run.switches() for run in runs) else ""
    losses, rates = plots.means_label(runs, "loss"), plots.means_label(runs, "flip_rate")
    left.set_title(f"lines: train, {losses}; markers: validation", fontsize=9, loc="left")
    right.set_title(f"lines: {rates}{note}", fontsize=9, loc="left")
    left.set_ylabel(plots.loss_label(runs[0]))
    for axes in panels:
        plots.step_axis(axes)
    if metric is not None:
        panels[1].set_ylabel(f"{metric} (%)")
        panels[1].set_title("validation", fontsize=9, loc="left")
    bottom, top = left.get_ylim()
    cut = max(tops) + 0.05 * (max(tops) - bottom) if tops else top
    if cut < top:
        # the loss of the first steps falls far and would press all differences together
        left.set_ylim(bottom, cut)
        left.set_xlabel("step (the first 10 % may leave the axis)")
    if intervals:
        plots.flip_axis(right, runs)
    else:
        right.set_yticks([])
        right.text(0.5, 0.5, "no flip rate recorded", ha="center", transform=right.transAxes)
    columns = min(len(runs), 4 if max(map(len, labels)) < 40 else 2)
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False)
    figure.supxlabel(plots.footer(runs, 170), fontsize=7, color=GREY, x=0.01, ha="left")
    return figure
