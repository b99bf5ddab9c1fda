"""State of a session for checkpoints: what a bit-exact resume needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.errors import CheckpointError, reason
from sparsepretrain.runs.tensors import Stored
from sparsepretrain.training.session import Counters, Session
from sparsepretrain.training.world import World

STORED = ("model", "optimizer", "ema")
"""Parts of a checkpoint that are mapped, not read: each rank then reads only its rows."""


def state_dict(session: Session) -> dict[str, Any]:
    """Return the state for a bit-exact resume, as named parts.

    ``model``, ``optimizer`` and ``ema`` hold tensors by name; the other parts are plain values
    or small tensors. Collective; ranks of a sharded model return their rows, rank 0 the rest too.
    """
    tensors, options = _optimizer_state(session.model, session.optimizer)
    parts: dict[str, Any] = {
        **asdict(session.counters),
        "fingerprint": session.task.fingerprint,
        "observers": {o.name: saved for o in session.observers if (saved := o.state_dict())},
        "guard": session.guard.state_dict(),
        "sparsifier": session.sparsifier.state_dict(),
        "scaler": session.scaler.state_dict(),
        "optimizer_options": options,
        "model": _own(session, session.model.state_dict()),
        "optimizer": _own(session, tensors),
    }
    if session.ema is not None:
        parts |= {"ema": _own(session, session.ema.averages), "ema_updates": session.ema.updates}
    return parts if session.world.is_main else {key: parts[key] for key in STORED if key in parts}


def load_state_dict(
    session: Session, state: dict[str, Any], source: object = "the checkpoint"
) -> None:
    """Restore :func:`state_dict`.

    Args:
        session: session to restore into.
        state: the parts; tensors of :data:`STORED` may be memory maps of a file, and are copied.
        source: name for error messages.
    """
    if state["step"] > session.run.steps:
        raise CheckpointError(
            f"{source} has {state['step']} steps, more than steps={session.run.steps}: raise steps"
        )
    if state["fingerprint"] != session.task.fingerprint:
        raise CheckpointError(
            f"{source} was trained on other data (fingerprint {state['fingerprint']}, now "
            f"{session.task.fingerprint}): prepare the same data, or start again with resume=never"
        )
    try:
        session.model.load_state_dict(_parts(session, state["model"], session.model.state_dict()))
        _load_optimizer(session.model, session.optimizer, state, session.world)
        if session.ema is not None:
            averaged, updates = averages(state, session.model)
            session.ema.load(_parts(session, averaged, session.ema.averages), updates)
    except (RuntimeError, ValueError, KeyError) as error:
        text = f"{source} does not fit this model or optimizer: {reason(error)}"
        raise CheckpointError(text) from error
    session.sparsifier.load_state_dict(state["sparsifier"])
    if state["scaler"]:  # not if it comes from another precision
        session.scaler.load_state_dict(state["scaler"])
    session.guard.load_state_dict(state["guard"])
    for observer in session.observers:
        if observer.name in state["observers"]:
            observer.load_state_dict(state["observers"][observer.name])
    session.counters = Counters(**{field.name: state[field.name] for field in fields(Counters)})


def _own(session: Session, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the tensors that this rank saves: rows of sharded ones; on rank 0 the others too."""
    if not session.is_sharded:
        return tensors
    rows = {name: session.world.rows(tensor) for name, tensor in tensors.items()}
    return {name: value for name, value in rows.items() if value is not None}


def _parts(
    session: Session, whole: Mapping[str, Tensor | Stored], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return this rank's shards of tensors whose ``like`` is sharded, and other tensors whole."""
    return {k: session.world.part(v, like[k]) if k in like else v[...] for k, v in whole.items()}


def averages(state: dict[str, Any], model: nn.Module) -> tuple[Mapping[str, Tensor | Stored], int]:
    """Return averaged weights and number of updates; without an EMA the model's weights and 0."""
    ema = state.get("ema")
    if ema is None:
        return {name: p.detach() for name, p in model.named_parameters()}, 0
    return ema, state["ema_updates"]


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
    for word, stored in state["optimizer"].items():
        name, _, key = word.rpartition("|")
        value = world.part(stored, parameters[indices[name]])
        # torch keeps this tensor, but the file of a memory map may be removed
        entries.setdefault(indices[name], {})[key] = value.clone()
    for word, plain in options.pop("values").items():
        name, _, key = word.rpartition("|")
        entries.setdefault(indices[name], {})[key] = plain
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
