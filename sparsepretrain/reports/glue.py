"""The GLUE average of several fine-tuning runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sparsepretrain.errors import DataError
from sparsepretrain.runs.directory import RunDirectory

PREFIX = "glue_"
"""Of the names of GLUE's data sets."""


def glue_scores(directories: Iterable[Path]) -> dict[str, float]:
    """Task -> its one number, in percent: ``score`` of the last evaluation, averaged over seeds.

    A task with two metrics counts their mean, and MNLI the mean of its two parts, so nothing is
    counted twice.

    Args:
        directories: of finished runs; those of other data sets are left out.

    Raises:
        DataError: a run of GLUE has no evaluation.
    """
    found: dict[str, list[float]] = {}
    for directory in map(RunDirectory, directories):
        if not directory.config_file.is_file():
            continue
        name = str(directory.config().get("data", {}).get("name"))
        if not name.startswith(PREFIX):
            continue
        scores = [line["score"] for line in directory.record() if line.get("score") is not None]
        if not scores:
            raise DataError(f"{directory} has no evaluation: finish the run first")
        found.setdefault(name.removeprefix(PREFIX), []).append(scores[-1])
    return {task: sum(scores) / len(scores) for task, scores in sorted(found.items())}


def glue_average(scores: dict[str, float]) -> float:
    """Mean over tasks, each counted once; say which tasks it is over (with or without WNLI).

    Raises:
        DataError: there is no task.
    """
    if not scores:
        raise DataError("none of these runs is a task of GLUE")
    return sum(scores.values()) / len(scores)
