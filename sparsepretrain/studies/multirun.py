"""``train -m``: several runs from one command line, as users of Hydra write it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepretrain.config.compose import parse, read
from sparsepretrain.config.freeze import flat
from sparsepretrain.config.places import catalog
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError, needs
from sparsepretrain.files import is_plain_name
from sparsepretrain.studies import plugins, search
from sparsepretrain.studies.cells import Part, grid
from sparsepretrain.studies.launchers import (
    EngineConf,
    Launcher,
    LocalQueueConf,
    Plugin,
    SlurmQueueConf,
)
from sparsepretrain.studies.progress import Progress
from sparsepretrain.studies.tables import Table

if TYPE_CHECKING:
    from omegaconf import DictConfig

NAME = "multirun"
"""Directory below ``runs_dir`` unless ``name=`` gives another."""
MOST_RUNS = 10_000
"""Most runs of a command, and most values of a list."""


@dataclass(slots=True)
class Axes:
    """Values of the runs of a command."""

    fixed: list[str] = field(default_factory=list)
    """Words of all runs."""
    values: dict[str, list[str]] = field(default_factory=dict)
    """Key -> values as typed."""
    seeds: list[int] = field(default_factory=lambda: [0])

    def part(self, name: str, how: tuple[int | None, Sequence[Path]], nodes: int = 1) -> Part:
        """Return every combination of values and seeds as the cells of a study.

        Args:
            name: of the study.
            how: ``stop_after`` and ``config_dirs`` of the part.
            nodes: machines of a run.
        """
        words = [[f"{key}={value}" for value in self.values[key]] for key in self.values]
        runs = math.prod(map(len, words)) * len(self.seeds)
        if runs > MOST_RUNS:
            raise ConfigError(f"expected at most {MOST_RUNS:,} runs, got {runs:,}: shorten a list")
        combinations = itertools.product(*words)
        named = {(" ".join(chosen) or "run", ""): [*self.fixed, *chosen] for chosen in combinations}
        cells = grid(name, named, self.seeds, how[1], nodes=nodes)
        return Part(name, Table(title=name), None, cells, *how)


def read_axes(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> Axes:
    """Sort words into single values and lists; the last of a key counts.

    Lists are Hydra's ``a,b``, ``range(…)``, ``choice(…)``, and ``glob(…)`` of a group.

    Raises:
        ConfigError: every word that gives no list of values.
    """
    from hydra.core.override_parser.types import Glob

    axes = Axes()
    errors = []
    groups = catalog(config_dirs)
    for word in map(str.strip, words):
        parsed: Any = parse(word)
        if parsed is None:
            axes.fixed.append(word)  # composing reports the error
            continue
        key = parsed.key_or_group
        values = [word.partition("=")[2]]
        if parsed.is_sweep_override():
            value = parsed.value()
            if isinstance(value, Glob) and key in groups:
                values = value.filter(list(groups[key]))
            elif parsed.is_interval_sweep() or isinstance(value, Glob):
                hint = " or search it with hydra/sweeper=optuna" if key not in groups else ""
                errors.append(f"{word}: expected values, such as {key}=a,b,c{hint}")
                continue
            elif parsed.is_range_sweep() and value.step == 0:
                errors.append(f"{word}: expected a step that is not 0")
                continue
            else:
                values = list(itertools.islice(parsed.sweep_string_iterator(), MOST_RUNS + 1))
            if len(values) > MOST_RUNS:
                errors.append(f"{word}: expected at most {MOST_RUNS:,} values, got more")
                continue
            if not values:
                errors.append(f"{word}: expected at least one value, got none")
                continue
        if key == "seed" and all(value.isdigit() for value in values):
            axes.seeds = list(dict.fromkeys(map(int, values)))
        elif len(values) == 1:
            axes.values.pop(key, None)
            axes.fixed.append(f"{key}={values[0]}" if parsed.is_sweep_override() else word)
        else:
            axes.values[key] = list(dict.fromkeys(values))
    if errors:
        raise ConfigError(errors)
    return axes


@dataclass(slots=True)
class Multirun:
    """Checked command line of ``train -m``."""

    name: str
    launcher: Launcher
    config: DictConfig
    """Configuration with Hydra's node."""
    loader: plugins.Loader
    words: list[str]
    """Words of the runs, without those of Hydra."""
    part: Part | None
    """All runs; None: a sweeper chooses them."""

    def study(self) -> Launcher | Progress:
        """Return what trains the runs: keys of our own launchers, or the plug-in."""
        if isinstance(self.launcher, Plugin):
            return plugins.PluginStudy(self.name, Console(), self.loader, self.config)
        return self.launcher

    def sweep(self) -> None:
        """Run the sweeper, which trains with the launcher."""
        plugins.instantiate(self.config, self.loader, "sweeper").sweep(self.words)


def read_command(
    words: Sequence[str],
    config_dirs: Sequence[Path] = (),
    stop_after: int | None = None,
    jobs: int | None = None,
) -> Multirun:
    """Read the words of ``train -m``.

    Args:
        words: overrides with lists of values, ``name=`` of the study, and words of Hydra's node.
        config_dirs: see :func:`validate.load`.
        stop_after: step after which every run ends early, or None.
        jobs: cells at a time on this machine; None: see :func:`reproduce.study_of`.

    Raises:
        ConfigError: every mistake in the words and in the configurations of the runs.
    """
    hydras = [word for word in words if plugins.is_hydras(word)]
    names = [word.partition("=")[2] for word in words if plugins.key_of(word) == "name"]
    own = [w for w in words if not plugins.is_hydras(w) and plugins.key_of(w) != "name"]
    errors = []
    name = names[-1] if names else NAME
    if not is_plain_name(name) or "," in name:
        errors.append(f"name={name}: expected a plain directory name for the runs of the study")
        name = NAME
    how = (stop_after, config_dirs)
    runs_dir = next((w.partition("=")[2] for w in own[::-1] if plugins.key_of(w) == "runs_dir"), "")
    try:
        with_defaults = dict(read([f"runs_dir={runs_dir}"] if runs_dir else []).values)
        base = str(with_defaults.get("runs_dir", "runs"))
        config, inner = plugins.compose_node(hydras, name, base, config_dirs)
        launcher = launcher_for_command(config)
        sweeper = plugins.sweeper_of(config)
    except ConfigError as error:
        errors += error.messages
        errors += _mistakes(own, name, how)
        raise ConfigError(errors) from error
    if jobs is not None and not isinstance(launcher, EngineConf):
        errors.append("--jobs is for this machine: give a key of hydra.launcher")
    loader = plugins.Loader(
        inner, name, tuple(config_dirs), stop_after, launcher=launcher, sweeper=sweeper, jobs=jobs
    )
    part = None
    try:
        typed = flat(dict(config.hydra.sweeper.get("params") or {}))
        params = [f"{key}={value}" for key, value in typed.items() if key]
        if sweeper is not None:
            space = search.read_space(sweeper.params, own)
            loader.part([[*example, "name=trial"] for example in space.examples()])
        elif str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
            axes = read_axes([*params, *own], config_dirs)
            part = axes.part(name, how, getattr(launcher, "nodes", 1))
        else:
            loader.swept = frozenset(swept_keys([*params, *own]))
    except ConfigError as error:
        errors += error.messages
    if errors:
        raise ConfigError(errors)
    return Multirun(name, launcher, config, loader, own, part)


def _mistakes(words: Sequence[str], name: str, how: tuple[int | None, Sequence[Path]]) -> list[str]:
    """Return the mistakes of runs whose launcher is unknown."""
    try:
        axes = read_axes([word for word in words if "interval(" not in word], how[1])
        axes.part(name, how)
    except ConfigError as error:
        return error.messages
    return []


def launcher_for_command(config: DictConfig) -> Launcher:
    """Return the keys of the launcher; refuse one whose packages are missing."""
    launcher = plugins.launcher_of(config)
    if isinstance(launcher, SlurmQueueConf | LocalQueueConf):
        option = config.hydra.runtime.choices["hydra/launcher"]
        with needs(f"hydra/launcher={option}", "submitit", "slurm", error=ConfigError):
            import submitit  # noqa: F401
    if plugins.sweeper_of(config) is not None:
        with needs("hydra/sweeper=optuna", "optuna", "search", error=ConfigError):
            import optuna  # noqa: F401
    return launcher


def swept_keys(words: Sequence[str]) -> list[str]:
    """Return the keys with several values."""
    parsed = map(parse, words)
    return [each.key_or_group for each in parsed if each is not None and each.is_sweep_override()]


def launcher_of_table(words: Sequence[str], name: str, config_dirs: Sequence[Path]) -> Launcher:
    """Return the launcher that ``hydra…`` words of ``reproduce`` choose.

    Raises:
        ConfigError: another sweeper, or a launcher that runs no stages of a table.
    """
    if not words:
        return EngineConf()
    config, _ = plugins.compose_node(words, name, "runs", config_dirs)
    launcher = launcher_for_command(config)
    choices = config.hydra.runtime.choices
    if not str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
        raise ConfigError(
            f"hydra/sweeper={choices['hydra/sweeper']}: a table has its runs; leave it out"
        )
    if isinstance(launcher, Plugin):
        raise ConfigError(
            f"hydra/launcher={launcher.name} trains runs of `train -m` and no stages of a table: "
            "use submitit_slurm or submitit_local, or --jobs N on this machine"
        )
    return launcher
