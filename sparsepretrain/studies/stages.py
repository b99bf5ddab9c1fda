"""What follows the training of a cell: it is fine-tuned over tasks, or evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from sparsepretrain.config.cells import Cell, stage_words
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
        about = self.stage.evaluate, self.stage.overrides
        line = self.directory.evaluation(*about, lm_eval=self.stage.lm_eval) or {}
        done, loss = line.get("step") == self.end, line.get("metrics", {}).get("loss")
        # nothing is left of its steps, so it does not count in the time that is left
        self.line = {"step": self.end, "loss": loss if done else None, "done": done}

    def work(self) -> Callable[[Console], int]:
        """Evaluate as ``sparsepretrain eval`` does."""
        return partial(_evaluate, str(self.directory), self.stage, self.config_dirs)


def _evaluate(run: str, stage: Stage, config_dirs: Sequence[Path], console: Console) -> int:
    words = stage.overrides
    if stage.lm_eval is not None:
        from sparsepretrain.export.lm_eval import evaluate_tasks

        evaluate_tasks(run, stage.lm_eval.split(","), words, config_dirs, console=console)
    else:
        from sparsepretrain.training.evaluation import evaluate_checkpoint

        split = str(stage.evaluate)
        evaluate_checkpoint(run, words, config_dirs, split=split, console=console)
    return 0


def command(
    cell: Cell, stage: Stage, stop_after: int | None, config_dirs: Sequence[Path]
) -> tuple[str, ...]:
    """Words after ``sparsepretrain`` that do a stage, once the cell is trained."""
    flags = [word for directory in config_dirs for word in ("--config-dir", str(directory))]
    if stage.finetune is not None and stop_after is not None:
        flags += ["--stop-after", str(stop_after)]
    verb = "eval" if stage.finetune is None else "finetune"
    return (verb, str(RunDirectory.of(cell.run)), *flags, *stage_words(cell, stage))


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
        words = command(cell, stage, stop_after, config_dirs)
        shared = (f"{label}, {stage.name}", cell.run, stop_after, words, (directory, stage.name))
        if stage.finetune is None:
            yield Evaluation(*shared, stage=stage, config_dirs=config_dirs)
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
