"""What a run consists of. Field names are the keys a user types; YAML files list every one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sparsepretrain import registry
from sparsepretrain.files import is_plain_name

MOST_STEPS = 10**9
"""Steps of a run, and passes over its data: more is a slip of the hand."""

Problems = Iterator[tuple[str, str]]


@dataclass(slots=True, kw_only=True)
class Batch:
    """Samples per optimiser step and per forward: sequences, images, or buckets of pairs."""

    size: int
    """Global batch: samples per optimiser step."""
    micro: int
    """Samples per forward and backward on one device; divides ``size``."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _positive(self, "size", "micro")
        if self.micro > 0 and self.size % self.micro:
            yield "micro", f"must divide batch.size ({self.size}), got {self.micro}"


@dataclass(slots=True, kw_only=True)
class Eval:
    """Evaluation on the validation split, with the weights that the method evaluates with."""

    every: int
    """Optimiser steps between evaluations; 0: only at the end."""
    batches: int | None
    """Micro-batches per evaluation, the same ones every time; null: the whole split; 0: none."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _non_negative(self, "every")
        if self.batches is not None:
            yield from _non_negative(self, "batches")


@dataclass(slots=True, kw_only=True)
class Log:
    """What is written to metrics.jsonl and how often, in optimiser steps."""

    every: int
    """Loss, learning rate, gradient norm, flip rate, tokens/s."""
    layers_every: int
    """Flip rate and L1 gap of each layer; 0: never."""
    masks_every: int
    """Packed masks into masks/; 0: never."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _positive(self, "every")
        yield from _non_negative(self, "layers_every", "masks_every")


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """Checkpoints; the last step is always saved."""

    every: int
    """Optimiser steps between checkpoints; 0: only at the end and on a signal."""
    keep_last: int
    """Valid checkpoints kept; older ones are removed."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _non_negative(self, "every")
        yield from _positive(self, "keep_last")


@dataclass(slots=True, kw_only=True)
class Init:
    """Where the initial weights come from; the verb ``finetune`` fills this in."""

    path: str | None = None
    """Run directory, checkpoint or Hugging Face checkpoint; null: drawn from the seed."""
    weights: Literal["auto", "master", "projected"] = "auto"
    """The stored weights, or those that the source evaluates with; auto: the stored ones when the
    method stays the same, else the others, so that the function of the model is kept."""


@dataclass(slots=True, kw_only=True)
class AdamW:
    """torch.optim.AdamW; decay applies to tensors of two or more dimensions only."""

    name: Literal["adamw"]
    lr: float
    """Peak learning rate, reached after the schedule's warm-up."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _positive(self, "lr", "eps")
        yield from _non_negative(self, "weight_decay")
        if not all(0 <= b < 1 for b in self.betas):
            yield "betas", f"must lie in [0, 1), got {list(self.betas)}"


@dataclass(slots=True, kw_only=True)
class SGD:
    """torch.optim.SGD; decay applies to tensors of two or more dimensions only."""

    name: Literal["sgd"]
    lr: float
    """Peak learning rate, reached after the schedule's warm-up."""
    momentum: float
    nesterov: bool
    weight_decay: float

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _positive(self, "lr")
        yield from _non_negative(self, "momentum", "weight_decay")
        if self.nesterov and self.momentum == 0:
            yield "nesterov", "needs optim.momentum > 0"


@dataclass(slots=True, kw_only=True)
class Lion:
    """timm.optim.Lion (arXiv:2302.06675); decay applies to tensors of ≥ 2 dimensions only."""

    name: Literal["lion"]
    lr: float
    """Peak learning rate, reached after the schedule's warm-up."""
    betas: tuple[float, float]
    """Of the step's direction, and of the momentum that is kept."""
    weight_decay: float

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _positive(self, "lr")
        yield from _non_negative(self, "weight_decay")
        if not all(0 <= b < 1 for b in self.betas):
            yield "betas", f"must lie in [0, 1), got {list(self.betas)}"


@dataclass(slots=True, kw_only=True)
class Decay:
    """Linear warm-up, then cosine or linear decay to a floor at the last step."""

    name: Literal["cosine", "linear"]
    warmup: int | float
    """Optimiser steps from 0 to the peak learning rate; below 1: a fraction of the run."""
    start: float | None
    """Learning rate of the first update, as a fraction of the peak; null: 1 / (warmup + 1)."""
    min_lr: float
    """Learning rate that the decay reaches after the last step."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _warmup(self)
        yield from _non_negative(self, "min_lr")


@dataclass(slots=True, kw_only=True)
class Warmup:
    """Linear warm-up, then constant, or decay with the inverse square root of the step."""

    name: Literal["inverse_sqrt", "constant"]
    warmup: int | float
    """Optimiser steps from 0 to the peak learning rate; below 1: a fraction of the run."""
    start: float | None
    """Learning rate of the first update, as a fraction of the peak; null: 1 / (warmup + 1)."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _warmup(self)


@dataclass(slots=True, kw_only=True)
class Triangle:
    """A straight line up to the peak learning rate, then one down to zero at the last step."""

    name: Literal["triangle"]
    start: float
    """Learning rate of the first update, as a fraction of the peak."""
    peak: float
    """Fraction of the run at which the peak is reached."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        for key in ("start", "peak"):
            if not 0 <= getattr(self, key) <= 1:
                yield key, f"must lie in [0, 1], got {getattr(self, key)}"


@dataclass(slots=True, kw_only=True)
class Precision:
    """Compute dtype of the matrix products; masters and optimiser states stay fp32."""

    name: Literal["fp32", "bf16"]


@dataclass(slots=True, kw_only=True)
class LossScaling:
    """Dynamic loss scaling, without which small gradients vanish in fp16."""

    init_scale: float
    """First loss scale."""
    growth_interval: int
    """Steps without overflow after which the scale doubles."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _positive(self, "init_scale", "growth_interval")


@dataclass(slots=True, kw_only=True)
class ScaledPrecision(LossScaling):
    """fp16 with dynamic loss scaling."""

    name: Literal["fp16"]


@dataclass(slots=True, kw_only=True)
class SimulatedFP8(LossScaling):
    """fp8 values in the products of the layers of ``sparsity.targets`` (S-STE section 5).

    The loss is scaled with ``dtype=fp16`` only.
    """

    name: Literal["fp8_sim"]
    recipe: Literal["hybrid", "reference"]
    """Operands of the backward products: e5m2 gradient × e4m3, or both e5m2 (authors' code)."""
    dtype: Literal["fp32", "bf16", "fp16"]
    """Compute dtype of everything else."""


@dataclass(slots=True, kw_only=True)
class Parallel:
    """How the run is spread over devices."""

    name: Literal["single"]
    device: Literal["auto", "cpu", "cuda"]
    """auto: the GPU if there is one."""


@dataclass(slots=True, kw_only=True)
class Tracker:
    """Mirrors of metrics.jsonl, which is always written. A failing mirror never stops a run."""

    name: str
    """The file this came from; the keys below decide."""
    mode: Literal["online", "offline", "disabled"]
    """Weights & Biases: online needs a login, offline neither account nor network."""
    project: str
    entity: str | None
    tensorboard: bool
    """Also write TensorBoard event files."""


GROUPS: dict[str, dict[str, type]] = {
    "optim": {"adamw": AdamW, "sgd": SGD, "lion": Lion},
    "schedule": {
        "cosine": Decay,
        "linear": Decay,
        "inverse_sqrt": Warmup,
        "constant": Warmup,
        "triangle": Triangle,
    },
    "precision": {
        "fp32": Precision,
        "bf16": Precision,
        "fp16": ScaledPrecision,
        "fp8_sim": SimulatedFP8,
    },
    "parallel": {"single": Parallel},
}
"""Groups whose ``name`` selects a dataclass of this file."""

REGISTERED = {
    "model": ("model", "family"),
    "task": ("task", "name"),
    "data": ("source", "source"),
    "sparsity": ("method", "name"),
}
"""Group -> (registry kind, key that names the implementation); its class has an ``Options``."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The root of a resolved configuration."""

    name: str
    """Directory under runs_dir."""
    seed: int
    """Initial weights, data order and every random draw follow from it."""
    steps: int
    """Optimiser steps; 0: what ``epochs`` comes to."""
    epochs: float | None
    """Passes over the training data, used when ``steps`` is 0; null: steps decides."""
    runs_dir: str
    resume: str
    """auto: continue from the newest valid checkpoint of this run; never; or a checkpoint path."""
    plugins: list[str]
    """Method files (.py) or modules to import first."""
    batch: Batch
    eval: Eval
    log: Log
    checkpoint: Checkpoint
    clip: float | None
    """Global gradient norm; null: no clipping."""
    ema: float | None
    """Decay per step of an average of the weights, which is evaluated too (ema_*); null: none."""
    workers: int
    """Processes that make batches ahead of the model; 0: the training process makes them."""
    init: Init = field(default_factory=Init)
    compile: bool
    """torch.compile the model."""
    guard: Literal["stop", "skip"]
    """Non-finite loss or gradient: stop with exit code 5, or skip the step and count it."""
    model: Any
    task: Any
    data: Any
    sparsity: Any
    optim: Any
    schedule: Any
    precision: Any
    parallel: Any
    tracker: Tracker
    experiment: str | None = None
    """Name of the experiment file, if one was chosen."""

    @property
    def plain(self) -> dict[str, Any]:
        """The same as plain values that are the caller's own, what options filled in included."""
        plain: dict[str, Any] = _lists(asdict(self))
        return plain

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        yield from _non_negative(self, "steps", "workers")
        if self.steps > MOST_STEPS:
            yield "steps", f"must be ≤ {MOST_STEPS}, got {self.steps}"
        if self.epochs is not None and not 0 < self.epochs <= MOST_STEPS:
            yield "epochs", f"must lie in (0, {MOST_STEPS}] or be null, got {self.epochs}"
        if self.steps == 0 and self.epochs is None:
            yield "steps", "must be > 0, or give epochs"
        if self.ema is not None and not 0 < self.ema < 1:
            yield "ema", f"must lie in (0, 1) or be null, got {self.ema}"
        if not self.runs_dir:
            yield "runs_dir", "must name a directory, got ''"
        if not 0 <= self.seed < 2**63:
            yield "seed", f"must lie in [0, 2^63), got {self.seed}"
        if self.clip is not None and self.clip <= 0:
            yield "clip", f"must be > 0 or null, got {self.clip}"
        if not is_plain_name(self.name):
            yield "name", f"must be a plain directory name, got {self.name!r}"
        yield from _fitting(self)
        floor, peak = getattr(self.schedule, "min_lr", 0.0), getattr(self.optim, "lr", None)
        if peak is not None and floor > peak:
            yield "schedule.min_lr", f"must be ≤ optim.lr ({peak}), got {floor}"


def _fitting(run: Run) -> Problems:
    """Whether the data are of the task's kind, and model, task and data go together."""
    if run.model is None or run.task is None or run.data is None:  # refused for another reason
        return
    task: Any = registry.get("task", run.task.name)
    source: Any = registry.get("source", run.data.source)
    if source.kind != task.kind:
        has = f"{run.data.name} is {source.kind}"
        yield "data", f"{has}, but task={run.task.name} needs {task.kind}"
    else:
        yield from task.misfits(run.task, run.model, run.data)


def _lists(value: Any) -> Any:
    """Tuples as lists, as YAML has them."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _warmup(options: Decay | Warmup) -> Problems:
    yield from _non_negative(options, "warmup")
    if options.warmup >= 1 and not float(options.warmup).is_integer():
        yield "warmup", f"must be whole steps or a fraction below 1, got {options.warmup}"
    if options.start is not None and not 0 <= options.start <= 1:
        yield "start", f"must lie in [0, 1] or be null, got {options.start}"


def _positive(options: Any, *keys: str) -> Problems:
    for key in keys:
        if getattr(options, key) <= 0:
            yield key, f"must be > 0, got {getattr(options, key)}"


def _non_negative(options: Any, *keys: str) -> Problems:
    for key in keys:
        if getattr(options, key) < 0:
            yield key, f"must be ≥ 0, got {getattr(options, key)}"
