"""State of a session for checkpoints: what a bit-exact resume needs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.errors import CheckpointError
from sparsepretrain.training.session import Session
from sparsepretrain.training.world import World

COUNTERS = ("step", "tokens", "evaluated", "lines")
"""Integers of a session that a checkpoint keeps."""
COPIED = ("model", "optimizer", "ema")
"""Parts of a checkpoint whose tensors are copied when loaded; a shard copies only its rows."""


def state_dict(t: Session) -> dict[str, Any]:
    """Return the state for a bit-exact resume, as named parts.

    ``model``, ``optimizer`` and ``ema`` hold tensors by name; the other parts are plain values
    or small tensors. Collective; of a sharded model only rank 0 has the tensors.
    """
    tensors, options = _optimizer_state(t.model, t.optimizer)
    parts: dict[str, Any] = {
        **{key: getattr(t, key) for key in COUNTERS},
        "fingerprint": t.task.fingerprint,
        "observers": {o.name: kept for o in t.observers if (kept := o.state_dict())},
        "guard": t.guard.state_dict(),
        "sparsifier": t.sparsifier.state_dict(),
        "scaler": t.scaler.state_dict(),
        "optimizer_options": options,
        "model": _whole(t, t.model.state_dict()),
        "optimizer": _whole(t, tensors),
    }
    if t.ema is not None:
        parts |= {"ema": _whole(t, t.ema.averages), "ema_updates": t.ema.updates}
    return parts


def load_state_dict(t: Session, state: dict[str, Any], source: object = "the checkpoint") -> None:
    """Restore :func:`state_dict`.

    Args:
        t: session to restore into.
        state: the parts, tensors on the CPU; tensors of :data:`COPIED` are not kept.
        source: name for error messages.

    Raises:
        CheckpointError: the checkpoint has more steps, other data, model or optimizer.
    """
    if state["step"] > t.run.steps:
        raise CheckpointError(
            f"{source} has {state['step']} steps, more than steps={t.run.steps}: raise steps"
        )
    if state["fingerprint"] != t.task.fingerprint:
        raise CheckpointError(
            f"{source} was trained on other data (fingerprint {state['fingerprint']}, now "
            f"{t.task.fingerprint}): prepare the same data, or start again with resume=never"
        )
    try:
        t.model.load_state_dict(_parts(t, state["model"], t.model.state_dict()))
        _load_optimizer(t.model, t.optimizer, state, t.world)
        if t.ema is not None:
            kept, updates = averages(state, t.model)
            t.ema.load(_parts(t, kept, t.ema.averages), updates)
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        text = f"{source} does not fit this model or optimizer: {reason}"
        raise CheckpointError(text) from error
    t.sparsifier.load_state_dict(state["sparsifier"])
    t.scaler.load_state_dict(state["scaler"])
    t.guard.load_state_dict(state["guard"])
    for observer in t.observers:
        if observer.name in state["observers"]:
            observer.load_state_dict(state["observers"][observer.name])
    for key in COUNTERS:
        setattr(t, key, state[key])


def _whole(t: Session, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather sharded tensors one by one to the CPU of rank 0; other ranks get none."""
    if not t.is_sharded:
        return tensors
    found: dict[str, Tensor] = {}
    named = t.model.named_parameters(remove_duplicate=False)
    first: dict[nn.Parameter, str] = {}
    tied = {name: first.setdefault(parameter, name) for name, parameter in named}
    for name, tensor in tensors.items():
        if (other := tied.get(name, name)) in found:
            found[name] = found[other]
        else:
            whole = t.world.whole(tensor)
            found[name] = whole.cpu() if t.world.is_main else tensor
    return found if t.world.is_main else {}


def _parts(t: Session, whole: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the shards of this rank for tensors whose ``like`` is sharded."""
    return {k: t.world.part(v, like[k]) if k in like else v for k, v in whole.items()}


def averages(state: dict[str, Any], model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Return averaged weights of a checkpoint and the number of updates, or the model's own."""
    kept = state.get("ema")
    if kept is None:
        return {name: p.detach() for name, p in model.named_parameters()}, 0
    return kept, state["ema_updates"]


def _optimizer_state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return ``<parameter>|<key>`` -> tensor, and everything else: groups, scalars, counters."""
    names = _names(model, optimizer)
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in state.pop("state").items():
        for key, value in entries.items():
            part = tensors if isinstance(value, Tensor) else values
            part[f"{names[index]}|{key}"] = value
    groups = [{k: v for k, v in g.items() if k != "params"} for g in state.pop("param_groups")]
    return tensors, {**state, "groups": groups, "values": values}


def _load_optimizer(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], world: World
) -> None:
    fresh = optimizer.state_dict()
    indices = {name: index for index, name in enumerate(_names(model, optimizer))}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries: dict[int, dict[str, Any]] = {}
    options = dict(state["optimizer_options"])
    for word, value in {**state["optimizer"], **options.pop("values")}.items():
        name, _, key = word.rpartition("|")
        if isinstance(value, Tensor):
            part = world.part(value, parameters[indices[name]])
            value = value.clone() if part is value else part
        entries.setdefault(indices[name], {})[key] = value
    pairs = zip(options.pop("groups"), fresh["param_groups"], strict=True)
    groups = [saved | {"params": group["params"]} for saved, group in pairs]
    optimizer.load_state_dict({**options, "state": entries, "param_groups": groups})
    for group, configured in zip(optimizer.param_groups, fresh["param_groups"], strict=True):
        # Hyper-parameters come from the configuration; other entries of a group are state.
        group.update({k: v for k, v in configured.items() if k in optimizer.defaults})


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return names of the optimizer's parameters in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
