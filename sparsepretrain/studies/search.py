"""``hydra/sweeper=optuna``: settings that Optuna chooses, one trial a run.

The released plug-in of Hydra needs Optuna < 3; this one has its keys and its grammar of parameters
on Optuna ≥ 4. Trials are asked for in this process and trained by the chosen launcher.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sparsepretrain.config.compose import parse
from sparsepretrain.config.freeze import flat
from sparsepretrain.console import Console, significant
from sparsepretrain.errors import ConfigError, Problems, SparsePretrainError, needs, one_line
from sparsepretrain.files import write_atomic
from sparsepretrain.registry import suggestion
from sparsepretrain.studies.submission import Refused

if TYPE_CHECKING:
    import optuna

SAMPLERS: dict[str, dict[str, Any]] = {
    "tpe": {"seed": None, "n_startup_trials": 10, "n_ei_candidates": 24, "multivariate": False},
    "random": {"seed": None},
    "cmaes": {"seed": None, "n_startup_trials": 1, "sigma0": None},
    "nsgaii": {"seed": None, "population_size": 50},
    "qmc": {"seed": None, "scramble": False},
    "grid": {"seed": None},
}
"""Option of ``hydra/sweeper/sampler`` -> its keys, those of the class in ``optuna.samplers``."""

CLASSES = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "cmaes": "CmaEsSampler",
    "nsgaii": "NSGAIISampler",
    "qmc": "QMCSampler",
}
"""Option of ``hydra/sweeper/sampler``, without ``grid`` -> class of ``optuna.samplers``."""


@dataclass(slots=True, kw_only=True)
class OptunaConf:
    """Keys of ``hydra.sweeper`` with ``hydra/sweeper=optuna``."""

    direction: Literal["minimize", "maximize"] = "minimize"
    """minimize: smallest last validation loss."""
    n_trials: Annotated[int, "> 0"] = 20
    """Number of trials of the study, those of earlier calls with the same storage included."""
    n_jobs: Annotated[int, "> 0"] = 2
    """Trials at a time. Each batch is chosen from the results of all before it."""
    storage: str | None = None
    """File of the study, or a URL of optuna: sqlite:///search.db; null: lost with the command."""
    study_name: str | None = None
    """Name in the storage; null: that of the runs."""
    sampler: dict[str, Any] = field(default_factory=lambda: {"name": "tpe", **SAMPLERS["tpe"]})
    """Chosen with hydra/sweeper/sampler=tpe, random, cmaes, nsgaii, qmc or grid."""
    params: dict[str, Any] = field(default_factory=dict)
    """Key of the run -> values as on the command line: {optim.lr: 'interval(1e-4,1e-2)'}."""

    def problems(self) -> Problems:
        known = SAMPLERS[self.sampler["name"]]
        for key, value in self.sampler.items():
            if key == "name":
                continue
            if key not in known:
                yield f"sampler.{key}", f"is unknown{suggestion(key, known, 'sampler.')}"
            elif known[key] is not None or value is not None:
                kind = _type_of(key, known[key])
                if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                    yield f"sampler.{key}", f"must be of type {kind.__name__}, got {value!r}"


def _type_of(key: str, default: Any) -> type:
    """Return the type of a sampler's key."""
    if isinstance(default, bool):
        return bool
    return float if key == "sigma0" else int


@dataclass(slots=True)
class Space:
    """Searched and fixed settings."""

    fixed: list[str]
    """Words of every trial."""
    distributions: dict[str, Any]
    """Key -> distribution of optuna."""
    texts: dict[str, dict[Any, str]]
    """Key -> choice -> value as typed."""

    def words(self, params: dict[str, Any]) -> list[str]:
        """Return the words of a trial with these values."""
        values = {key: self.texts.get(key, {}).get(value, value) for key, value in params.items()}
        return [*self.fixed, *(f"{key}={value}" for key, value in values.items())]

    def examples(self) -> list[list[str]]:
        """Return words of trials that have every choice and both ends of every interval."""
        ends = {
            key: list(self.texts[key]) if key in self.texts else [kind.low, kind.high]
            for key, kind in self.distributions.items()
        }
        first = {key: values[0] for key, values in ends.items()}
        others = [first | {key: value} for key, values in ends.items() for value in values[1:]]
        return [self.words(params) for params in [first, *others]]


def read_space(params: dict[str, Any], words: Sequence[str]) -> Space:
    """Sort ``params`` and words into searched and fixed settings; the last of a key counts.

    ``interval(a,b)`` is a number, of whole ones ``int(interval(a,b))``, ``range(a,b,step)`` has
    both ends, ``choice(…)`` and ``a,b`` are choices; ``tag(log,…)`` is a logarithmic interval.

    Raises:
        ConfigError: every word that is none of them.
    """
    from hydra.core.override_parser.types import Glob

    space = Space([], {}, {})
    errors = []
    for word in [*(f"{key}={value}" for key, value in flat(params).items() if key), *words]:
        parsed: Any = parse(word)
        if parsed is None:
            space.fixed.append(word)  # composing reports the error
            continue
        key = parsed.key_or_group
        space.fixed = [w for w in space.fixed if w.lstrip("+").partition("=")[0] != key]
        space.distributions.pop(key, None)
        space.texts.pop(key, None)
        if not parsed.is_sweep_override():
            space.fixed.append(word)
        elif isinstance(parsed.value(), Glob):
            errors.append(f"{word}: expected the choices, such as {key}=a,b")
        elif key in ("name", "seed"):
            errors.append(f"{word}: a search has one {key}; give one value")
        else:
            try:
                _add(space, key, parsed)
            except ValueError as error:
                errors.append(f"{word}: {one_line(error)}")
    if not space.distributions and not errors:
        errors.append(
            "hydra/sweeper=optuna needs a searched key, such as 'optim.lr=interval(1e-4,1e-2)'"
        )
    if errors:
        raise ConfigError(errors)
    return space


def _add(space: Space, key: str, parsed: Any) -> None:
    from optuna import distributions

    value = parsed.value()
    log = "log" in getattr(value, "tags", ())
    if parsed.is_interval_sweep():
        whole = isinstance(value.start, int) and isinstance(value.end, int)
        kind: Any = distributions.IntDistribution if whole else distributions.FloatDistribution
        space.distributions[key] = kind(value.start, value.end, log=log)
    elif parsed.is_range_sweep() and not value.shuffle:
        numbers = (value.start, value.stop, value.step)
        whole = all(isinstance(number, int) for number in numbers)
        kind = distributions.IntDistribution if whole else distributions.FloatDistribution
        space.distributions[key] = kind(value.start, value.stop, step=value.step)
    else:
        texts = list(parsed.sweep_string_iterator())
        space.texts[key] = {text: text for text in texts}
        space.distributions[key] = distributions.CategoricalDistribution(texts)


def open_study(conf: OptunaConf, name: str, space: Space) -> optuna.Study:
    """Create or continue the study of a storage.

    Raises:
        ConfigError: the storage cannot be opened, or a sampler refuses its keys.
    """
    import optuna
    from optuna.storages import journal

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    storage: Any = conf.storage
    try:
        if storage is not None and "://" not in storage:
            Path(storage).absolute().parent.mkdir(parents=True, exist_ok=True)
            backend = journal.JournalFileBackend(storage)
            storage = optuna.storages.JournalStorage(backend)
        study = optuna.create_study(
            storage=storage,
            study_name=conf.study_name or name,
            direction=conf.direction,
            load_if_exists=True,
        )
    except Exception as error:  # of optuna, or of the driver of its data base
        text = f"cannot be opened: {one_line(error)[:200]}"
        raise ConfigError(f"hydra.sweeper.storage={conf.storage} {text}") from error
    if study.direction.name.lower() != conf.direction:
        has = f"study {study.study_name} has {study.direction.name.lower()}"
        raise ConfigError(f"hydra.sweeper.direction={conf.direction}, but {has}: give another name")
    study.sampler = _sampler(conf, space, len(study.get_trials(deepcopy=False)))
    return study


def _sampler(conf: OptunaConf, space: Space, before: int) -> Any:
    import optuna

    keys = dict(conf.sampler)
    name = keys.pop("name", "tpe")
    if name == "grid":
        keys["search_space"] = {key: _grid(key, kind) for key, kind in space.distributions.items()}
    if keys.get("seed") is not None:
        # the generator of a continued study would repeat the draws of the first trials
        keys["seed"] += before if name != "grid" else 0
    if name == "cmaes":
        with needs("hydra/sweeper/sampler=cmaes", "cmaes", "search", error=ConfigError):
            import cmaes  # noqa: F401
    if name == "grid":
        return _grid_sampler(keys)
    return getattr(optuna.samplers, CLASSES[name])(**keys)


def _grid_sampler(keys: dict[str, Any]) -> Any:
    import optuna

    class Grid(optuna.samplers.GridSampler):
        def after_trial(self, *_: Any) -> None:
            """Do not call ``study.stop``, which is for studies that call the objective."""

    return Grid(**keys)


def _grid(key: str, kind: Any) -> list[Any]:
    """Return the values of a key that a grid has."""
    if hasattr(kind, "choices"):
        return list(kind.choices)
    if kind.step is None:
        text = f"{key}: a grid needs values: give choice(…) or range(a,b,step), not interval(…)"
        raise ConfigError(text)
    count = int((kind.high - kind.low) / kind.step + 1e-9) + 1
    return [kind.low + i * kind.step for i in range(count)]


def sweep(conf: OptunaConf, words: Sequence[str], launcher: Any, loader: Any) -> float:
    """Train trials until the study has ``n_trials``; return the best value.

    Args:
        conf: keys of ``hydra.sweeper``.
        words: words of the runs as typed, without those of Hydra.
        launcher: instance of Hydra's ``Launcher``, which trains a batch of trials.
        loader: :class:`plugins.Loader` of the study.

    Raises:
        SparsePretrainError: a trial failed without diverging; it stays open, and the next call with
            the same storage continues it.
    """
    from hydra.core.utils import JobStatus
    from optuna.trial import TrialState

    space = read_space(conf.params, words)
    study = open_study(conf, loader.study, space)
    console = Console()
    total = conf.n_trials
    if conf.sampler.get("name") == "grid":
        total = min(total, len(getattr(study.sampler, "_all_grids", ())))
    while True:
        trials = study.get_trials(deepcopy=False)
        batch: list[Any] = [t for t in trials if t.state == TrialState.RUNNING][: conf.n_jobs]
        new = max(0, min(conf.n_jobs - len(batch), total - len(trials)))
        batch += [study.ask(space.distributions) for _ in range(new)]
        if not batch:
            break
        jobs = [[*space.words(t.params), f"name=trial_{t.number}"] for t in batch]
        try:
            results = launcher.launch(jobs, batch[0].number)
        except Refused:
            raise
        except ConfigError:  # no later call can train these settings
            for trial in batch:
                study.tell(trial.number, state=TrialState.FAIL)
            raise
        failures: list[SparsePretrainError] = []
        for trial, result in zip(batch, results, strict=True):
            if result.status == JobStatus.FAILED:
                failures.append(result._return_value)
                continue
            value = result.return_value
            study.tell(trial.number, value)
            best = study.best_trial
            console.info(
                f"trial_{trial.number}: {significant(value)}, best {significant(study.best_value)} "
                f"(trial_{best.number})"
            )
        if failures:
            raise failures[0]
    return _finish(study, space, loader, console)


def _finish(study: optuna.Study, space: Space, loader: Any, console: Console) -> float:
    """Print the trials, and leave the best one where Hydra's plug-in leaves it."""
    import yaml

    done = [t for t in study.get_trials(deepcopy=False) if t.value is not None]
    if not done:
        raise SparsePretrainError("no trial has a value: see the runs of the study")
    rows = [
        [f"trial_{t.number}", significant(t.value or 0.0), *map(str, t.params.values())]
        for t in sorted(done, key=lambda t: (t.number != study.best_trial.number, t.number))
    ]
    console.table("", rows, header=("trial", "loss", *space.distributions))
    best = {"name": "optuna", "best_params": study.best_params, "best_value": study.best_value}
    directory = loader.cell([*space.words(study.best_params), "name=best"]).run.runs_dir
    file = Path(directory) / "optimization_results.yaml"
    write_atomic(file, yaml.safe_dump(best, sort_keys=False))
    console.info(f"best of {len(done)} trials: trial_{study.best_trial.number}; {file}")
    return study.best_value
