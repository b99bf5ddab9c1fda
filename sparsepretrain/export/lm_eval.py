"""Tasks of lm-evaluation-harness (extra ``lm_eval``) on the language model of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsepretrain import registry
from sparsepretrain.config.schema import Run
from sparsepretrain.data.hub import quiet_datasets
from sparsepretrain.errors import ConfigError, DataError, reason
from sparsepretrain.export import convert
from sparsepretrain.export.tokenizer import make_tokenizer
from sparsepretrain.models.pretrained import quiet
from sparsepretrain.tracking.console import Console, significant
from sparsepretrain.training import derive
from sparsepretrain.training.evaluation import append, identity, told_weights
from sparsepretrain.training.precision import compute_dtype
from sparsepretrain.training.world import World

CHANGEABLE = ("parallel", "precision", "batch", "task.sequence_length")
"""What overrides may change: where, how exact, how many at a time, and the context length."""


def evaluate_tasks(
    path: str,
    tasks: Sequence[str],
    overrides: Sequence[str] = (),
    config_dirs: Sequence[Path] = (),
    *,
    include: str | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    out: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """What the harness measures; the model is the exported one, adapters folded in.

    Args:
        path: a run of ``task=causal_lm``, or one of its checkpoints.
        tasks: their names in the harness, or in the YAML files of ``include``.
        overrides, config_dirs: as of an evaluation; data and task are the harness's own.
        include: directory of task files beside the harness's.
        fewshot: examples in the context; None: as the task says.
        limit: most documents per task; None: all.
        out: file that the result is appended to; None: ``eval.jsonl`` of the run directory, if any.
        console: prints the result; one on the standard output by default.

    Returns:
        the line that was appended; ``metrics`` has ``<task>/<metric>@<context length>``, in the
        harness's own scale.

    Raises:
        CheckpointError, ConfigError, DataError: with one line for the user.
    """
    console = console or Console()
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        text = f"lm_eval needs the package {error.name}: pip install 'sparsepretrain[lm_eval]'"
        raise ConfigError(text) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    source = convert.find(path, console)
    run = _run(source, overrides, config_dirs)
    manager = TaskManager(include_path=include)
    _check(tasks, manager.all_tasks)
    device = World.single(run.parallel.device).device
    converted = convert.convert(source, fold=True)
    model: Any = converted.model.to(device)
    tokenizer = make_tokenizer(derive.tokenizer_file(source), converted.task, model)
    dtype = compute_dtype(run.precision)
    harness = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        max_length=run.task.sequence_length,  # positions after it may not have been trained
        batch_size=run.batch.micro,
        mixed_precision_dtype=dtype if dtype.itemsize < 4 else None,
    )
    try:
        with quiet(), quiet_datasets(local=False):
            found = lm_eval.simple_evaluate(
                harness, tasks=list(tasks), num_fewshot=fewshot, limit=limit, task_manager=manager
            )
    except OSError as error:  # no network, no such data set
        raise DataError(f"lm_eval={','.join(tasks)}: {reason(error)}") from error
    metrics = named(found["results"], harness.max_length)
    rows = [("checkpoint", f"{source.path}, step {source.step:,}")]
    console.table("lm-eval", [*rows, *((k, significant(v)) for k, v in metrics.items())])
    counts = {k: v["effective"] for k, v in found["n-samples"].items()}
    result = {
        **identity(source, overrides, device, task="lm_eval", data=",".join(tasks)),
        "samples": sum(counts.values()),
        **told_weights(converted.proof),
        "densified": True,
        "lm_eval": {
            "version": lm_eval.__version__,
            "tasks": {k: found["versions"].get(k) for k in counts},
            "fewshot": {k: found["n-shot"].get(k) for k in counts},
            "samples": counts,
            "context": harness.max_length,
        },
        "metrics": metrics,
    }
    if out is None and source.run is not None:
        out = source.run.evaluations_file
    if out is not None:
        append(result, out)
        console.info(f"written to {out}")
    return result


def named(results: dict[str, dict[str, Any]], context: int) -> dict[str, float]:
    """``<task>/<metric>@<context>`` of the harness's ``<metric>,<filter>``.

    A filter other than ``none`` follows the metric after a comma.
    """
    return {
        f"{task}/{key.removesuffix(',none')}@{context}": float(value)
        for task, values in results.items()
        for key, value in values.items()
        if "," in key and isinstance(value, int | float)
    }


def _run(source: convert.Source, overrides: Sequence[str], config_dirs: Sequence[Path]) -> Run:
    """The run behind the checkpoint, with what is typed."""
    problems = [
        f"{word}: with lm_eval only {', '.join(CHANGEABLE)} can be changed"
        for word in overrides
        if not word.lstrip("+").startswith(CHANGEABLE)
    ]
    run = derive.evaluated(source, [] if problems else overrides, config_dirs)
    if run.task.name != "causal_lm":
        problems.append(f"lm_eval is for task=causal_lm, this run is of task={run.task.name}")
    if problems:
        raise ConfigError(problems)
    return run


def _check(tasks: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that the harness does not have, all at once."""
    problems = [
        f"lm_eval has no task {name!r}{registry.suggestion(name, known, listing='')}"
        for name in tasks
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
