"""Objects of one run that the training loop works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sparsepretrain.config.schema import Run
from sparsepretrain.data.preparation import Progress
from sparsepretrain.errors import CheckpointError
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.tasks import Task
from sparsepretrain.training.batches import TrainingBatches
from sparsepretrain.training.ema import EMA
from sparsepretrain.training.gradients import Gradients
from sparsepretrain.training.guard import Guard
from sparsepretrain.training.observer import Observer
from sparsepretrain.training.signals import StopSignals
from sparsepretrain.training.step import Step
from sparsepretrain.training.tracing import StepCost
from sparsepretrain.training.world import World


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
    observers: list[Observer[Session]]
    """Called around every step, in this order; more can be added."""
    compiled: str = "none"
    """Compiled part of the model; see :class:`compilation.Scope`."""
    cost: StepCost | None = None
    """Cost of a step; None: the session trains on a CPU, or not at all."""
    signals: StopSignals = field(default_factory=StopSignals)
    """This process's signal handlers, installed by ``__enter__``."""
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

    @property
    def is_sharded(self) -> bool:
        """True if parameters are sharded over ranks."""
        return self.run.parallel.name == "fsdp" and self.world.size > 1
