"""Launchers and sweepers of Hydra: its own node of the configuration, and plug-ins.

Hydra's plug-ins ask ``config_loader.load_sweep_config(master, overrides)`` for the configuration of
a job. :class:`Loader` composes the strict configuration of a run for them, and adds Hydra's node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepretrain.config import strict
from sparsepretrain.config.compose import parse, quote
from sparsepretrain.config.places import search_path
from sparsepretrain.config.validate import load, validate
from sparsepretrain.console import Console
from sparsepretrain.errors import (
    INTERRUPTED,
    ConfigError,
    DivergedError,
    SparsePretrainError,
    one_line,
)
from sparsepretrain.registry import suggestion
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies.cells import Cell, Part, grid
from sparsepretrain.studies.child import run_here
from sparsepretrain.studies.launchers import LAUNCHERS, EngineConf, Launcher, Plugin
from sparsepretrain.studies.progress import Progress, Stopped, StudyCell
from sparsepretrain.studies.search import SAMPLERS, OptunaConf
from sparsepretrain.training.hardware import visible_devices
from sparsepretrain.training.schedules import resolve_steps

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

OURS = "hydra_plugins.sparsepretrain"
"""Package of our plug-ins: Hydra accepts plug-ins of ``hydra_plugins`` only."""

KEPT = (
    "hydra.job.chdir=false",
    "hydra.output_subdir=null",
    "hydra.sweep.subdir=.",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
"""Run directories, the working directory and what is printed are ours."""

REFUSED = {
    "hydra.run": "a run has a directory of its own; set runs_dir",
    "hydra.sweep": "the runs of a study are in runs_dir/NAME; set runs_dir and name",
    "hydra.job.chdir": "data and plug-ins are found from the directory of the command",
    "hydra.output_subdir": "a run keeps its configuration in config.yaml of its directory",
    "hydra.searchpath": "give --config-dir DIR",
    "hydra.mode": "-m says it",
}
"""Key of Hydra's node, or the node that has it -> reason for refusing it."""


def register() -> None:
    """Register our launchers and sweeper with Hydra, in place of installed ones of the same names.

    An editable installation has no directory in which Hydra would find them. Other programs with
    Hydra keep theirs: nothing is registered when the package is imported.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    import hydra_plugins.sparsepretrain as ours

    plugins = Plugins.instance()  # first: it imports the installed plug-ins, which register names
    store = ConfigStore.instance()
    for name, keys in LAUNCHERS.items():
        plugins.register(getattr(ours, keys.plugin))
        node = {"_target_": f"{OURS}.{keys.plugin}", **asdict(keys())}
        store.store(group="hydra/launcher", name=name, node=node, provider="sparsepretrain")
    plugins.register(ours.OptunaSweeper)
    node = {"defaults": [{"sampler": "tpe"}], "_target_": f"{OURS}.OptunaSweeper"}
    node |= asdict(OptunaConf())
    del node["sampler"]
    store.store(group="hydra/sweeper", name="optuna", node=node, provider="sparsepretrain")
    for name, sampler in SAMPLERS.items():
        store.store(
            group="hydra/sweeper/sampler",
            name=name,
            node={"name": name, **sampler},
            provider="sparsepretrain",
        )


@dataclass
class Loader:
    """Hydra's configuration loader for its own node, and ours for the runs.

    It is pickled into the jobs of launchers.
    """

    inner: Any
    """Hydra's own."""
    study: str
    """Directory below ``runs_dir``."""
    config_dirs: tuple[Path, ...]
    stop_after: int | None
    swept: frozenset[str] = frozenset()
    """Keys with several values, which name the directory of a run."""
    launcher: Launcher = field(default_factory=EngineConf)
    sweeper: OptunaConf | None = None
    """Keys of our own sweeper; None for others."""
    jobs: int | None = None
    """Cells at a time on this machine; None: see :func:`reproduce.study_of`."""

    def cell(self, words: Sequence[str]) -> Cell:
        """Return the run of a sweeper's words: ``name=`` among them, or the swept ones, name it."""
        own = [word for word in words if not is_hydras(word)]
        seed = next((w.partition("=")[2] for w in reversed(own) if key_of(w) == "seed"), "0")
        if not seed.isdigit():
            raise ConfigError(f"seed={seed}: expected an integer ≥ 0")
        names = [w.partition("=")[2] for w in own if key_of(w) == "name"]
        row = names[-1] if names else " ".join(w for w in own if key_of(w) in self.swept - {"seed"})
        left = [w for w in own if key_of(w) not in ("seed", "name")]
        nodes = getattr(self.launcher, "nodes", 1)
        wanted = {(row or "run", ""): left}
        return grid(self.study, wanted, [int(seed)], self.config_dirs, nodes=nodes)[0]

    def part(self, jobs: Sequence[Sequence[str]]) -> Part:
        """Return the runs of several jobs."""
        from sparsepretrain.studies.tables import Table

        cells = [self.cell(words) for words in jobs]
        table = Table(title=self.study)
        return Part(self.study, table, None, cells, self.stop_after, self.config_dirs)

    def load_sweep_config(self, master: DictConfig, words: list[str]) -> DictConfig:
        """Return the configuration of a job, with Hydra's node."""
        from omegaconf import OmegaConf, open_dict

        config = self.inner.load_sweep_config(master, [w for w in words if is_hydras(w)])
        complete = {"runs_dir", "name", "seed"} <= {key_of(word) for word in words}
        own = words if complete else self.cell(words).words
        full = OmegaConf.create(load(own, self.config_dirs).plain)
        with open_dict(config):
            config.hydra.overrides.task = list(own)
            full.hydra = config.hydra
        return full

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


def is_hydras(word: str) -> bool:
    """Return True for a word about Hydra's own node: ``hydra/launcher=…``, ``hydra.sweeper.…=``."""
    return key_of(word).replace("/", ".").split(".")[0] == "hydra"


def key_of(word: str) -> str:
    """Return the key of an override."""
    return word.lstrip("+~").partition("=")[0]


def compose_node(
    words: Sequence[str], study: str, runs_dir: str, config_dirs: Sequence[Path]
) -> tuple[DictConfig, Any]:
    """Return the configuration with Hydra's node for ``hydra…`` words, and Hydra's loader.

    Raises:
        ConfigError: every unknown option or key, wrong value and refused key.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException, MissingConfigException
    from hydra.types import RunMode

    errors: list[str] = []
    choices = list(KEPT)
    values = []
    for word in words:
        key = key_of(word)
        reasons = [why for at, why in REFUSED.items() if key == at or key.startswith(f"{at}.")]
        if reasons:
            errors.append(f"{word}: {reasons[0]}, and leave {key} out")
        elif "/" in key:
            choices.append(word)
        elif (override := parse(word)) is None:
            errors.append(f"{word}: cannot be read; write {key or 'hydra.KEY'}=VALUE")
        else:
            values.append((word, override))
    ours, *users = search_path(config_dirs)
    places = f"hydra.searchpath=[{','.join(quote(f'file://{user}') for user in users)}]"
    sweep = f"hydra.sweep.dir={quote(f'{runs_dir}/{study}')}"
    name = f"hydra.job.name={quote(study)}"
    base = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
    # Hydra's singletons are pickled into jobs: its context ends before runs are composed
    with hydra.initialize_config_dir(str(ours), job_name="train", **base):
        register()
        app = GlobalHydra.instance().hydra
        assert app is not None
        try:
            config = app.compose_config("train", [*choices, places, sweep, name], RunMode.MULTIRUN)
        except MissingConfigException as error:
            group, _, option = str(error.missing_cfg_file).rpartition("/")
            near = suggestion(option, error.options or ())
            text = f"{group} has no option {option!r}{near}; is its plug-in of Hydra installed?"
            raise ConfigError([*errors, text]) from error
        except HydraException as error:
            raise ConfigError([*errors, one_line(error)]) from error
    for word, override in values:
        errors += _set(config, word, override)
    if errors:
        raise ConfigError(errors)
    return config, app.config_loader


def _set(config: DictConfig, word: str, override: Any) -> Iterator[str]:
    """Set a key of Hydra's node; yield the error."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key = override.key_or_group
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(config, parent) if parent else None
    known = list(node) if OmegaConf.is_dict(node) else []
    # parameters of the search, and what `+` adds, have names of their own
    free = word.startswith("+") or ".params" in key
    if override.is_sweep_override() and ".params" not in key:
        yield f"{word}: expected one value"
    elif not free and name not in known:
        group = parent.replace(".", "/", 1)
        hint = suggestion(name, known, f"{parent}.")
        if config.hydra.runtime.choices.get(group) == "basic":  # nothing was chosen
            hint = f": choose what has it with {group}=NAME (docs/many_runs.md)"
        yield f"unknown key {key!r}{hint}"
    else:
        value = override.value()
        if override.is_sweep_override():  # the search reads it as typed
            value = word.partition("=")[2]
        try:
            OmegaConf.update(config, key, value, merge=isinstance(value, dict), force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:
            yield f"{key}: {one_line(error).split(' full_key')[0]}"


def launcher_of(config: DictConfig) -> Launcher:
    """Return the checked keys of the chosen launcher."""
    from omegaconf import OmegaConf

    keys: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    target = keys.pop("_target_")
    for cls in LAUNCHERS.values():
        if target == f"{OURS}.{cls.plugin}":
            return strict.build(cls, keys, "hydra.launcher")
    return Plugin(name=str(config.hydra.runtime.choices["hydra/launcher"]))


def sweeper_of(config: DictConfig) -> OptunaConf | None:
    """Return the checked keys of our sweeper, or None if another one is chosen."""
    from omegaconf import OmegaConf

    if config.hydra.sweeper._target_ != f"{OURS}.OptunaSweeper":
        return None
    keys: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    del keys["_target_"]
    return strict.build(OptunaConf, keys, "hydra.sweeper")


def launch(loader: Loader, jobs: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Run the jobs of a sweeper with one of our launchers."""
    from sparsepretrain.studies import reproduce

    console = Console()
    found = reproduce.check([loader.part(jobs)], console)
    parallel = loader.jobs
    if loader.sweeper is not None and isinstance(loader.launcher, EngineConf):
        # on GPUs as many as fit: trials that share one would run out of memory
        parallel = parallel or (None if visible_devices() else loader.sweeper.n_jobs)
    with reproduce.study_of(found, console, parallel, loader.launcher) as study:
        try:
            study.run(reproduce.to_run(found, console))
        finally:
            if loader.sweeper is None:  # ours prints its trials
                study.show_all()
        return [outcome(cell) for cell in study.cells]


def outcome(cell: StudyCell) -> JobReturn:
    """Return the result of a cell as a sweeper reads it: the loss, infinite if it diverged."""
    from hydra.core.utils import JobReturn, JobStatus

    result = JobReturn(overrides=cell.words, status=JobStatus.COMPLETED)
    if cell.state == cell.goal:
        result.return_value = loss_of(cell.directory)
    elif cell.state == "failed" and cell.exit_code == DivergedError.exit_code:
        result.return_value = float("inf")
    else:  # a canceled job too: the loss at which it ended says nothing
        result.status = JobStatus.FAILED
        text = f"{cell.label}: {cell.error or cell.state}"
        result.return_value = CellFailed(cell.exit_code or 1, text)
    return result


def loss_of(directory: RunDirectory) -> float:
    """Return the last validation loss of a run, infinite if there is none."""
    lines = directory.record() if directory.record_file.is_file() else []
    losses = [line["loss"] for line in lines if line.get("split") == "validation"]
    return float("inf") if not losses or losses[-1] is None else float(losses[-1])


class CellFailed(SparsePretrainError):
    """Failed run, as an exception that a launcher can pickle."""

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code if exit_code > 0 else 1
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.exit_code, self.text)


def run_job(config: DictConfig, stop_after: int | None) -> float:
    """Train the run of a job of another launcher; return its objective."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config, resolve=True)
    command = ("train", *HydraConfig.get().overrides.task)
    cell = StudyCell("", resolve_steps(validate(plain)), stop_after, command)
    if cell.left != cell.goal:
        code = run_here(cell)
        if code == DivergedError.exit_code:
            return float("inf")
        if code:
            raise CellFailed(code, cell.error)
    return loss_of(cell.directory)


class PluginStudy(Progress):
    """Runs the cells with a launcher of another plug-in, all in one call."""

    def __init__(self, title: str, console: Console, loader: Loader, config: DictConfig) -> None:
        super().__init__(title, console)
        self._loader = loader
        self._config = config

    def run(self, cells: Sequence[StudyCell]) -> None:  # noqa: D102
        self.cells = [*cells]
        waiting = [cell for cell in cells if not self._is_done(cell)]
        if not waiting:
            return
        launcher = instantiate(self._config, self._loader, "launcher")
        for cell in waiting:
            cell.state = "running"
            self._say(cell, f"{cell.left}; prints to {cell.directory.console_log}")
        try:
            launcher.launch([list(cell.words) for cell in waiting], 0)
        except KeyboardInterrupt:
            raise Stopped(INTERRUPTED) from None
        finally:
            for cell in waiting:
                self._finish(cell)

    def _finish(self, cell: StudyCell) -> None:
        cell.look()
        if cell.left == cell.goal:
            cell.state = cell.goal
            self._say(cell, cell.state)
            return
        failure = cell.directory.failures().get("train")
        if failure is None:
            cell.state = "stopped"
        else:
            self._fail(cell, failure["exit_code"], failure["error"], note=False)


def instantiate(config: DictConfig, loader: Loader, kind: str) -> Any:
    """Return the chosen launcher or sweeper as Hydra instantiates it.

    Args:
        config: configuration with Hydra's node.
        loader: composes the configurations of jobs.
        kind: ``launcher`` or ``sweeper``.

    Raises:
        ConfigError: the plug-in is not installed, or refuses its keys.
    """
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from hydra.types import HydraContext

    plugins = Plugins.instance()
    make = plugins.instantiate_launcher if kind == "launcher" else plugins.instantiate_sweeper
    loader_: Any = loader
    context = HydraContext(config_loader=loader_, callbacks=Callbacks(config))
    task = partial(run_job, stop_after=loader.stop_after)
    try:
        return make(hydra_context=context, task_function=task, config=config)
    except (HydraException, ImportError, TypeError, ValueError) as error:
        choice = config.hydra.runtime.choices[f"hydra/{kind}"]
        raise ConfigError(f"hydra/{kind}={choice}: {one_line(error)}") from error
