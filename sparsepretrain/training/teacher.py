"""Find, check and load the teacher of a run (group ``teacher``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sparsepretrain.config import validate
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.data.encoding import token_ids
from sparsepretrain.errors import CheckpointError, ConfigError, reason
from sparsepretrain.models.pretrained import PretrainedOptions
from sparsepretrain.runs import weights
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.weights import WeightSource
from sparsepretrain.sparsity import densify
from sparsepretrain.tasks import ScoredTask, build_task
from sparsepretrain.training.assembly import META, build_model, evaluated_model, require_finite
from sparsepretrain.training.classes import class_names, is_reordered, named_classes, order_classes
from sparsepretrain.training.derive import tokenizer_file
from sparsepretrain.training.distillation import Teacher
from sparsepretrain.training.precision import set_dtype
from sparsepretrain.training.tracing import tracing
from sparsepretrain.training.world import World

LENGTHS = ("sequence_length", "max_length")
"""Keys of tasks that say how many tokens a sample has."""


@dataclass(frozen=True, slots=True)
class FoundTeacher:
    """Teacher that fits its run, not loaded."""

    source: WeightSource
    task: ScoredTask
    """Task of the run with the teacher's kind of model."""
    parameters: int
    flops: float
    """FLOPs of its forwards in a step of all ranks."""


def find_teacher(run: Run, warn: Callable[[str], None]) -> FoundTeacher | None:
    """Find the teacher of ``run`` and compare both models on the meta device; None: it has none.

    Raises:
        ConfigError: the run cannot imitate it.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    options = run.teacher
    if options.name == "none":
        return None
    student = _scored(run)
    path = run.init.path if options.name == "self" else options.path
    source = weights.find(str(path), warn)
    if source.run is not None and source.run.path.resolve() == RunDirectory.of(run).path.resolve():
        raise _refusal(f"{path} is the run itself; choose another run, or teacher=self")
    task = _task_of(source, run)
    longest = _positions(task)
    for key in LENGTHS:
        length = getattr(run.task, key, 0)
        if longest is not None and length > longest:
            raise _refusal(
                f"{path} has {longest} positions, but task.{key} is {length}; lower it, or choose "
                "another teacher"
            )
    model = build_model(task, META)
    with FlopCounterMode(display=False) as counter:
        classes = _classes(task, model)
    expected = _classes(student, build_model(student, META))
    if classes != expected:
        raise _refusal(
            f"expected {expected} tokens or classes, as the model has, got {classes} of {path}; "
            "choose a teacher with the same vocabulary"
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = float(counter.get_total_flops()) * run.batch.size
    return FoundTeacher(source, task, parameters, flops)


def load_teacher(run: Run, found: FoundTeacher, console: Console, world: World) -> Teacher:
    """Load the weights, in the precision of ``run``; FSDP2 shards them over the ranks.

    Raises:
        CheckpointError: files are damaged, or it has no trained head for the task.
        ConfigError: its head predicts other classes.
    """
    sharded = run.parallel.name == "fsdp" and world.size > 1
    draws = world.is_main or not sharded
    model = build_model(found.task, torch.device("cpu") if draws else META)
    if draws:
        _load_weights(found, model, console)
    set_dtype(model, run.precision)
    model.requires_grad_(False).eval()
    if sharded:
        from sparsepretrain.training.shards import shard

        shard(run, model, None, world)
    else:
        model.to(world.device)
    console.info(f"teacher: {found.source.path}, {found.parameters / 1e6:.2f}M parameters")
    return Teacher(run.teacher, found.task, model)


def require_same_tokens(found: FoundTeacher, file: Path | None) -> None:
    """Refuse a teacher whose token ids mean other text than those of the data.

    Args:
        found: a checkpoint without a tokenizer.json is not judged.
        file: tokenizer.json of the data; None: bytes.
    """
    source = found.source
    theirs = tokenizer_file(source)
    if theirs is None and source.config is None:
        return
    if token_ids(theirs) != token_ids(file):
        raise _refusal(
            f"the tokens of {source.path} ({theirs or 'bytes'}) are others than those of the data "
            f"({file or 'bytes'}); expected the same vocabulary"
        )


def _scored(run: Run) -> ScoredTask:
    """Return the task of ``run``, whose items have to be classes."""
    task = build_task(run)
    if not isinstance(task, ScoredTask) or not task.has_classes:
        raise _refusal(f"task={run.task.name} has no classes to compare; expected teacher=none")
    return task


def _task_of(source: WeightSource, run: Run) -> ScoredTask:
    """Return the task of ``run`` for the kind of model that the teacher is."""
    if source.config is None:
        options = PretrainedOptions(name="", family="pretrained", path=str(source.path))
        return _scored(replace(run, model=options))
    before = source.config["task"]["name"]
    if before != run.task.name:
        raise _refusal(
            f"expected a teacher that was trained with task={run.task.name}, got {source.path}, "
            f"which was trained with {before}"
        )
    return _scored(replace(run, model=validate({**source.config, "plugins": []}).model))


def _positions(task: ScoredTask) -> int | None:
    """Return the longest sequence that the model of ``task`` reads; None: any."""
    options = task.model_options
    for key in ("n_positions", "max_position_embeddings"):
        if (limit := getattr(options, key, None)) is not None:
            return int(limit)
    limit = task.recipe.positions(options)
    return None if limit is None else int(limit)


def _classes(task: ScoredTask, model: nn.Module) -> int:
    """Return the number of classes of the logits of a model on the meta device."""
    with tracing(model), torch.no_grad():
        return int(task.scores(model, task.example(1, META)).shape[-1])


def _load_weights(found: FoundTeacher, model: nn.Module, console: Console) -> None:
    """Load what the checkpoint evaluates with: of a sparse run A(W)."""
    source = found.source
    task = found.task
    if source.config is None:
        head, outputs = getattr(task, "head", None), getattr(task, "outputs", 0)
        initial = task.recipe.initial_state(task.model_options, head, outputs)
        if initial.new:
            raise CheckpointError(
                f"teacher: {source.path} has no trained {', '.join(sorted(initial.new)[:3])}: "
                f"choose one that was fine-tuned with task={task.options.name}"
            )
        state = initial.state
        named = named_classes(model.config) if class_names(task) else []
    else:
        state = densify(evaluated_model(source)[1]).state_dict()
        named = source.config["data"].get("labels", [])
    expected = class_names(task)
    if named and expected and not (named == expected or is_reordered(named, expected)):
        raise _refusal(
            f"expected the classes {', '.join(expected)}, got {', '.join(named)} of {source.path}"
        )
    require_finite(state, str(source.path))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"teacher: {source.path} does not fit its model: {reason(error)}"
        ) from error
    if named:
        order_classes(model, task, named, (), console)


def _refusal(text: str) -> ConfigError:
    return ConfigError([("teacher", f": {text}")])
