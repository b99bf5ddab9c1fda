"""Objects of one run that the training loop works on, and their state for checkpoints."""

from __future__ import annotations

import contextlib
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
from sparsepretrain.training.gradients import Gradients
from sparsepretrain.training.guard import Guard
from sparsepretrain.training.observer import Observer, Probe
from sparsepretrain.training.observers import EMA
from sparsepretrain.training.signals import StopSignals
from sparsepretrain.training.step import Step
from sparsepretrain.training.world import World

COUNTERS = ("step", "tokens", "evaluated", "lines")
"""Integers of a session that a checkpoint keeps."""
COPIED = ("model", "optimizer", "ema")
"""Parts of a checkpoint whose tensors are copied when loaded; a shard copies only its rows."""


@dataclass
class Session:
    """A run that is being trained or evaluated."""

    run: Run
    world: World
    task: Task
    model: nn.Module
    forward_model: nn.Module
    """The model or its compiled form, for evaluation."""
    optimizer: Optimizer
    sparsifier: Sparsifier
    scaler: torch.amp.GradScaler
    batches: TrainingBatches
    gradients: Gradients
    """Loss of training micro-batches, and the reduction of their gradients."""
    guard: Guard
    observers: list[Observer]
    """Called around every step, in this order; more can be added."""
    compiled: str = "none"
    """Compiled part of the model; see :func:`compilation.mode_of`."""
    signals: StopSignals = field(default_factory=StopSignals)
    """This process's signal handlers, installed when it is entered."""
    agreed: int | None = None
    """Exit code that the ranks last agreed on."""
    ema: EMA | None = None
    """Averages of the weights, which are evaluated too."""
    on_progress: Callable[[Progress], None] | None = None
    """Shows the progress of an evaluation."""
    initial_weights: str | None = None
    """Hash of the weights before ``sparsify``; None: this session does not train."""
    step: int = 0
    """Completed steps."""
    last: Step | None = None
    """Last step, whose loss may still be on the device."""
    tokens: int = 0
    """Items trained on so far."""
    evaluated: int = -1
    """Completed steps at the last evaluation."""
    lines: int = 0
    """Lines of the record at the last checkpoint; 0: unknown."""
    stop_after: int | None = None
    """Completed steps after which the run ends early; schedules and windows do not change."""
    save_failed: Callable[[], bool] = lambda: False
    """True if a background save failed."""
    log_probe: Callable[[dict[str, Any]], object] = lambda line: None
    """Writes a line of a probe."""
    parameters: list[nn.Parameter] = field(init=False)
    """Parameters of the model, collected once: visiting every module takes time."""

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())

    @property
    def probes(self) -> dict[str, Probe]:
        """Observers that the configuration turned on."""
        return {o.name: o for o in self.observers if isinstance(o, Probe)}

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.world.device

    @property
    def own_stop(self) -> int | None:
        """Exit code that this rank asks to stop with, after a signal or a failed save.

        The error itself is raised when the next checkpoint is saved.
        """
        if self.signals.exit_code is None and self.save_failed():
            return CheckpointError.exit_code
        return self.signals.exit_code

    @property
    def stopping(self) -> int | None:
        """Exit code that all ranks stop with; they agree on it, or some would wait for others."""
        return self.own_stop if self.world.size == 1 else self.agreed

    @property
    def end(self) -> int:
        """Completed steps after which the loop returns."""
        steps = self.run.steps
        return steps if self.stop_after is None else min(self.stop_after, steps)

    @property
    def reads_late(self) -> bool:
        """True if loss and norm of a step are read after the optimizer step of the next one.

        The optimizer then has to skip refused gradients on the device, as fused ones do for
        GradScaler. A guard that goes on after a refused step, and the loss scale, need the numbers
        before the optimizer runs.
        """
        skips = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        return skips and self.guard.rule == "stop" and not self.scaler.is_enabled()

    @property
    def updated(self) -> bool:
        """True if the last step changed the weights; False if the guard refused it."""
        return not self.guard.skips_in_a_row

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Let ranks run different forwards, even of a sharded model."""
        if not self._sharded:
            return contextlib.nullcontext()
        from sparsepretrain.training.shards import gathered

        return gathered(self.run, self.model)

    @property
    def _sharded(self) -> bool:
        return self.run.parallel.name == "fsdp" and self.world.size > 1

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather sharded tensors one by one to the CPU of rank 0; other ranks get none."""
        if not self._sharded:
            return tensors
        found: dict[str, Tensor] = {}
        named = self.model.named_parameters(remove_duplicate=False)
        first: dict[nn.Parameter, str] = {}
        tied = {name: first.setdefault(parameter, name) for name, parameter in named}
        for name, tensor in tensors.items():
            if (other := tied.get(name, name)) in found:
                found[name] = found[other]
            else:
                whole = self.world.whole(tensor)
                found[name] = whole.cpu() if self.world.is_main else tensor
        return found if self.world.is_main else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a bit-exact resume, as named parts.

        ``model``, ``optimizer`` and ``ema`` hold tensors by name; the other parts are plain values
        or small tensors. Collective; of a sharded model only rank 0 has the tensors.
        """
        tensors, options = _optimizer_state(self.model, self.optimizer)
        parts: dict[str, Any] = {
            **{key: getattr(self, key) for key in COUNTERS},
            "fingerprint": self.task.fingerprint,
            "observers": {o.name: kept for o in self.observers if (kept := o.state_dict())},
            "guard": self.guard.state_dict(),
            "sparsifier": self.sparsifier.state_dict(),
            "scaler": self.scaler.state_dict(),
            "optimizer_options": options,
            "model": self._whole(self.model.state_dict()),
            "optimizer": self._whole(tensors),
        }
        if self.ema is not None:
            parts |= {"ema": self._whole(self.ema.averages), "ema_updates": self.ema.updates}
        return parts

    def _parts(self, whole: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the shards of this rank for tensors whose ``like`` is sharded."""
        return {k: self.world.part(v, like[k]) if k in like else v for k, v in whole.items()}

    def load_state_dict(self, state: dict[str, Any], source: object = "the checkpoint") -> None:
        """Restore :meth:`state_dict`.

        Args:
            state: the parts, tensors on the CPU; tensors of :data:`COPIED` are not kept.
            source: name for error messages.

        Raises:
            CheckpointError: the checkpoint has more steps, other data, model or optimizer.
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
            self.model.load_state_dict(self._parts(state["model"], self.model.state_dict()))
            _load_optimizer(self.model, self.optimizer, state, self.world)
            if self.ema is not None:
                kept, updates = averages(state, self.model)
                self.ema.load(self._parts(kept, self.ema.averages), updates)
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            text = f"{source} does not fit this model or optimizer: {reason}"
            raise CheckpointError(text) from error
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.scaler.load_state_dict(state["scaler"])
        self.guard.load_state_dict(state["guard"])
        for observer in self.observers:
            if observer.name in state["observers"]:
                observer.load_state_dict(state["observers"][observer.name])
        for key in COUNTERS:
            setattr(self, key, state[key])


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
