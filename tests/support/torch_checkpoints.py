"""Saving and loading with torch.distributed.checkpoint, in the orders in which loops do so."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def partial():
    """A checkpoint has no moments of adapters that had no gradient yet."""
    return DefaultLoadPlanner(allow_partial_load=True)


def save(model, optimizer, path, load="load_together"):
    """Write what the function named ``load`` reads."""
    options = FLAT if load == "load_flat" else None
    weights, moments = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=path)


def load_together(model, optimizer, path, options=None):
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optim": moments}
    dcp.load(state, checkpoint_id=path, planner=partial())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=options,
    )


def load_flat(model, optimizer, path):
    load_together(model, optimizer, path, FLAT)


def load_model(model, path):
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])


def load_optimizer(model, optimizer, path):
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path, planner=partial())
    set_optimizer_state_dict(model, optimizer, state["optim"])


def load_model_first(model, optimizer, path):
    load_model(model, path)
    load_optimizer(model, optimizer, path)


def load_optimizer_first(model, optimizer, path):
    load_optimizer(model, optimizer, path)
    load_model(model, path)


LOADS = {
    load.__name__: load
    for load in (load_together, load_flat, load_model_first, load_optimizer_first)
}
