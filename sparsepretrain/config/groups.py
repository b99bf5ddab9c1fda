"""Configuration groups, and the options of groups without a registry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

from sparsepretrain import registry
from sparsepretrain.errors import ConfigError, Problems


@dataclass(slots=True, kw_only=True)
class Warmup:
    """Linear warm-up, then constant, or decay with the inverse square root of the step."""

    name: Literal["inverse_sqrt", "constant"]
    warmup: Annotated[int | float, "≥ 0"]
    """Optimizer steps from 0 to the peak learning rate; below 1: a fraction of the run."""
    start: Annotated[float | None, "[0, 1]"]
    """Learning rate of the first update, as a fraction of the peak; null: 1 / (warmup + 1)."""

    def problems(self) -> Problems:
        if self.warmup >= 1 and not float(self.warmup).is_integer():
            yield "warmup", f"must be whole steps or a fraction below 1, got {self.warmup}"


@dataclass(slots=True, kw_only=True)
class Decay(Warmup):
    """Linear warm-up, then cosine or linear decay to a floor, and an optional tail to zero."""

    name: Literal["cosine", "linear"]  # type: ignore[assignment]
    end: Annotated[float, "[0, 1]"]
    """Learning rate at the end of the decay, as a fraction of the peak."""
    tail: Annotated[float, "[0, 1)"] = 0.0
    """Last fraction of the run, in which the learning rate falls linearly from there to zero; 0:
    the decay ends with the run."""

    def problems(self) -> Problems:
        yield from Warmup.problems(self)
        if self.warmup < 1 <= self.warmup + self.tail:
            total = self.warmup + self.tail
            yield "tail", f"and schedule.warmup must sum to less than 1, got {total:g}"


@dataclass(slots=True, kw_only=True)
class StableDecay(Warmup):
    """Linear warm-up, a stable phase at the peak, then decay to a floor (WSD, arXiv:2404.06395)."""

    name: Literal["wsd"]  # type: ignore[assignment]
    decay: Annotated[float, "(0, 1]"]
    """Fraction of the run in which the learning rate decays."""
    shape: Literal["linear", "sqrt"]
    """Shape of the decay at fraction p: 1 - p, or 1 - √p (arXiv:2405.18392)."""
    end: Annotated[float, "[0, 1]"]
    """Learning rate after the last step, as a fraction of the peak."""

    def problems(self) -> Problems:
        yield from Warmup.problems(self)
        if self.warmup < 1 < self.warmup + self.decay:
            total = self.warmup + self.decay
            yield "decay", f"and schedule.warmup must sum to at most 1, got {total:g}"


@dataclass(slots=True, kw_only=True)
class Triangle:
    """Linear increase to the peak learning rate, then linear decrease to zero at the last step."""

    name: Literal["triangle"]
    start: Annotated[float, "[0, 1]"]
    """Learning rate of the first update, as a fraction of the peak."""
    peak: Annotated[float, "[0, 1]"]
    """Fraction of the run at which the peak is reached."""


@dataclass(slots=True, kw_only=True)
class Precision:
    """Compute dtype of matmuls; master weights and optimizer states stay fp32.

    fp64 is for proofs: master weights and everything else are double precision too.
    """

    name: Literal["bf16", "fp64"]


@dataclass(slots=True, kw_only=True)
class SinglePrecision:
    """Everything in single precision."""

    name: Literal["fp32"]
    tf32: bool = False
    """Allow GPUs to round operands of matmuls and convolutions to TF32 (10 mantissa bits)."""


@dataclass(slots=True, kw_only=True)
class ScaledPrecision:
    """fp16 with dynamic loss scaling, without which small gradients vanish."""

    name: Literal["fp16"]
    init_scale: Annotated[float, "> 0"]
    """First loss scale."""
    growth_interval: Annotated[int, "> 0"]
    """Steps without overflow after which the scale doubles."""


@dataclass(slots=True, kw_only=True)
class SimulatedFP8(ScaledPrecision):
    """Simulated fp8 matmuls in the layers of ``sparsity.targets`` (S-STE section 5).

    The loss is scaled with ``dtype=fp16`` only.
    """

    name: Literal["fp8_sim"]  # type: ignore[assignment]
    recipe: Literal["hybrid", "reference", "e4m3"]
    """Operands of the backward matmuls: e5m2 gradient × e4m3, both e5m2 (authors' code) or both
    e4m3."""
    dtype: Literal["fp32", "bf16", "fp16"]
    """Compute dtype of everything else."""
    tf32: bool = False
    """Round inputs of fp32 matmuls to TF32 on GPUs."""


@dataclass(slots=True, kw_only=True)
class TensorCoreFP8(SimulatedFP8):
    """Matmuls of the layers of ``sparsity.targets`` on fp8 tensor cores, with equal values."""

    name: Literal["fp8"]  # type: ignore[assignment]
    recipe: Literal["hybrid", "e4m3"]
    """Operands of the backward matmuls: e5m2 gradient × e4m3, or both e4m3 (needed for 2:4)."""


@dataclass(slots=True, kw_only=True)
class Parallel:
    """One process on one device."""

    name: Literal["single"]
    device: Literal["auto", "cpu", "cuda"]
    """auto: the GPU if there is one."""
    reduction: Literal["fast", "tree"]
    """Order of the sum of gradients: as micro-batches come, or a balanced tree over the global
    batch, which gives the same bits for 1, 2, 4, 8, ... processes."""


@dataclass(slots=True, kw_only=True)
class Processes:
    """Several processes; each computes its share of the micro-batches of a step."""

    name: str
    device: Literal["auto", "cpu", "cuda"]
    """auto: the GPU if there is one."""
    nproc: Annotated[int | None, "> 0"]
    """Processes on this machine; null: as many as torchrun started, else one per GPU."""
    timeout: Annotated[int, "> 0"]
    """Seconds that a process waits for the others."""
    grace: Annotated[int, "> 0"]
    """Seconds to save after a signal before processes are killed."""


@dataclass(slots=True, kw_only=True)
class DataParallel(Processes):
    """Every process holds the whole model."""

    name: Literal["ddp"]
    sync_batchnorm: bool
    """Normalize over the micro-batches of all processes (torch.nn.SyncBatchNorm, GPUs only)."""
    reduction: Literal["fast", "tree"]
    """Order of the sum of gradients: as micro-batches come, or a balanced tree over the global
    batch, which gives the same bits for 1, 2, 4, 8, ... processes."""


@dataclass(slots=True, kw_only=True)
class FullySharded(Processes):
    """Weights, gradients and moments are sharded over the processes (FSDP2)."""

    name: Literal["fsdp"]
    replicas: Annotated[int, "> 0"]
    """Copies of the model, each sharded over processes / replicas (HSDP)."""
    reshard_after_forward: bool
    """Free gathered weights after the forward and gather them again for the backward."""
    reduce_each: bool
    """Sum gradients over the processes after every micro-batch, not once per step."""


@dataclass(slots=True, kw_only=True)
class NoTeacher:
    """Train on the loss of the task alone."""

    name: Literal["none"] = "none"


@dataclass(slots=True, kw_only=True)
class Distillation:
    """Imitate a teacher: the loss of an item is (1-w)·CE + w·T²·KL(teacher‖student)."""

    name: str
    weight: Annotated[float, "[0, 1]"]
    """w."""
    temperature: Annotated[float, "> 0"]
    """T: the KL is that of the softmax of both logits divided by it."""


@dataclass(slots=True, kw_only=True)
class OwnTeacher(Distillation):
    """The teacher is the checkpoint that training starts from."""

    name: Literal["self"]


@dataclass(slots=True, kw_only=True)
class OtherTeacher(Distillation):
    """The teacher is another run or checkpoint."""

    name: Literal["checkpoint"]
    path: str | None
    """Run directory, checkpoint, Hugging Face checkpoint or its name on the hub."""

    def problems(self) -> Problems:
        if not self.path:
            yield "path", f"must name a run or a checkpoint, got {self.path!r}"


@dataclass(slots=True, kw_only=True)
class Tracker:
    """Mirrors of metrics.jsonl; a failing mirror never stops a run."""

    name: str
    """Name of the file; the other keys decide."""
    mode: Literal["online", "offline", "disabled"]
    """Weights & Biases: online needs a login, offline neither account nor network."""
    project: str
    entity: str | None
    tensorboard: bool
    """Also write TensorBoard event files."""
    group: str | None = None
    """W&B group, at most 128 characters; its parts between slashes become tags."""
    job_type: str | None = None
    """W&B job type, at most 64 characters; None: train, or finetune with ``init.path``."""
    tags: list[str] = field(default_factory=list)
    """Further W&B tags, at most 64 characters each."""

    def problems(self) -> Problems:
        """Yield names that W&B refuses as (key, message)."""
        for key, text, most in (
            ("group", self.group, 128),
            ("job_type", self.job_type, 64),
            *(("tags", tag, 64) for tag in self.tags),
        ):
            if text is not None and not 0 < len(text) <= most:
                yield key, f"must have 1 to {most} characters, got {len(text)}"


GROUPS: dict[str, dict[str, type]] = {
    group: {name: cls for cls in classes for name in get_args(get_type_hints(cls)["name"])}
    for group, classes in {
        "schedule": (Decay, Warmup, StableDecay, Triangle),
        "precision": (Precision, SinglePrecision, ScaledPrecision, SimulatedFP8, TensorCoreFP8),
        "parallel": (Parallel, DataParallel, FullySharded),
        "teacher": (NoTeacher, OwnTeacher, OtherTeacher),
    }.items()
}
"""Group -> name -> dataclass of this file."""

REGISTERED = {
    "model": ("model", "family"),
    "task": ("task", "name"),
    "data": ("source", "source"),
    "sparsity": ("method", "name"),
    "optim": ("optimizer", "name"),
}
"""Group -> (registry kind, key that names the implementation); its class has an ``Options``."""


def key_of(group: str) -> str:
    """Return the key that names the implementation of a group."""
    return REGISTERED.get(group, ("", "name"))[1]


def options_of(group: str, name: str) -> Any:
    """Return the options dataclass of a group's implementation."""
    if group in REGISTERED:
        return registry.options_of(REGISTERED[group][0], name)
    if name not in GROUPS[group]:
        raise ConfigError(f"unknown {group} {name!r}{registry.suggestion(name, GROUPS[group])}")
    return GROUPS[group][name]
