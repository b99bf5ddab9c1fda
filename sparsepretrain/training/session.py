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
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.tasks import Task
from sparsepretrain.training.batches import TrainingBatches
from sparsepretrain.training.ema import EMA
from sparsepretrain.training.gradients import Gradients
from sparsepretrain.training.guard import Guard
from sparsepretrain.training.observer import Observer
from sparsepretrain.training.step import Step
from sparsepretrain.training.stopping import StopRequest
from sparsepretrain.training.tracing import StepCost
from sparsepretrain.training.world import World


@dataclass
class Counters:
    """Counters of a run, which a checkpoint keeps."""

    step: int = 0
    """Completed steps."""
    tokens: int = 0
    """Items trained on so far."""
    evaluated: int = -1
    """Completed steps at the last evaluation."""
    lines: int = 0
    """Lines of the record at the last checkpoint; 0: unknown."""


@dataclass
class Setup:
    """Facts about the start of a run, for its environment.json and its throughput."""

    cost: StepCost | None = None
    """Cost of a step; None: the session trains on a CPU, or not at all."""
    compiled: str = "none"
    """Compiled part of the model; see :class:`compilation.Scope`."""
    initial_weights: str | None = None
    """Hash of the weights before ``sparsify``; None: this session does not train."""


@dataclass
class Session:
    """A run that is being trained or evaluated.

    :func:`~sparsepretrain.training.assembly.build_session` makes the objects once. The functions of
    ``loop.py`` and ``validation.py`` change what they hold, and :attr:`counters` and :attr:`last`;
    ``session_state.py`` saves what a resume needs.
    """

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
    end: int
    """Completed steps after which the loop returns; schedules and windows follow ``run.steps``."""
    ema: EMA | None = None
    """Averages of the weights, which are evaluated too."""
    setup: Setup = field(default_factory=Setup)
    stop: StopRequest = field(default_factory=StopRequest)
    counters: Counters = field(default_factory=Counters)
    last: Step | None = None
    """Last step, whose loss may still be on the device."""
    on_progress: Callable[[Progress], None] | None = None
    """Shows the progress of an evaluation."""
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
    def step(self) -> int:
        """Completed steps."""
        return self.counters.step

    @property
    def stopping(self) -> int | None:
        """Exit code that all ranks stop with; they agree on it, or some would wait for others."""
        return self.stop.requested if self.world.size == 1 else self.stop.agreed

    @property
    def updated(self) -> bool:
        """True unless the guard refused the last step whose numbers were read.

        A guard that goes on after a refused step reads the numbers of each step at once.
        """
        return not self.guard.skips_in_a_row

    @property
    def is_sharded(self) -> bool:
        """True if parameters are sharded over ranks."""
        return self.run.parallel.name == "fsdp" and self.world.size > 1
