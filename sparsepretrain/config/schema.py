"""Schema of a run. Field names are the keys a user types; YAML files list all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from sparsepretrain import registry
from sparsepretrain.config.groups import NoTeacher, Tracker
from sparsepretrain.errors import Problems
from sparsepretrain.files import is_plain_name

MOST_STEPS = 10**9
"""Most steps of a run, and most passes over its data."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """Samples per optimizer step and per forward: sequences, images, or buckets of pairs."""

    size: Annotated[int, "[1, 2^24]"]
    """Global batch: samples per optimizer step."""
    micro: Annotated[int, "[1, 2^24]"]
    """Samples per forward and backward on one device; divides ``size``."""

    def problems(self) -> Problems:
        if self.micro > 0 and self.size % self.micro:
            yield "micro", f"must divide batch.size ({self.size}), got {self.micro}"


@dataclass(slots=True, kw_only=True)
class EvalOptions:
    """Evaluation on the validation split, with the weights that the method evaluates with."""

    every: Annotated[int, "≥ 0"]
    """Optimizer steps between evaluations; 0: only at the end."""
    batches: Annotated[int | None, "≥ 0"]
    """Micro-batches per evaluation, always the same ones; null: the whole split; 0: none."""


@dataclass(slots=True, kw_only=True)
class Log:
    """Intervals of records in optimizer steps."""

    every: Annotated[int, "> 0"]
    """Loss, learning rate, gradient norm, flip rate, tokens/s."""
    layers_every: Annotated[int, "≥ 0"]
    """Flip rate and L1 gap of each layer; 0: never."""
    masks_every: Annotated[int, "≥ 0"]
    """Packed masks into masks/; 0: never."""


@dataclass(slots=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints; the last step is always saved."""

    every: Annotated[int, "≥ 0"]
    """Optimizer steps between checkpoints; 0: only at the end and on a signal."""
    keep_last: Annotated[int, "> 0"]
    """Valid checkpoints kept; older ones are removed."""
    keep_every: Annotated[int, "≥ 0"]
    """Checkpoints at multiples of this step count are never removed; 0: none."""
    keep_best: Annotated[int, "≥ 0"]
    """Number of checkpoints with the lowest validation loss to keep too; 0: none."""
    background: bool
    """true: copy the state to host memory and write it in a thread."""


@dataclass(slots=True, kw_only=True)
class Init:
    """Source of the initial weights; set by the verb ``finetune``."""

    path: str | None = None
    """Run directory, checkpoint or Hugging Face checkpoint; null: drawn from the seed."""
    weights: Literal["auto", "master", "projected"] = "auto"
    """Stored or evaluated weights of the source; auto: stored for the same method, else evaluated,
    which keeps the function of the model."""
    mask: str = "magnitude"
    """Fixed masks of asp (at=0) and slope. magnitude: the largest; zeros: the present non-zeros,
    which may be fewer than N; wanda: by calibration on the training data; else the path of masks
    that the verb ``prune`` wrote."""

    def problems(self) -> Problems:
        """Yield range errors as (key, message)."""
        if self.mask in ("zeros", "wanda") and self.path is None:
            yield "mask", f"must be magnitude or a file if init.path is null, got {self.mask}"


@dataclass(slots=True, kw_only=True)
class Run:
    """Root of a resolved configuration."""

    name: str
    """Directory under runs_dir."""
    seed: Annotated[int, "[0, 2^63)"]
    """Seed of initial weights, data order and all random draws."""
    steps: Annotated[int, "[0, 10^9]"]
    """Optimizer steps; 0: ``epochs`` decides."""
    epochs: Annotated[float | None, "(0, 10^9]"]
    """Passes over the training data, used when ``steps`` is 0; null: steps decides."""
    runs_dir: str
    resume: str
    """auto: continue from the newest valid checkpoint of this run; never; or a checkpoint path."""
    plugins: list[str]
    """Method files (.py) or modules to import first."""
    batch: Batch
    eval: EvalOptions
    log: Log
    checkpoint: CheckpointOptions
    clip: Annotated[float | None, "> 0"]
    """Global gradient norm; null: no clipping."""
    ema: Annotated[float | None, "(0, 1)"]
    """Decay per step of averaged weights, which are evaluated too (ema_*); null: none."""
    workers: Annotated[int, "≥ 0"]
    """Processes that prepare batches; 0: the training process prepares them."""
    init: Init = field(default_factory=Init)
    compile: Literal["auto", "none", "blocks", "model"]
    """Scope of torch.compile; auto: blocks on a GPU for runs of more than three minutes, else none;
    model: all in one."""
    activation_checkpointing: bool
    """Keep only the inputs of blocks and compute the rest again in the backward: less memory, about
    a third more FLOPs."""
    sparse_matmuls: Literal["emulate", "semi_structured", "auto"] = "emulate"
    """Matmuls of 2:4 operands: dense (emulate), sparse, or the faster of both (auto)."""
    deterministic: bool = False
    """Use deterministic algorithms only; slower, and not available for every GPU operation."""
    guard: Literal["stop", "skip", "spike"]
    """Non-finite loss or gradient: stop with exit code 5, or skip the step and count it; spike also
    skips a loss or gradient norm far above those of earlier steps."""
    model: Any
    task: Any
    data: Any
    sparsity: Any
    optim: Any
    schedule: Any
    precision: Any
    parallel: Any
    tracker: Tracker
    probe: dict[str, Any] = field(default_factory=dict)
    """Name of a probe -> its options; probes do not change training."""
    teacher: Any = field(default_factory=NoTeacher)
    experiment: str | None = None
    """Name of the experiment file, if one was chosen."""

    @property
    def nproc(self) -> int:
        """Number of processes that ``parallel.nproc`` asks for, 1 if it is null."""
        return getattr(self.parallel, "nproc", None) or 1

    @property
    def plain(self) -> dict[str, Any]:
        """A fresh dict of plain values, defaults included; tuples are lists, as in YAML."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def problems(self) -> Problems:
        if self.steps == 0 and self.epochs is None:
            yield "steps", "must be > 0, or give epochs"
        if not self.runs_dir:
            yield "runs_dir", "must name a directory, got ''"
        if not is_plain_name(self.name):
            shown = self.name if len(self.name) <= 60 else f"{self.name[:60]}…"
            yield "name", f"must be a plain directory name of at most 200 bytes, got {shown!r}"
        if getattr(self.teacher, "name", "none") == "self" and self.init.path is None:
            yield (
                "teacher",
                "expected none or checkpoint if init.path is null, got self: nothing to imitate",
            )
        yield from self._kept()
        yield from _fitting(self)
        if self.parallel is not None:
            yield from shares(self, self.nproc)
        yield from self._sharded()

    def _sharded(self) -> Problems:
        """Yield settings that do not work with ``parallel=fsdp``."""
        if getattr(self.parallel, "name", "") != "fsdp":
            return
        if self.compile == "model":
            yield "compile", "expected auto, none or blocks with parallel=fsdp, got model"
        precision = getattr(self.precision, "name", "fp32")
        if precision in ("fp16", "fp8", "fp8_sim"):
            yield "precision", f"must be fp32, bf16 or fp64 with parallel=fsdp, got {precision}"
        if getattr(self.optim, "name", "") == "muon":
            yield "optim", "must not be muon with parallel=fsdp, which shards matrices: use ddp"
        if self.probe:
            names = ", ".join(self.probe)
            yield "probe", f"needs whole weights, got {names}: use parallel=single or ddp"

    def _kept(self) -> Problems:
        """Yield rules for kept checkpoints that no checkpoint can match."""
        every = self.checkpoint.every
        keep = self.checkpoint
        if keep.keep_every and (not every or keep.keep_every % every):
            must = f"must be a multiple of checkpoint.every ({every})"
            yield "checkpoint.keep_every", f"{must}, got {keep.keep_every}"
        evaluated = self.eval.every and self.eval.batches != 0
        if keep.keep_best and not (every and evaluated and every % self.eval.every == 0):
            needs = "needs an evaluation at every checkpoint"
            yield "checkpoint.keep_best", f"{needs}: make checkpoint.every a multiple of eval.every"


def shares(run: Run, processes: int) -> Problems:
    """Yield reasons why ``processes`` cannot split the global batch evenly."""
    size = run.batch.size
    micro = run.batch.micro
    if micro <= 0 or size % micro:
        return  # reported by Batch
    if size % (micro * processes):
        fitting = f"; set batch.micro={size // processes}" if size % processes == 0 else ""
        text = f"must be a multiple of batch.micro·{processes} processes, got {size}{fitting}"
        yield "batch.size", text
    elif processes > 1 and processes % (replicas := getattr(run.parallel, "replicas", 1)):
        yield "parallel.replicas", f"must divide the {processes} processes, got {replicas}"
    elif getattr(run.parallel, "reduction", "fast") == "tree":
        counts = {"processes": processes, "micro-batches (batch.size / batch.micro)": size // micro}
        for what, count in counts.items():
            if count & (count - 1):
                text = f"tree needs a power of two of {what}, got {count}: use fast"
                yield "parallel.reduction", text


def _fitting(run: Run) -> Problems:
    """Yield conflicts between model, task and data."""
    if run.model is None or run.task is None or run.data is None:  # rejected before
        return
    task: Any = registry.get("task", run.task.name)
    source: Any = registry.get("source", run.data.source)
    if source.kind != task.kind:
        has = f"{run.data.name} has {source.kind}"
        yield "data", f"{has}, but task={run.task.name} needs {task.kind}"
    else:
        yield from task.conflicts(run.task, run.model, run.data)
