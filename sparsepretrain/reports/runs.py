"""Run directories as arrays: records, configuration, environment."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsepretrain import registry
from sparsepretrain.config import freeze
from sparsepretrain.errors import ConfigError
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.sparsity.method import Method

SMOOTH = 40
"""Curves are averaged over 1/40 of their points, short enough to keep the shape."""

NOT_COMPARED = ("runs_dir", "resume", "tracker", "probe", "experiment")
"""Keys without effect on the result."""

BOOKKEEPING = (
    *NOT_COMPARED,
    *("name", "eval", "log", "checkpoint", "workers", "plugins", "guard", "sparse_matmuls"),
)
"""Keys without effect on the final weights except rounding; never part of a label."""

POINTS = 30
"""Points of a stored curve."""

Curve = tuple[list[float], list[float | None]]
"""Tokens (or other units of the task) and values."""

ABSENT = "–"
"""Value shown for a key that a configuration lacks."""


@dataclass(slots=True)
class RunData:
    """Contents of a run directory."""

    path: Path
    records: list[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]
    probes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Last recorded step."""
        return int(max(line["step"] for line in self.records))

    @property
    def unit(self) -> str:
        """Unit that the task counts, in the plural; tokens if the task is unknown."""
        return self._of_task("unit", "tokens")

    @property
    def loss_name(self) -> str:
        """Name and unit of the loss."""
        return self._of_task("loss_name", "cross-entropy, nats")

    def _of_task(self, name: str, default: str) -> str:
        try:
            task = registry.get("task", str(self.option("task")))
        except ConfigError:  # a plug-in that is not loaded, or no configuration
            return default
        return str(getattr(task, name, default))

    def option(self, group: str, key: str = "name", default: Any = "") -> Any:
        """Return an option of a configuration group, or ``default`` if unknown."""
        return (self.config.get(group) or {}).get(key, default)

    @property
    def method(self) -> str:
        """Name of the method, with its pattern unless 2:4; empty if unknown."""
        pattern = f"{self.option('sparsity', 'n', 2)}:{self.option('sparsity', 'm', 4)}"
        return f"{self.option('sparsity')} {pattern}".removesuffix(" 2:4").strip()

    @property
    def metric(self) -> str | None:
        """Main score of the task, or None if only losses were recorded."""
        name = self._of_task("metric", "loss")
        scores = self.scores()
        return name if name in scores else next(iter(scores), None)

    def metrics(self) -> list[str]:
        """Return the names of the validation metrics other than the loss."""
        lines = [line for line in self.records if line.get("split") == "validation"]
        names = [k for line in lines for k, v in line.items() if not isinstance(v, str)]
        hidden = ("step", "time", "tokens", "loss")
        return [name for name in dict.fromkeys(names) if name not in hidden]

    def scores(self) -> list[str]:
        """Return the metrics that are percentages."""
        losses = ("perplexity", "nll")
        return [m for m in self.metrics() if not m.endswith(losses) and "loss" not in m]

    def series(self, key: str, split: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return steps (int64) and values (float64, NaN for null) of the records with ``key``."""
        lines = self._lines(key, split)
        steps = np.array([line["step"] for line in lines], dtype=np.int64)
        return steps, np.array([line[key] for line in lines], dtype=np.float64)

    def _lines(self, key: str, split: str | None) -> list[dict[str, Any]]:
        return [line for line in self.records if key in line and line.get("split") == split]

    def curve(
        self, key: str, split: str | None = None, points: int | None = POINTS
    ) -> Curve | None:
        """Return tokens and values, or None without a finite value.

        Training (``split`` None) is smoothed before it is thinned to ``points`` (None: all).
        """
        lines = self._lines(key, split)
        tokens = np.array([line.get("tokens", line["step"]) for line in lines], dtype=np.float64)
        values = np.array([line[key] for line in lines], dtype=np.float64)
        if not np.isfinite(values).any():
            return None
        if points is not None:
            values = smooth(values)[0] if split is None else values
            kept = np.unique(np.linspace(0, len(values) - 1, points).round().astype(int))
            tokens, values = tokens[kept], np.array([float(f"{v:.6g}") for v in values[kept]])
        return tokens.tolist(), [v if math.isfinite(v) else None for v in values.tolist()]

    def last(self, key: str, split: str | None = None) -> float | None:
        """Return the newest value, or None."""
        values = self.series(key, split)[1]
        return float(values[-1]) if len(values) else None

    def end_mean(self, key: str) -> float | None:
        """Return the running mean of a training curve at its end, or None."""
        values = self.series(key)[1]
        return float(smooth(values)[0][-1]) if len(values) else None

    def median(self, *keys: str) -> float | None:
        """Return the median of the finite values of all ``keys``, or None without one."""
        values = np.concatenate([self.series(key)[1] for key in keys])
        known = values[np.isfinite(values)]
        return float(np.median(known)) if len(known) else None

    def layers(self) -> tuple[np.ndarray, list[str], np.ndarray]:
        """Return steps (S,), layer names (L) and flip rates (L, S)."""
        prefix = "flip_rate/"
        lines = [line for line in self.records if "split" not in line]
        names = list(dict.fromkeys(n for line in lines for n in line if n.startswith(prefix)))
        lines = [line for line in lines if not line.keys().isdisjoint(names)]
        steps = np.array([line["step"] for line in lines], dtype=np.int64)
        values = np.array([[line.get(n) for line in lines] for n in names], dtype=np.float64)
        return steps, [n.removeprefix(prefix) for n in names], values

    def switches(self) -> list[tuple[int, str]]:
        """Return (step, "dense → sparse" or "sparse → dense") of every phase switch."""
        steps, sparse = self.series("sparse")
        return [
            (int(step), "dense → sparse" if now else "sparse → dense")
            for step, before, now in zip(steps[1:], sparse, sparse[1:], strict=False)
            if before != now
        ]

    def flip_ratio(self, dense: RunData | None) -> float | None:
        """Return the flip rate over that of ``dense``, means of the last tenth of the comparisons.

        None unless both end at one step and compare masks of one rule equally often.
        """
        try:
            method: type[Method] = registry.get("method", self.option("sparsity"))
        except ConfigError:  # a plug-in that is not loaded
            return None
        rule = method.mask_rule
        if dense in (None, self) or dense.option("sparsity", "flip_rule", None) != rule:
            return None
        own, other = (run.series("flip_rate")[1] for run in (self, dense))
        if self.end != dense.end or not 0 < len(own) == len(other):
            return None
        last = max(3, len(own) // 10)
        reference = float(np.mean(other[-last:]))
        return float(np.mean(own[-last:])) / reference if reference else None

    def flip_interval(self) -> int:
        """Return the median number of steps between two compared masks."""
        steps, intervals = self.series("flip_interval")
        known = len(steps) and len(steps) * 2 > len(self.series("flip_rate")[0])
        return int(np.median(intervals)) if known else 1


def load(path: Path) -> RunData:
    """Read one run directory."""
    run = RunDirectory(path)
    records = run.record()
    if not records:
        raise ConfigError(f"{run.record_file} has no records yet: let the run log its first step")
    config = run.config() if run.config_file.is_file() else {}
    return RunData(path, records, config, run.environment(), run.probes())


def smooth(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the running mean over the last k points (fewer at the start, no NaN), and k."""
    width = max(1, len(values) // SMOOTH)
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known)
    sums[width:] = sums[width:] - sums[:-width]
    counts[width:] = counts[width:] - counts[:-width]
    return np.divide(sums, counts, out=np.full(len(values), math.nan), where=counts > 0), width


def differences(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Return dotted configuration keys that differ -> the value in each run, or ``ABSENT``.

    The method comes first, then its options, other keys and the name of the run.
    """
    flat = [
        {key: value for key, value in freeze.flat(run.config).items() if value != {}}
        for run in runs
    ]
    rows = {key: [c.get(key, ABSENT) for c in flat] for c in flat for key in c}
    keys = [k for k, v in rows.items() if _group(k) not in NOT_COMPARED and v != v[:1] * len(v)]
    keys.sort(key=lambda k: (k == "name", k != "sparsity.name", _group(k) != "sparsity"))
    return {key: rows[key] for key in keys}


def labels(runs: Sequence[RunData]) -> list[str]:
    """Return names that tell runs apart: method with pattern, precision, then differing keys."""
    differing = {k: v for k, v in differences(runs).items() if _group(k) not in BOOKKEEPING}
    method = differing.keys() & {"sparsity.name", "sparsity.n", "sparsity.m"}
    names = [run.method if method else "" for run in runs]
    if "precision.name" in differing:
        precisions = [run.option("precision") for run in runs]
        names = [" ".join(words).strip() for words in zip(names, precisions, strict=True)]
    experiments = {"experiment": [run.config.get("experiment") for run in runs]}
    for key, values in (experiments | differing).items():
        if key in method or key == "precision.name":
            continue
        for name in set(names):
            alike = [i for i, other in enumerate(names) if other == name]
            if len({str(values[i]) for i in alike}) < 2:
                continue
            for i in alike:
                # an option that only some methods have follows from the method
                if values[i] != ABSENT and (key, values[i]) != ("experiment", None):
                    prefix = "" if key == "experiment" else f"{key.removeprefix('sparsity.')}="
                    names[i] = f"{name} {prefix}{values[i]}".strip()
    places = ["/".join(run.path.resolve().parts[-2:]) for run in runs]
    if len(set(names)) == 1:  # equal configurations
        return places
    return [
        name if name and names.count(name) == 1 else f"{name} {place}".strip()
        for name, place in zip(names, places, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Paired:
    """Runs and the reference run of each; runs of one name are seeds of one configuration."""

    reference: str
    """Name of the reference."""
    names: list[str]
    """Names of the runs without their seeds."""
    runs: Sequence[RunData]
    partners: list[RunData | None]
    """Reference run, see :func:`pair`, or None."""

    def seeds(self) -> dict[str, list[RunData]]:
        """Return name -> runs."""
        runs: dict[str, list[RunData]] = {name: [] for name in self.names}
        for name, run in zip(self.names, self.runs, strict=True):
            runs[name].append(run)
        return runs

    @property
    def has_pairs(self) -> bool:
        """True if a run has a reference run other than itself."""
        both = zip(self.runs, self.partners, strict=True)
        return any(partner is not None and partner is not run for run, partner in both)


def pair(runs: Sequence[RunData], labels: Sequence[str]) -> Paired:
    """Pair each run with the dense run of the same settings, see ``report.SHARED``.

    Without a dense run the first name is the reference; of several dense runs the one with the same
    model is taken.
    """
    names = [re.sub(r" ?\bseed=\S+", "", label).strip() or label for label in labels]
    dense = [i for i, run in enumerate(runs) if run.option("sparsity") == "dense"]
    candidates = dense or [i for i, name in enumerate(names) if name == names[0]]
    models = [run.config.get("model") for run in runs]
    hashes = [run.environment.get("hashes") or {} for run in runs]
    settings = [
        [*map(run.config.get, ("seed", "data", "task")), run.option("batch", "size"), own]
        for run, own in zip(runs, (found.get("evaluation") for found in hashes), strict=True)
    ]
    # a narrower dense model is compared with the dense model of the methods' size
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


def _group(key: str) -> str:
    return key.partition(".")[0]
