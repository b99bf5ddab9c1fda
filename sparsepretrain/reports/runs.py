"""A run directory, read back: records as arrays, configuration, environment."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsepretrain import registry
from sparsepretrain.config import freeze
from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.runs.directory import RunDirectory

SMOOTH = 40
"""A curve is averaged over 1/40 of its points: short enough to keep its shape."""

NOT_COMPARED = ("runs_dir", "resume", "tracker", "probe", "experiment")
"""Keys that do not change what a run computes."""

BOOKKEEPING = (
    *NOT_COMPARED,
    *("name", "eval", "log", "checkpoint", "workers", "plugins", "guard", "backend"),
)
"""Keys that do not change what a whole run computes, but for rounding: no name for it."""

POINTS = 30
"""Of a curve that is kept: enough for a figure."""

Curve = tuple[list[float], list[float | None]]
"""Tokens, or what else the task counts, and values."""

ABSENT = "–"
"""Stands for the value of a key that a configuration does not have."""


@dataclass(slots=True)
class RunData:
    """What a run directory holds."""

    path: Path
    records: list[dict[str, Any]]
    config: dict[str, Any]
    config_text: str
    """config.yaml as it is; empty when there is none."""
    environment: dict[str, Any]
    probes: list[dict[str, Any]] = field(default_factory=list)
    """The lines of its probes."""

    @property
    def end(self) -> int:
        """The last step in the record."""
        return int(max(line["step"] for line in self.records))

    @property
    def unit(self) -> str:
        """What the task counts, in the plural; tokens where it is not known."""
        return str(getattr(self._task(), "unit", "tokens"))

    @property
    def loss_name(self) -> str:
        """What the loss of an item is."""
        return str(getattr(self._task(), "loss_name", "cross-entropy, nats"))

    def option(self, group: str, key: str = "name", default: Any = "") -> Any:
        """An option of a group of the configuration; ``default``: not known."""
        return (self.config.get(group) or {}).get(key, default)

    @property
    def method(self) -> str:
        """Name of the method, with its pattern where that is not 2:4; empty: not known."""
        pattern = f"{self.option('sparsity', 'n', 2)}:{self.option('sparsity', 'm', 4)}"
        return f"{self.option('sparsity')} {pattern}".removesuffix(" 2:4").strip()

    @property
    def metric(self) -> str | None:
        """The score that says how good the model is; None: only the loss was recorded."""
        name = getattr(self._task(), "metric", "loss")
        scores = self.scores()
        return name if name in scores else next(iter(scores), None)

    def metrics(self) -> list[str]:
        """Names of the numbers of evaluations on the validation split, beside the loss."""
        lines = [line for line in self.records if line.get("split") == "validation"]
        names = dict.fromkeys(k for line in lines for k, v in line.items() if _number_or_null(v))
        return [name for name in names if name not in ("step", "time", "tokens", "loss")]

    def scores(self) -> list[str]:
        """Those of :meth:`metrics` that are percentages, which losses and the like are not."""
        losses = ("perplexity", "nll")
        return [m for m in self.metrics() if not m.endswith(losses) and "loss" not in m]

    def _task(self) -> type | None:
        try:
            return registry.get("task", str(self.option("task")))
        except ConfigError:  # a plug-in's that is not loaded, or no configuration
            return None

    def series(self, key: str, split: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Steps (int64) and values (float64, NaN for null) of the records that have ``key``."""
        lines = [line for line in self.records if key in line and line.get("split") == split]
        steps = np.array([line["step"] for line in lines], dtype=np.int64)
        return steps, np.array([line[key] for line in lines], dtype=np.float64)

    def curve(
        self, key: str, split: str | None = None, points: int | None = POINTS
    ) -> Curve | None:
        """Tokens and values; None: no values.

        Thinned to ``points``, those of training averaged first; None: as they are.
        """
        lines = [line for line in self.records if key in line and line.get("split") == split]
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
        """The newest value; None: there is none."""
        values = self.series(key, split)[1]
        return float(values[-1]) if len(values) else None

    def median(self, *keys: str) -> float | None:
        """The median of the finite values of all ``keys``; None: none was recorded."""
        values = np.concatenate([self.series(key)[1] for key in keys])
        known = values[np.isfinite(values)]
        if not len(values):
            return None
        return float(np.median(known)) if len(known) else math.nan

    def layers(self) -> tuple[np.ndarray, list[str], np.ndarray]:
        """Steps (S,), layer names (L) and flip rates (L, S)."""
        prefix = "flip_rate/"
        lines = [line for line in self.records if "split" not in line]
        names = list(dict.fromkeys(n for line in lines for n in line if n.startswith(prefix)))
        lines = [line for line in lines if not line.keys().isdisjoint(names)]
        steps = np.array([line["step"] for line in lines], dtype=np.int64)
        values = np.array([[line.get(n) for line in lines] for n in names], dtype=np.float64)
        return steps, [n.removeprefix(prefix) for n in names], values

    def switches(self) -> list[tuple[int, str]]:
        """(step, "dense → sparse" or "sparse → dense") at every change in the record."""
        steps, sparse = self.series("sparse")
        return [
            (int(step), "dense → sparse" if now else "sparse → dense")
            for step, before, now in zip(steps[1:], sparse, sparse[1:], strict=False)
            if before != now
        ]

    def flip_interval(self) -> int:
        """Steps between two masks whose difference is a flip rate; the usual number."""
        steps, intervals = self.series("flip_interval")
        known = len(steps) and len(steps) * 2 > len(self.series("flip_rate")[0])
        return int(np.median(intervals)) if known else 1


def load(path: Path) -> RunData:
    """Read one run directory.

    Raises:
        ConfigError: no records, or a config.yaml or environment.json that cannot be read.
        DataError: a damaged record.
    """
    run = RunDirectory(path)
    records = run.record()
    if not records:
        raise ConfigError(f"{run.record_file} has no records yet: let the run log its first step")
    config, text = {}, ""
    if run.config_file.is_file():
        config, text = run.config(), run.config_file.read_text(encoding="utf-8")
    return RunData(path, records, config, text, run.environment(), run.probes())


def smooth(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Running mean over the last k points (fewer at the start, NaN ignored), and k."""
    width = max(1, len(values) // SMOOTH)
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known)
    sums[width:] = sums[width:] - sums[:-width]
    counts[width:] = counts[width:] - counts[:-width]
    return np.divide(sums, counts, out=np.full(len(values), math.nan), where=counts > 0), width


def differences(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Dotted configuration keys whose values differ -> the value in each run, or ``ABSENT``.

    The most telling come first: the method, its options, the rest, the name of the run.
    """
    flat = [_flat(run.config) for run in runs]
    rows = {key: [c.get(key, ABSENT) for c in flat] for c in flat for key in c}
    keys = [k for k, v in rows.items() if _group(k) not in NOT_COMPARED and v != v[:1] * len(v)]
    keys.sort(key=lambda k: (k == "name", k != "sparsity.name", _group(k) != "sparsity"))
    return {key: rows[key] for key in keys}


def labels(runs: Sequence[RunData]) -> list[str]:
    """Names that tell the runs apart by what changes the computation.

    The method with its pattern, the precision where runs differ in it, and what a method was told
    beyond its defaults; where one method is compared with itself, what differs.
    """
    differing = {k: v for k, v in differences(runs).items() if _group(k) not in BOOKKEEPING}
    named = "sparsity.name" in differing
    precisions = [run.option("precision") * ("precision.name" in differing) for run in runs]
    methods = [run.method if named else "" for run in runs]
    if not named and {"sparsity.n", "sparsity.m"} & {*differing}:
        methods = [":".join(str(run.option("sparsity", k, None)) for k in "nm") for run in runs]
    chosen = [" ".join(_choices(run)) if named else "" for run in runs]
    names = [
        " ".join(filter(None, words)) for words in zip(methods, precisions, chosen, strict=True)
    ]
    for key in ("sparsity.name", "sparsity.n", "sparsity.m", "precision.name"):
        differing.pop(key, None)
    experiments = {"experiment": [run.config.get("experiment") for run in runs]}
    for key, values in (experiments | differing).items():
        for alike in [[i for i, n in enumerate(names) if n == name] for name in set(names)]:
            if len({str(values[i]) for i in alike}) < 2:
                continue
            for i in alike:
                # an option that only some methods have follows from the method
                if values[i] != ABSENT and (key, values[i]) != ("experiment", None):
                    said = f"{key.removeprefix('sparsity.')}={values[i]}"
                    said = str(values[i]) if key == "experiment" else said
                    names[i] = f"{names[i]} {said}".strip()
    places = ["/".join(run.path.resolve().parts[-2:]) for run in runs]
    if len(set(names)) == 1:  # the same configuration
        return places
    return [
        name if name and names.count(name) == 1 else f"{name} {place}".strip()
        for name, place in zip(names, places, strict=True)
    ]


def without_seeds(labels: Sequence[str]) -> list[str]:
    """The same name for runs that differ in their seed only."""
    return [re.sub(r" ?\bseed=\S+", "", label).strip() or label for label in labels]


def _choices(run: RunData) -> list[str]:
    """``key=value`` of the options of the method that are not its defaults."""
    name = run.option("sparsity")
    try:
        cls: Any = registry.get("method", name)
        defaults = _flat(asdict(cls.Options(name=name)))
    except (ConfigError, TypeError):  # a plug-in's that is not loaded, or has options to be given
        return []
    lists = {k: list(v) if isinstance(v, tuple) else v for k, v in defaults.items()}
    keys = lists.keys() - {"name", "n", "m", "targets"}
    given = _flat(run.config["sparsity"]).items()
    return [f"{k}={v}" for k, v in given if k in keys and str(v) != str(lists[k])]


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

    def seeds(self) -> dict[str, list[RunData]]:
        """Name -> its runs."""
        found: dict[str, list[RunData]] = {name: [] for name in self.names}
        for name, run in zip(self.names, self.runs, strict=True):
            found[name].append(run)
        return found

    def groups(self) -> dict[str, list[tuple[RunData, RunData]]]:
        """Name -> (run, its partner) of everything that is not the reference itself."""
        found: dict[str, list[tuple[RunData, RunData]]] = {}
        for name, run, partner in zip(self.names, self.runs, self.partners, strict=True):
            if partner is not None and partner is not run:
                found.setdefault(name, []).append((run, partner))
        return found


def pair(runs: Sequence[RunData], labels: Sequence[str]) -> Paired:
    """Find the dense run of the same seed and data for each run; without any, one like the first.

    Paired runs see the same samples in the same order: they share seed, data, task and batch size.
    Of several dense runs the one with the model of the run is taken.
    """
    names = without_seeds(labels)
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


def uneven_validation(runs: Sequence[RunData], labels: Sequence[str]) -> str | None:
    """Why validation losses are not comparable; None: all runs see as many samples."""
    found: dict[str, list[str]] = {}
    for run, label in zip(runs, labels, strict=True):
        batches, micro = run.option("eval", "batches"), run.option("batch", "micro", None)
        if batches == "" or (batches is not None and micro is None):
            continue  # not known
        what = "the whole split" if batches is None else f"{batches * micro:,} samples"
        found.setdefault(what, []).append(label)
    if len(found) < 2:
        return None
    parts = "; ".join(f"{what} for {', '.join(names)}" for what, names in found.items())
    return f"validation differs in eval.batches or batch.micro, so its losses do too: {parts}"


def glue_scores(runs: Sequence[RunData]) -> dict[str, float]:
    """Task of GLUE -> its one number, in percent: the last ``score``, averaged over seeds.

    A task with two metrics counts their mean, and MNLI the mean of its two parts, so nothing is
    counted twice. Runs on other data are left out.

    Raises:
        DataError: a run of GLUE has no evaluation.
    """
    found: dict[str, list[float]] = {}
    for run in runs:
        name = run.option("data")
        if not name.startswith("glue_"):
            continue
        scores = [line["score"] for line in run.records if line.get("score") is not None]
        if not scores:
            raise DataError(f"{run.path} has no evaluation: finish the run first")
        found.setdefault(name.removeprefix("glue_"), []).append(scores[-1])
    return {task: sum(scores) / len(scores) for task, scores in sorted(found.items())}


def _group(key: str) -> str:
    return key.partition(".")[0]


def _number_or_null(value: object) -> bool:
    return isinstance(value, int | float | None) and not isinstance(value, bool)


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in freeze.flat(config).items() if value != {}}
