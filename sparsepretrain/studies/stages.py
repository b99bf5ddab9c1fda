"""Stages after the training of a cell: fine-tuning, evaluation and pruning."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from sparsepretrain import registry
from sparsepretrain.config.compose import shell_line
from sparsepretrain.config.schema import Run
from sparsepretrain.config.strict import build
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError, SparsePretrainError
from sparsepretrain.export import export_run
from sparsepretrain.export.claims import read_pattern
from sparsepretrain.export.prune import Request, prune_checkpoint
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies import progress
from sparsepretrain.studies.cells import Cell, Part, stage_words
from sparsepretrain.studies.results import pruned_results
from sparsepretrain.studies.tables import Stage
from sparsepretrain.training.derive import finetuned
from sparsepretrain.training.evaluation import evaluate_checkpoint
from sparsepretrain.training.schedules import resolve_steps


@dataclass(eq=False)
class Evaluation(progress.StudyCell):
    """Evaluation of a trained run: a line of its ``eval.jsonl``."""

    stage: Stage = field(kw_only=True)
    config_dirs: Sequence[Path] = ()

    @property
    def end(self) -> int:
        """Evaluated step."""
        return max(checkpoint.saved(self.directory.checkpoints), default=self.run.steps)

    @property
    def goal(self) -> Literal["finished"]:
        """An evaluation is never partial."""
        return "finished"

    @property
    def left(self) -> str:
        """``finished`` if the newest checkpoint is evaluated, else ``to run``."""
        self.look()
        return "finished" if self.line.get("done") else "to run"

    @property
    def extent(self) -> str:
        """Step of the model: the stage itself takes none."""
        return f"after {self.end} steps"

    def look(self) -> None:
        """Read the line of the evaluation."""
        stage = self.stage
        line = self.directory.evaluation(stage.evaluate, stage.overrides, stage.average) or {}
        done = line.get("step") == self.end
        loss = line.get("metrics", {}).get("loss")
        # the step is the last one: evaluations do not count in the remaining time
        self.line = {"step": self.end, "loss": loss if done else None, "done": done}

    def work(self) -> Callable[[Console], int]:
        """Return the work of ``sparsepretrain eval``."""
        return partial(_evaluate, str(self.directory), self.stage, self.config_dirs)


class Harness(Evaluation):
    """Tasks of lm-evaluation-harness on the export of a trained run."""

    def look(self) -> None:
        """Look for the result of the harness."""
        done = self.directory.harness_result(self.end, self.stage.name) is not None
        self.line = {"step": self.end, "loss": None, "done": done}

    def work(self) -> Callable[[Console], int]:
        """Return the work: export, then the harness."""
        return partial(_measure, self.run, self.stage, self.end)


class Pruning(Evaluation):
    """One-shot pruning of a trained run."""

    def look(self) -> None:
        """Look for the pruned model."""
        results = pruned_results(self.directory, self.end, self.stage)
        self.line = {"step": self.end, "loss": None, "done": results is not None}
        if results is not None:
            self.line["loss"] = results["perplexity"]["after"][0].get("loss")

    def work(self) -> Callable[[Console], int]:
        """Return the work of ``sparsepretrain prune``."""
        out = self.directory.pruned / self.stage.name
        return partial(_prune, str(self.directory), self.stage, out, self.config_dirs)


def _prune(run: str, stage: Stage, out: Path, config_dirs: Sequence[Path], console: Console) -> int:
    prune_checkpoint(_request(run, stage, out, config_dirs), console)
    return 0


def _request(run: str, stage: Stage, out: Path, config_dirs: Sequence[Path]) -> Request:
    """Return the request of a stage of pruning.

    Raises:
        ConfigError: unknown method or option, or not a pattern.
    """
    cls: Any = registry.get("pruning", str(stage.prune))
    try:
        n, m = read_pattern(stage.pattern)
    except ValueError as error:
        raise ConfigError(f"pattern: {error}") from error
    if flags := [word for word in stage.overrides if word.startswith("-")]:
        raise ConfigError(f"{flags[0]}: expected KEY=VALUE of the data")
    return Request(
        checkpoint=run,
        name=str(stage.prune),
        method=cls(build(cls.Options, stage.options), n, m),
        out=out,
        overrides=stage.overrides,
        config_dirs=config_dirs,
        replaces=True,  # the stage was changed, or ran on an earlier step
    )


def check_pruning(run: Run, stage: Stage) -> None:
    """Refuse a stage of pruning that could not start.

    Raises:
        ConfigError: not a language model, unknown method, or not a pattern.
    """
    if run.task.name != "causal_lm":
        raise ConfigError(f"prune is for task=causal_lm, this is task={run.task.name}")
    _request("", stage, Path(), ())


def _evaluate(run: str, stage: Stage, config_dirs: Sequence[Path], console: Console) -> int:
    evaluate_checkpoint(
        run,
        stage.overrides,
        config_dirs,
        split=str(stage.evaluate),
        average=stage.average,
        console=console,
    )
    return 0


def _measure(run: Run, stage: Stage, step: int, console: Console) -> int:
    export_run(RunDirectory.of(run).path, console=console)
    words = harness_command(run, stage, step)
    console.info(f"$ {shell_line(words)}")
    return run_command([sys.executable, "-m", *words])


def run_command(words: Sequence[str]) -> int:
    """Run a command and return its exit code, 128 + number of a signal; SIGTERM ends it too."""
    process = subprocess.Popen(words)
    before = signal.getsignal(signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        process.terminate()
        if callable(before):  # that of a job, which has to save what it knows
            before(number, frame)

    signal.signal(signal.SIGTERM, stop)
    try:
        code = process.wait()
    finally:
        process.terminate()
        signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def harness_command(run: Run, stage: Stage, step: int) -> tuple[str, ...]:
    """Return the command of lm-evaluation-harness for the fp32 export of a run."""
    directory = RunDirectory.of(run)
    # later positions were not trained
    model = f"pretrained={directory.exports / 'hf'},max_length={run.task.sequence_length}"
    words = ["lm_eval", "--model", "hf", "--model_args", model, "--tasks", str(stage.lm_eval)]
    words += ["--batch_size", str(run.batch.micro)]
    words += ["--device", "cpu"] if run.parallel.device == "cpu" else []
    words += ["--output_path", str(directory.harness_file(step, stage.name))]
    return (*words, *stage.overrides)


def commands(part: Part, cell: Cell, stage: Stage) -> list[tuple[str, ...]]:
    """Return the commands of a stage, as words, for a trained cell."""
    directory = str(RunDirectory.of(cell.run))
    if stage.lm_eval is not None:
        measure = harness_command(cell.run, stage, cell.run.steps)
        return [("sparsepretrain", "export", directory), measure]
    flags = [word for directory in part.config_dirs for word in ("--config-dir", str(directory))]
    if stage.finetune is not None and part.stop_after is not None:
        flags += ["--stop-after", str(part.stop_after)]
    verb = "eval"
    if stage.finetune is not None:
        verb = "finetune"
    elif stage.prune is not None:
        verb = "prune"
    return [("sparsepretrain", verb, directory, *flags, *stage_words(cell, stage))]


def following(part: Part, cell: Cell, label: str, console: Console) -> Iterator[progress.StudyCell]:
    """Yield the stages of a trained cell; a stage that cannot start has failed already."""
    directory = RunDirectory.of(cell.run)
    for stage in part.stages:
        words = commands(part, cell, stage)[0][1:]
        at = (directory, stage.name)
        shared = (f"{label}, {stage.name}", cell.run, part.stop_after, words, at)
        if stage.finetune is None:
            kind = Evaluation
            if stage.lm_eval is not None:
                kind = Harness
            elif stage.prune is not None:
                kind = Pruning
            yield kind(*shared, stage=stage, config_dirs=part.config_dirs)
            continue
        made = progress.StudyCell(*shared)
        try:
            derived = finetuned(str(directory), stage_words(cell, stage), part.config_dirs, console)
            made.run = resolve_steps(derived)
        except SparsePretrainError as error:
            made.state = "failed"
            made.exit_code = error.exit_code
            made.error = f"{error.label}: {error}"
        yield made
