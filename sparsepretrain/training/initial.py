"""Initial weights from a checkpoint: what is loaded, what is drawn anew, what is left out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsepretrain import registry
from sparsepretrain.config import validate
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.runs import weights
from sparsepretrain.sparsity import Method, Sparsifier, densify
from sparsepretrain.tasks import Task, build_task
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.build import build_model, sparsify_model

HEADS = ("score", "classifier", "pre_classifier", "qa_outputs")
"""Top-level modules whose shape follows from the classes to predict."""

State = dict[str, Tensor]


def load(run: Run, task: Task, model: nn.Module, console: Console) -> State:
    """Give ``model``, which is not sparse yet, the weights that ``init`` names.

    Returns:
        what :func:`restore` needs after ``sparsify``; empty unless the stored weights of a run
        with the same function were loaded.

    Raises:
        CheckpointError: nothing is there, or it does not fit the model.
    """
    path = run.init.path
    if path is None:
        return {}
    source = weights.find(path, console.warn)
    if source.kind == "huggingface":
        return _load_huggingface(run, task, model, console)
    assert source.config is not None
    method: type[Method] = registry.get("method", run.sparsity.name)
    same = method.keeps_function(run.sparsity, source.config["sparsity"])
    stored = run.init.weights == "master" or (run.init.weights == "auto" and same)
    state = weights.model_state(source) if stored else evaluated_state(source)
    parts = {name: name.split(".") for name in state}
    own = {n: v for n, v in state.items() if not any(p.startswith("sparsity") for p in parts[n])}
    _copy(model, own, str(source.path), console)
    kind = "stored weights" if stored else "the weights that it evaluates with"
    before = source.config["sparsity"]["name"]
    console.info(f"initial weights: {source.path} (step {source.step}, {before}), {kind}")
    return state if stored and same else {}


def restore(sparsifier: Sparsifier, state: State) -> None:
    """Give the layers what the method of a run keeps beside its weights (frozen scales, masks).

    The function that the weights stand for is then kept. Counters begin anew, and the mask that
    flips are counted from is the one of these weights.
    """
    for name, layer in sparsifier.layers.items():
        own = {k: v for k, v in state.items() if k.startswith(f"{name}.sparsity")}
        layer.load_state_dict({k.removeprefix(f"{name}."): v for k, v in own.items()}, strict=False)
    sparsifier.refresh()


def evaluated_state(source: weights.Source) -> State:
    """The state dict that a run evaluates with: pruned, scaled, with dense layers' names.

    Raises:
        CheckpointError: its configuration is of another version, or does not fit its weights.
    """
    assert source.config is not None
    state = weights.state(source)
    try:
        run = validate(source.config)
        task = build_task(run)
        model = build_model(run, task, torch.device("cpu"))
        sparsifier = sparsify_model(run, task, model)
        model.load_state_dict(state["model"])
    except (ConfigError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{source.path} cannot be rebuilt: {reason}") from error
    sparsifier.load_state_dict(state["sparsifier"])
    return densify(model.eval()).state_dict()


def _load_huggingface(run: Run, task: Task, model: nn.Module, console: Console) -> State:
    path = run.init.path
    if run.model.family != "pretrained":
        raise CheckpointError(
            f"init.path={path} is a Hugging Face checkpoint: it needs model=pretrained "
            f"model.path={path}, not family {run.model.family}"
        )
    state, new = task.recipe.load(
        run.model, getattr(task, "head", None), getattr(task, "outputs", 0)
    )
    model.load_state_dict(state)
    console.info(f"initial weights: {path} ({model.__class__.__name__})")
    _tell_new(new, console)
    return {}


def _copy(model: nn.Module, state: State, path: str, console: Console) -> None:
    """Load by name; a head for another number of classes is drawn anew."""
    own = model.state_dict()
    fitting = {}
    for name, value in state.items():
        if name not in own:
            continue
        if own[name].shape == value.shape:
            fitting[name] = value
        elif name.partition(".")[0] not in HEADS:
            mine, theirs = tuple(own[name].shape), tuple(value.shape)
            raise CheckpointError(
                f"{path} does not fit the model: {name} is {mine} here, {theirs} there"
            )
    if not fitting:
        raise CheckpointError(f"{path} does not fit the model: no weight has a name of its own")
    model.load_state_dict(fitting, strict=False)
    _tell_new([name for name in own if name not in fitting], console)
    if unused := sorted({name.partition(".")[0] for name in state if name not in own}):
        console.info(f"left out: {', '.join(unused)}")


def _tell_new(names: list[str], console: Console) -> None:
    if names:
        console.info(f"drawn anew: {', '.join(sorted(names))}")
