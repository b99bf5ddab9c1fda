"""Everything that a training loop touches, and its state as named parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.config.schema import Run
from sparsepretrain.data.preparation import Progress
from sparsepretrain.errors import CheckpointError
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.tasks import Task
from sparsepretrain.training.batches import TrainingBatches
from sparsepretrain.training.observers import EMA, Flips, Observer
from sparsepretrain.training.world import World

COUNTERS = ("step", "tokens", "evaluated", "skipped", "skips_in_a_row", "lines")
"""Integers of a session that a checkpoint keeps."""


@dataclass
class Session:
    """A run in the middle of being trained or evaluated."""

    run: Run
    world: World
    task: Task
    model: nn.Module
    forward_model: nn.Module
    """The model, or its compiled form."""
    optimizer: Optimizer
    sparsifier: Sparsifier
    scaler: torch.amp.GradScaler
    batches: TrainingBatches
    ema: EMA | None = None
    """Averages of the weights, which are evaluated too; None: none are kept."""
    on_progress: Callable[[Progress], None] | None = None
    """Shows how far an evaluation is."""
    step: int = 0
    """Completed steps."""
    tokens: int = 0
    """Items trained on so far."""
    evaluated: int = -1
    """Completed steps at the last evaluation."""
    skipped: int = 0
    """Steps without an update because something was not finite."""
    skips_in_a_row: int = 0
    lines: int = 0
    """Of the record, at the last checkpoint; 0: not known."""
    stop_after: int | None = None
    """End early, after so many completed steps; schedules and windows stay those of the run."""
    flips: Flips = field(init=False)
    observers: list[Observer] = field(init=False)
    """Told of every step, in this order; anybody may add their own."""

    def __post_init__(self) -> None:
        self.flips = Flips(self.sparsifier)
        self.observers = [self.flips] if self.ema is None else [self.flips, self.ema]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.world.device

    @property
    def end(self) -> int:
        """Completed steps after which the loop returns."""
        return self.run.steps if self.stop_after is None else self.stop_after

    @property
    def updated(self) -> bool:
        """Whether the last step changed the weights; it does not where something is not finite."""
        return not self.skips_in_a_row

    def state_dict(self) -> dict[str, Any]:
        """Everything that a continued run needs to go on bit for bit, as named parts.

        ``model``, ``optimizer`` and ``ema`` hold tensors by name; the other parts are plain values
        that JSON can hold.
        """
        tensors, options = _optimizer_state(self.model, self.optimizer)
        parts: dict[str, Any] = {
            **{key: getattr(self, key) for key in COUNTERS},
            "fingerprint": self.task.fingerprint,
            "flips": self.flips.state_dict(),
            "sparsifier": self.sparsifier.state_dict(),
            "scaler": self.scaler.state_dict(),
            "optimizer_options": options,
            "model": self.model.state_dict(),
            "optimizer": tensors,
        }
        if self.ema is not None:
            parts |= {"ema": dict(self.ema.averages), "ema_updates": self.ema.updates}
        return parts

    def load_state_dict(self, state: dict[str, Any], source: object = "the checkpoint") -> None:
        """Restore what :meth:`state_dict` returned, here or in an older version.

        Args:
            state: the parts, tensors on the CPU.
            source: what errors call it.

        Raises:
            CheckpointError: it is of a longer run, of other data, or of another model or optimiser.
        """
        if state["step"] > self.run.steps:
            raise CheckpointError(
                f"{source} has {state['step']} steps, more than steps={self.run.steps}: raise steps"
            )
        if state["fingerprint"] != self.task.fingerprint:
            raise CheckpointError(
                f"{source} was trained on other data (fingerprint {state['fingerprint']}, now "
                f"{self.task.fingerprint}): prepare the same data, or start anew with resume=never"
            )
        try:
            self.model.load_state_dict(state["model"])
            _load_optimizer(self.model, self.optimizer, state)
            if self.ema is not None:
                self.ema.load(*averages(state, self.model))
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            text = f"{source} does not fit this model or optimiser: {reason}"
            raise CheckpointError(text) from error
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.scaler.load_state_dict(state["scaler"])
        if "flips" in state:  # without them the first mean is over what follows
            self.flips.load_state_dict(state["flips"])
        for key in COUNTERS:  # an older checkpoint may lack some
            setattr(self, key, state.get(key, getattr(self, key)))


def averages(state: dict[str, Any], model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Averaged weights of a checkpoint and how many they are of; without any, the model's own."""
    kept = state.get("ema")
    if kept is None:
        return {name: p.detach() for name, p in model.named_parameters()}, 0
    if state.get("ema_updates") is not None:
        return kept, state["ema_updates"]
    return kept["averages"], kept["updates"]  # format 1


def _optimizer_state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """``<parameter>|<key>`` -> tensor; and all that is no tensor: groups, scalars, counters."""
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


def _load_optimizer(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    fresh = optimizer.state_dict()
    loaded = state["optimizer"]
    if "param_groups" not in loaded:  # else format 1, as the optimiser wrote it
        indices = {name: index for index, name in enumerate(_names(model, optimizer))}
        entries: dict[int, dict[str, Any]] = {}
        options = dict(state["optimizer_options"])
        for word, value in {**loaded, **options.pop("values")}.items():
            name, _, key = word.rpartition("|")
            entries.setdefault(indices[name], {})[key] = value
        del options["groups"]
        loaded = {**options, "state": entries, "param_groups": fresh["param_groups"]}
    optimizer.load_state_dict(loaded)
    for group, configured in zip(optimizer.param_groups, fresh["param_groups"], strict=True):
        # hyper-parameters come from the configuration
        group.update({k: v for k, v in configured.items() if k != "params"})


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the optimiser's parameters, in the order in which it numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
