"""Search for the decay factor λ of masked decay, on the learning-rate warm-up alone.

The ratio μ = r_λ / r_dense of the flip rates of a sparse and a dense run at the end of warm-up
falls as λ grows. A λ with μ in [0.60, 0.95] is feasible (arXiv:2404.01847 section 4). A search is a
dense run and one run per λ of a grid; all end with the warm-up. The parent never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsepretrain import registry
from sparsepretrain.config import freeze, validate
from sparsepretrain.config.compose import shell_line
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError
from sparsepretrain.files import write_atomic
from sparsepretrain.sparsity.method import Method
from sparsepretrain.sparsity.methods.tsrste import TSRSTE
from sparsepretrain.studies.engine import CellError, Study, StudyCell
from sparsepretrain.tracking.console import Console, significant

GRID = (6.0e-6, 1.0e-3)
"""Smallest and largest published λ (BERT and DeiT-base)."""

POINTS = 5
"""Default number of grid points, a factor of 3.6 apart."""

INTERVAL = (0.60, 0.95)
"""Feasible μ (arXiv:2404.01847 section 4)."""

LAST = 3
"""Minimum mask comparisons in the mean of a flip rate, which covers the last tenth."""

DEFAULT = "sparsity=tsrste"
"""Method if neither an override nor an experiment chooses one."""

RESULT = "tune.json"
"""File of the results in the directory of a search."""


@dataclass(frozen=True, slots=True)
class DecaySearch:
    """Search over λ for a run whose method has a ``decay``."""

    run: Run
    grid: tuple[float, ...]
    """λ to try, ascending."""
    interval: tuple[float, float]
    """Feasible μ."""
    steps: int
    """Steps of each run; learning rates are those of the whole run."""

    def __post_init__(self) -> None:
        run, name = self.run, self.run.sparsity.name
        if not hasattr(run.sparsity, "decay"):
            raise ConfigError(f"sparsity={name} has no decay to tune: choose tsrste or srste")
        if run.resume not in ("auto", "never"):
            raise ConfigError(f"resume={run.resume} is for one run; a search takes auto or never")
        if not 0 < self.steps <= run.steps:
            raise ConfigError(f"--steps must be from 1 to steps={run.steps}, got {self.steps}")
        method = self._method()
        if flip_rule(method) is None:
            raise ConfigError(f"sparsity={name} has its own mask rule, unknown to a dense run")
        start, stop = method.schedule.start, method.schedule.stop
        if not start < self.steps <= stop:
            raise ConfigError(
                f"the layers are not sparse at the end of the first {self.steps} steps (sparse "
                f"from step {start} to {stop}): change sparsity.window or --steps"
            )
        if not self.comparisons:
            raise ConfigError(
                f"no masks are compared in {self.steps} steps: lower sparsity.refresh "
                f"({self.refresh}) or give more --steps"
            )

    @property
    def refresh(self) -> int:
        """Optimizer steps between two mask comparisons."""
        return int(getattr(self.run.sparsity, "refresh", 1))

    @property
    def comparisons(self) -> int:
        """Number of mask comparisons in a segment."""
        schedule = self._method().schedule
        return sum(map(schedule.compares_after, range(1, self.steps + 1)))

    @property
    def out(self) -> Path:
        """Default directory of the results, equal for equal searches."""
        plain = self._segment(self.run.plain["sparsity"])
        del plain["sparsity"]["decay"]
        directory = freeze.run_directory(plain)
        return directory.with_name(f"search-{directory.name}")

    @property
    def cells(self) -> list[StudyCell]:
        """The dense run with equal data, initial weights and mask rule, then a run per λ."""
        sparsity = self.run.plain["sparsity"]
        dense = {key: sparsity[key] for key in ("n", "m", "targets", "window")}
        dense |= {"name": "dense", "flip_rule": flip_rule(self._method()), "refresh": self.refresh}
        options = [("dense", dense)]
        options += [(f"λ = {decay:.3g}", sparsity | {"decay": decay}) for decay in self.grid]
        runs = [(label, validate(self._segment(own))) for label, own in options]
        return [StudyCell(label, run, self.steps) for label, run in runs]

    def _method(self) -> Method:
        method: type[Method] = registry.get("method", self.run.sparsity.name)
        return method(self.run.sparsity, self.run.steps)

    def _segment(self, sparsity: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of a segment: every flip recorded, no evaluation."""
        plain = self.run.plain | {"sparsity": sparsity}
        plain["name"] = f"tune_{plain['name']}"
        plain["eval"]["batches"] = 0
        plain["log"] = {"every": 1, "layers_every": 0, "masks_every": 0}
        plain["checkpoint"]["keep_last"] = 1
        return plain


def with_default(overrides: Sequence[str]) -> list[str]:
    """Add T-SR-STE to ``overrides`` without a method or an experiment."""
    chosen = any(key_of(word) in ("sparsity", "experiment") for word in overrides)
    return [*overrides] if chosen else [DEFAULT, *overrides]


def key_of(override: str) -> str:
    """Return the key of ``key=value``."""
    return override.partition("=")[0].strip().lstrip("+")


def log_grid(low: float, high: float, points: int) -> tuple[float, ...]:
    """Return ``points`` values from ``low`` to ``high``, even in the logarithm, with 3 digits."""
    ratio = (high / low) ** (1 / (points - 1))
    return tuple(dict.fromkeys(float(f"{low * ratio**i:.3g}") for i in range(points)))


def tune_decay(
    search: DecaySearch,
    out: Path,
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
    console: Console,
) -> dict[str, Any]:
    """Run (or continue) the runs of a search, print the table and write ``tune.json``.

    Return its contents: ``chosen`` is λ or None, ``message`` the command or the reason. A signal
    raises Stopped; the same call continues.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {out} ({error.strerror}): set --out DIR") from error
    if (few := search.comparisons) < LAST:
        console.warn(
            f"μ is noisy: {few} mask comparisons in {search.steps} steps; lower sparsity.refresh "
            f"({search.refresh}) or give more --steps"
        )
    dense, *cells = search.cells
    with Study("decay search", console) as study:
        study.run([dense])  # first and alone: without flips of its masks μ is undefined
        reference = _measure(search, dense)
        if not reference["flip_rate"]:
            raise ConfigError(
                f"no mask flips at the end of the dense run {dense.directory}: give more --steps"
            )
        study.run(cells)
    runs: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for decay, cell in zip(search.grid, cells, strict=True):
        if cell.state == "failed":
            about = {"exit_code": cell.exit_code, "directory": str(cell.directory)}
            failed.append({"decay": decay, "error": cell.error, **about})
            continue
        found = _measure(search, cell)
        mu = found["flip_rate"] / reference["flip_rate"]
        runs.append({"decay": decay, "mu": mu, "verdict": verdict(mu, search.interval), **found})
    if not runs:
        raise CellError(cells[0])
    ratios = {run["decay"]: run["mu"] for run in runs}
    chosen = choose(ratios, search.interval)
    if chosen is None:
        message = why_none(ratios, search.interval, [run["decay"] for run in failed])
    else:
        words = [word for directory in config_dirs for word in ("--config-dir", str(directory))]
        words += [word for word in overrides if key_of(word) != "sparsity.decay"]
        message = shell_line(["sparsepretrain", "train", *words, f"sparsity.decay={chosen!r}"])
    result = {
        "method": search.run.sparsity.name,
        "steps": search.steps,
        "refresh": search.refresh,
        "interval": list(search.interval),
        "dense": reference,
        "runs": runs,
        "failed": failed,
        "config": search.run.plain,
        "chosen": chosen,
        "message": message,
    }
    _show(search, result, console)
    write_atomic(out / RESULT, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return result


def choose(ratios: dict[float, float], interval: tuple[float, float]) -> float | None:
    """Return the λ whose μ is nearest to the middle of the interval, or None if none is inside.

    Of equally near λ the smaller one is taken, which disturbs training less.
    """
    middle = sum(interval) / 2
    feasible = [decay for decay, mu in ratios.items() if verdict(mu, interval) == "feasible"]
    return min(feasible, key=lambda decay: (abs(ratios[decay] - middle), decay), default=None)


def verdict(mu: float, interval: tuple[float, float]) -> str:
    """Classify the λ of a ratio μ."""
    low, high = interval
    if mu > high:
        return "too small"
    return "feasible" if mu >= low else "too large"


def why_none(
    ratios: dict[float, float], interval: tuple[float, float], failed: Sequence[float] = ()
) -> str:
    """Return why no λ was chosen, and the grid to try; failed λ above all others are too large."""
    low, high = interval
    missed = f"no λ from {min(ratios):.3g} to {max(ratios):.3g} has μ in [{low:g}, {high:g}]"
    weak = [decay for decay, mu in ratios.items() if mu > high]
    strong = [decay for decay, mu in ratios.items() if mu < low]
    strong += [decay for decay in failed if decay > max(ratios)]
    if not strong:
        return f"{missed}: μ falls to {min(ratios.values()):.3f} only; raise the end of --grid"
    if not weak:
        return f"{missed}: μ rises to {max(ratios.values()):.3f} only; lower the start of --grid"
    return f"{missed}: give --grid {max(weak):.3g},{min(strong):.3g}, between which μ crosses it"


def _measure(search: DecaySearch, cell: StudyCell) -> dict[str, Any]:
    """Return means over the last mask comparisons and over the last tenth of the steps."""
    if cell.state == "failed":
        raise CellError(cell)
    lines = [line for line in cell.directory.record() if line["step"] <= search.steps]
    flips = [line["flip_rate"] for line in lines if line.get("flip_rate") is not None]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    last = flips[-max(LAST, len(flips) // 10) :]
    tail = losses[-max(1, search.steps // 10) :]
    return {
        "flip_rate": sum(last) / len(last),
        "loss": sum(tail) / len(tail),
        "compared": len(last),
        "directory": str(cell.directory),
    }


def _show(search: DecaySearch, result: dict[str, Any], console: Console) -> None:
    dense = result["dense"]
    rows = [("dense", f"{dense['flip_rate']:.3e}", "1", "reference", significant(dense["loss"]))]
    for run in result["runs"]:
        state = "chosen" if run["decay"] == result["chosen"] else run["verdict"]
        numbers = f"{run['flip_rate']:.3e}", f"{run['mu']:.3f}", state, significant(run["loss"])
        rows.append((f"{run['decay']:.3g}", *numbers))
    rows += [(f"{run['decay']:.3g}", "–", "–", "failed", "–") for run in result["failed"]]
    console.table("decay search", rows, header=("λ", "flip rate", "μ", "λ is", "train loss"))
    low, high = search.interval
    console.info(
        f"{result['method']}, first {search.steps} of {search.run.steps} steps; flip rates are "
        f"means of the last {dense['compared']} mask comparisons; feasible μ: {low:g} to {high:g}"
    )


def flip_rule(method: Method) -> str | None:
    """Return the mask rule with which a dense run logs comparable flips, or None."""
    rule = type(method).mask
    if rule is Method.mask:
        return "magnitude"
    return "transposable" if rule is TSRSTE.mask else None
