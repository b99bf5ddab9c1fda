"""Check and run the cells of a paper's table or of `train -m`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from sparsepretrain.config.compose import shell_line
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.data.preparation import require_prepared
from sparsepretrain.errors import ConfigError, DataError, DivergedError, SparsePretrainError, needs
from sparsepretrain.runs import checkpoint, weights
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies import stages
from sparsepretrain.studies.cells import Cell, Part, Selection, stage_words
from sparsepretrain.studies.engine import Study
from sparsepretrain.studies.jobs import Job
from sparsepretrain.studies.launchers import EngineConf, Launcher, LocalQueueConf, SlurmQueueConf
from sparsepretrain.studies.progress import Progress, StudyCell
from sparsepretrain.studies.results import count_outdated, not_recorded, record_of, selected
from sparsepretrain.studies.submission import Submission
from sparsepretrain.studies.tables import Scale, Stage, load_table
from sparsepretrain.training import plan
from sparsepretrain.training.derive import check_finetuning
from sparsepretrain.training.hardware import visible_devices
from sparsepretrain.training.resume import begins_anew
from sparsepretrain.training.schedules import resolve_steps

HERE = EngineConf()
"""Launcher of cells as child processes."""


def parts(name: str, scale: Scale | None, asked: Selection, stop_after: int | None) -> list[Part]:
    """Return the cells of a table, or of the tables that it collects; see :func:`cells.cells`.

    A table with ``tune`` has a part for its tuning runs, and one for the rows whose tuning runs are
    finished: call again when the first part has run.
    """
    found = []
    errors = []
    how = (stop_after, asked.config_dirs)
    for table_name in load_table(name, asked.config_dirs).parts or [name]:
        table = load_table(table_name, asked.config_dirs)
        if table.bench:
            found.append(Part(table_name, table, None, []))
            continue
        at = scale or ("nano" if "nano" in table.scales else "paper")
        try:
            record = record_of(table_name, table, at, asked)
            tried, _, judging = selected(table_name, table, at, asked, record)
            tried, judging = not_recorded(tried, record), not_recorded(judging, record)
            if tried:
                found.append(Part(table_name, table, at, tried, *how, is_tuning=True))
            outdated = count_outdated(judging, record)
            found.append(Part(table_name, table, at, judging, *how, outdated=outdated))
        except ConfigError as error:
            errors += [m for m in error.messages if m not in errors]
    # with several tables, a glob may match cells of a single one
    if errors and not (found and asked.only != "*" and all(m.startswith("--only") for m in errors)):
        raise ConfigError(errors)
    return found


def check(parts: Sequence[Part], console: Console, *, prepared: bool = True) -> list[Part]:
    """Check with torch that every run and stage can start, and count the steps of epochs.

    Finished runs are skipped; one seed stands for all seeds of a cell. Unless ``prepared``, missing
    data is no error.
    """
    errors: dict[str, list[str]] = {}
    result = []
    for part in parts:
        steps: dict[str, int] = {}
        for cell in part.cells:
            done = _end_is_saved(cell.run, part.stop_after)
            if cell.name in steps or (done and not part.stages):
                continue
            console.loading(part.name)
            steps[cell.name] = cell.run.steps
            try:
                steps[cell.name] = _check(part, cell, done=done)
            except SparsePretrainError as error:
                if isinstance(error, DataError) and not prepared:
                    continue
                for message in error.messages:
                    errors.setdefault(message, []).append(cell.name)
        now = []
        for cell in part.cells:
            run = dataclasses.replace(cell.run, steps=steps.get(cell.name, cell.run.steps))
            now.append(dataclasses.replace(cell, run=run))
        result.append(dataclasses.replace(part, cells=now))
    if errors:
        raise ConfigError([f"{', '.join(where)}: {what}" for what, where in errors.items()])
    return result


def _check(part: Part, cell: Cell, *, done: bool) -> int:
    """Check a cell and its stages; return the steps."""
    run = resolve_steps(cell.run)
    if not done:
        plan.check(run)
    for stage in part.stages:
        if stage.lm_eval is not None:
            if run.task.name != "causal_lm":
                text = f"lm_eval is for task=causal_lm, this is task={run.task.name}"
                raise ConfigError(f"{stage.name}: {text}")
            with needs("lm_eval of a stage", "lm_eval", "lm_eval", error=ConfigError):
                import lm_eval  # noqa: F401
        if stage.average > 1:
            _check_average(run, stage)
        if stage.prune is not None:
            try:
                stages.check_pruning(run, stage)
            except ConfigError as error:
                raise ConfigError([f"{stage.name}: {m}" for m in error.messages]) from error
        if stage.finetune is not None:
            try:
                check_finetuning(run, stage_words(cell, stage), part.config_dirs)
            except ConfigError as error:
                raise ConfigError([f"{stage.name}: {m}" for m in error.messages]) from error
    return run.steps


def _check_average(run: Run, stage: Stage) -> None:
    """Refuse a run that keeps fewer checkpoints at its end than a stage averages."""
    every = run.checkpoint.every
    saved = -(-run.steps // every) if every else 1
    if run.checkpoint.keep_last < stage.average or saved < stage.average:
        raise ConfigError(
            f"{stage.name}: average={stage.average}: expected as many checkpoints at the end, got "
            f"checkpoint.keep_last={run.checkpoint.keep_last} of {saved} saved: raise "
            "checkpoint.keep_last, or lower checkpoint.every"
        )


def _end_is_saved(run: Run, stop_after: int | None) -> bool:
    """Return True if a checkpoint of the last step exists, valid or not."""
    if run.resume == "never" or not run.steps:
        return False
    end = min(stop_after or run.steps, run.steps)
    return any(step >= end for step in checkpoint.saved(RunDirectory.of(run).checkpoints))


def commands(parts: Sequence[Part]) -> Iterator[str]:
    """Yield a shell line per cell: training, then its stages."""
    for part in parts:
        for cell in part.cells:
            lines = [(*_launcher(cell.run), *_train_words(part, cell))]
            for stage in part.stages:
                lines += stages.commands(part, cell, stage)
            yield " && ".join(map(shell_line, lines))


def _launcher(run: Run) -> tuple[str, ...]:
    if run.nproc == 1:
        return ("sparsepretrain",)
    # --standalone: a free port, so that several lines can run on one machine
    return ("torchrun", "--standalone", f"--nproc-per-node={run.nproc}", "-m", "sparsepretrain")


def _train_words(part: Part, cell: Cell) -> tuple[str, ...]:
    flags = [word for directory in part.config_dirs for word in ("--config-dir", str(directory))]
    flags += [] if part.stop_after is None else ["--stop-after", str(part.stop_after)]
    return ("train", *flags, *cell.words)


def to_run(parts: Sequence[Part], console: Console) -> list[StudyCell]:
    """Return the cells of a study, seed by seed, each followed by its stages."""
    several = len({part.name for part in parts}) > 1
    made = []
    for part in parts:
        for cell in part.cells:
            label = f"{part.name}: {cell.label}" if several else cell.label
            words = _train_words(part, cell)
            made.append(
                StudyCell(
                    label,
                    cell.run,
                    part.stop_after,
                    words,
                    words=cell.words,
                    key=job_key(part, cell),
                )
            )
            if part.stages:
                made[-1].then = partial(stages.following, part, cell, label, console)
    return made


def job_key(part: Part, cell: Cell) -> str:
    """Return the name of a cell in the list of jobs, the same before its setting is chosen."""
    words = list(cell.words)
    if part.scale is not None and not part.is_tuning:
        tune = part.table.scales[part.scale].tune
        settings = tune.settings(cell.row) if tune else ()
        words = [w for w in words if not any(w in setting.split() for setting in settings)]
    return shell_line(words)


def study_of(
    found: Sequence[Part],
    console: Console,
    jobs: int | None = None,
    launcher: Launcher | Progress = HERE,
    later: Mapping[str, Job] | None = None,
) -> Progress:
    """Return a study of checked cells, where ``launcher`` trains them.

    On this machine ``jobs`` are trained at a time; None: what fits the GPUs, or one. ``later``: see
    :class:`~sparsepretrain.studies.submission.Submission`.

    Raises:
        ConfigError: settings that do not fit the launcher, the GPUs or the disk of this machine.
        CheckpointError: initial weights of a run on this machine are missing.
        DataError: data of a run on this machine are missing. A job of a cluster may find both
            where it runs.
    """
    title = " + ".join(dict.fromkeys(part.name for part in found))
    if isinstance(launcher, Progress):
        return launcher
    runs = [
        c.run for part in found for c in part.cells if not _end_is_saved(c.run, part.stop_after)
    ]
    if isinstance(launcher, SlurmQueueConf | LocalQueueConf):
        if jobs is not None:
            raise ConfigError(
                "--jobs is for this machine: give hydra.launcher.array_parallelism=N for jobs"
            )
        _check_ranks(found)
        if isinstance(launcher, LocalQueueConf):
            _require_inputs(runs)
        # one list of jobs in runs_dir: a table can be run alone or with others
        runs_dir = RunDirectory.of(found[0].cells[0].run).path.parents[2]
        return Submission(title, console, launcher, runs_dir, found, later)
    needed = [StudyCell("", run).devices for run in runs]
    devices: list[str] = []
    if most := max(needed, default=0):  # without remaining work torch is not imported
        devices = visible_devices()
        if devices and most > len(devices):
            text = f"expected at most {len(devices)} GPUs, got {most}"
            raise ConfigError(f"parallel.nproc: {text}; lower it, or use --commands")
    _require_inputs(runs)
    fitting = len(devices) // min(filter(None, needed), default=1)
    return Study(title, console, jobs=jobs or max(1, fitting), devices=devices)


def _require_inputs(runs: Sequence[Run]) -> None:
    """Say once, before the first run, what this machine lacks: each run would end with it."""
    starts = (run.init.path for run in runs if run.init.path and begins_anew(run))
    for path in dict.fromkeys(starts):
        weights.find(path)
    problems = []
    for options in {repr(run.data): run.data for run in runs}.values():
        try:
            require_prepared(options)
        except DataError as error:
            problems += error.messages
    if problems:
        raise DataError("; ".join(problems))
    for folder in dict.fromkeys(RunDirectory.of(run).path.parent for run in runs):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"directory {folder} is not writable ({error.strerror}): set runs_dir=DIR"
            raise ConfigError(text) from error


def _check_ranks(found: Sequence[Part]) -> None:
    """Refuse runs of which a job would not know the number of ranks."""
    for part in found:
        for cell in part.cells:
            parallel = cell.run.parallel
            if parallel.name != "single" and parallel.nproc is None:
                raise ConfigError(
                    f"{cell.name}: parallel.nproc: expected the ranks on each node of a job, got "
                    "null; give parallel.nproc=N"
                )


def run_parts(
    found: Sequence[Part],
    console: Console,
    *,
    jobs: int | None = None,
    launcher: Launcher | Progress = HERE,
    later: Mapping[str, Job] | None = None,
) -> None:
    """Run the remaining work of checked cells, see :func:`study_of`."""
    with study_of(found, console, jobs, launcher, later) as study:
        try:
            study.run(to_run(found, console))
        finally:
            study.show_all()
        failed = [cell for cell in study.cells if cell.state in ("failed", "canceled")]
    if found[0].is_tuning:  # then all parts are; a diverged run is a result, the worst
        failed = [cell for cell in failed if cell.exit_code != DivergedError.exit_code]
    if failed:
        labels = [cell.label for cell in failed]
        shown = "; ".join(labels if len(labels) <= 5 else [*labels[:5], "…"])
        raise SparsePretrainError(
            f"{len(failed)} of {len(study.cells)} cells failed ({shown}): the same command tries "
            "them again"
        )
