"""What follows the training of a cell: it is fine-tuned over tasks, or evaluated."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from sparsepretrain.config.cells import Cell, stage_words
from sparsepretrain.config.compose import shell_line
from sparsepretrain.config.schema import Run
from sparsepretrain.config.tables import Stage
from sparsepretrain.errors import SparsePretrainError
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies import engine
from sparsepretrain.tracking.console import Console


@dataclass(eq=False)
class Evaluation(engine.Cell):
    """A line of ``eval.jsonl`` of a run that is trained."""

    stage: Stage = field(kw_only=True)
    config_dirs: Sequence[Path] = ()

    @property
    def end(self) -> int:
        """The step that is evaluated."""
        return max(checkpoint.saved(self.directory.checkpoints), default=self.run.steps)

    @property
    def goal(self) -> Literal["finished"]:
        """An evaluation has no part."""
        return "finished"

    @property
    def left(self) -> str:
        """``finished`` if the newest checkpoint has such a line, else ``to run``."""
        self.look()
        return "finished" if self.line.get("done") else "to run"

    def look(self) -> None:
        """Read the line."""
        line = self.directory.evaluation(self.stage.evaluate, self.stage.overrides) or {}
        done, loss = line.get("step") == self.end, line.get("metrics", {}).get("loss")
        # nothing is left of its steps, so it does not count in the time that is left
        self.line = {"step": self.end, "loss": loss if done else None, "done": done}

    def work(self) -> Callable[[Console], int]:
        """Evaluate as ``sparsepretrain eval`` does."""
        return partial(_evaluate, str(self.directory), self.stage, self.config_dirs)


class Harness(Evaluation):
    """Tasks of lm-evaluation-harness on the export of a run that is trained."""

    def look(self) -> None:
        """Look for the harness's result."""
        done = self.directory.harness_result(self.end, self.stage.name) is not None
        self.line = {"step": self.end, "loss": None, "done": done}

    def work(self) -> Callable[[Console], int]:
        """Export the run, then become the harness's own command."""
        return partial(_measure, self.run, self.stage, self.end)


def _evaluate(run: str, stage: Stage, config_dirs: Sequence[Path], console: Console) -> int:
    from sparsepretrain.training.evaluation import evaluate_checkpoint

    evaluate_checkpoint(
        run, stage.overrides, config_dirs, split=str(stage.evaluate), console=console
    )
    return 0


def _measure(run: Run, stage: Stage, step: int, console: Console) -> int:
    from sparsepretrain.export import export_run

    export_run(RunDirectory.of(run).path, merge=True, console=console)
    words = harness_command(run, stage, step)
    console.info(f"$ {shell_line(words)}")
    os.execv(sys.executable, [sys.executable, "-m", *words])


def harness_command(run: Run, stage: Stage, step: int) -> tuple[str, ...]:
    """The words of lm-evaluation-harness that measure the export of a run in fp32."""
    directory = RunDirectory.of(run)
    # positions after the sequence length of training were not trained
    model = f"pretrained={directory.exports / 'merged'},max_length={run.task.sequence_length}"
    words = ["lm_eval", "--model", "hf", "--model_args", model, "--tasks", str(stage.lm_eval)]
    words += ["--batch_size", str(run.batch.micro)]
    if run.parallel.device == "cpu":
        words += ["--device", "cpu"]
    return (
        *words,
        "--output_path",
        str(directory.harness_file(step, stage.name)),
        *stage.overrides,
    )


def commands(
    cell: Cell, stage: Stage, stop_after: int | None, config_dirs: Sequence[Path]
) -> list[tuple[str, ...]]:
    """Lines for a shell, as words, that do a stage once the cell is trained."""
    directory = str(RunDirectory.of(cell.run))
    if stage.lm_eval is not None:
        measure = harness_command(cell.run, stage, cell.run.steps)
        return [("sparsepretrain", "export", directory, "--merge-adapters"), measure]
    flags = [word for directory in config_dirs for word in ("--config-dir", str(directory))]
    if stage.finetune is not None and stop_after is not None:
        flags += ["--stop-after", str(stop_after)]
    verb = "eval" if stage.finetune is None else "finetune"
    return [("sparsepretrain", verb, directory, *flags, *stage_words(cell, stage))]


def following(
    cell: Cell,
    label: str,
    stages: Sequence[Stage],
    stop_after: int | None,
    config_dirs: Sequence[Path],
    console: Console,
) -> Iterator[engine.Cell]:
    """The stages of a trained cell; one that cannot be begun has failed already."""
    directory = RunDirectory.of(cell.run)
    for stage in stages:
        words = commands(cell, stage, stop_after, config_dirs)[0][1:]
        shared = (f"{label}, {stage.name}", cell.run, stop_after, words, (directory, stage.name))
        if stage.finetune is None:
            kind = Evaluation if stage.lm_eval is None else Harness
            yield kind(*shared, stage=stage, config_dirs=config_dirs)
            continue
        from sparsepretrain.training.derive import finetuned
        from sparsepretrain.training.schedules import settle

        made = engine.Cell(*shared)
        try:
            derived = finetuned(str(directory), stage_words(cell, stage), config_dirs, console)
            made.run = settle(derived)
        except SparsePretrainError as error:
            made.state, made.exit_code = "failed", error.exit_code
            made.error = f"{error.label}: {error}"
        yield made
