"""Dry run: coverage, costs and problems of a run before it starts.

Models are traced on the meta device: no data, no memory, no directory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsepretrain import registry
from sparsepretrain.config import freeze
from sparsepretrain.config.groups import SimulatedFP8
from sparsepretrain.config.schema import Run, shares
from sparsepretrain.console import Console, clock, count, significant
from sparsepretrain.errors import ConfigError
from sparsepretrain.optim import build_optimizer
from sparsepretrain.runs import weights
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.sparsity.method import Method
from sparsepretrain.sparsity.operand_table import W
from sparsepretrain.tasks import Task, build_task
from sparsepretrain.tracking.wandb import check_login
from sparsepretrain.training.assembly import (
    META,
    build_model,
    layer_inputs,
    load_initial,
    sparsify_model,
)
from sparsepretrain.training.compilation import COMPILED_FROM, blocks, scope_of
from sparsepretrain.training.cost import matmul_flops
from sparsepretrain.training.fixed_masks import require_fixed_mask, require_rule
from sparsepretrain.training.hardware import peak_flops
from sparsepretrain.training.precision import compute_dtype, describe
from sparsepretrain.training.reach import require_reach, steps_to_zero
from sparsepretrain.training.resume import begins_anew
from sparsepretrain.training.schedules import learning_rate, warmup_steps
from sparsepretrain.training.session import Session
from sparsepretrain.training.teacher import FoundTeacher, find_teacher
from sparsepretrain.training.tracing import StepCost, step_cost
from sparsepretrain.training.world import World

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

FILLED = 0.8
"""Share of a device's memory up to which a larger micro-batch is proposed: the estimate leaves out
the CUDA context, fragmentation and temporary results."""

READ_AT_MOST = 2**30
"""Sparse weights up to which a dry run reads them, 4 GiB; the start of a run reads all."""

PHASES = ("at", "until", "clipping", "dense_tail", "window")
"""Options of methods that say when a run trains sparse."""


def dry_run(run: Run, console: Console) -> None:
    """Print coverage, parameters, FLOPs, the bound of the speed-up, memory and steps of ``run``."""
    check_login(run.tracker)
    require_a_sparse_step(run)
    warn_of_random_weights(run, console.warn)
    device = World.single(run.parallel.device).device
    task = _task_with_metrics(run)
    teacher = find_teacher(run, console.warn)
    model = build_model(task, META)
    cost = step_cost(run, task, model)
    flops = cost.flops
    every = flops + (0 if teacher is None else teacher.flops)
    saved = cost.saved
    items = cost.items
    inputs = layer_inputs(run, task, model)
    sparsifier = sparsify_model(run, task, model, device)
    require_fixed_mask(run, sparsifier, sharded=run.parallel.name == "fsdp")
    if begins_anew(run):
        require_rule(run)
        if run.init.path:
            weights.find(run.init.path, console.warn)
    coverage = sparsifier.coverage()
    console.info(str(coverage))
    method = sparsifier.method
    policy = method.follows_policy
    when = ", in evaluation alone" if method.dense_training else ""
    when = ", after the last step" if method.prunes_at_end else when
    passes = "two forwards without a backward" if policy else "forward and backward"
    micro_batches = run.batch.size // run.batch.micro
    matmuls = matmul_flops(run, sparsifier, inputs, every)
    parameters = coverage.total_parameters
    each, other = bytes_per_entry(run, sparsifier)
    averages = 0 if run.ema is None else 4 * parameters
    entries = coverage.sparse_parameters, parameters - coverage.sparse_parameters
    sparse = entries[0] * sum(each)
    others = entries[1] * sum(other) + averages
    trained = BytesPerEntry(4, 4, moments(run, method)[1], other.operands)
    dense = sum(entries) * sum(trained) + averages + saved
    kept = (each.weight + each.moments + each.masks, other.weight + other.moments)
    stored = averages + sum(n * own for n, own in zip(entries, kept, strict=True))
    shards = shard_memory(run, model, sparsifier, others + sparse - entries[1] * other.operands)
    state = others + sparse if shards is None else sum(shards)
    if teacher is not None:
        state += 4 * teacher.parameters / (run.nproc if shards is not None else 1)
    on_gpu = device.type == "cuda"
    device_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
    rows = [
        ("run directory", str(freeze.run_directory(run))),
        ("parameters", f"{parameters:,} ({parameters / 1e6:.1f}M)"),
        (
            "sparse",
            f"{coverage.sparse_parameters:,} in {len(coverage.layers)} layers, {coverage.title}; "
            f"matmuls with an N:M operand: {', '.join(coverage.row.sparse) or 'none'}{when}",
        ),
        (
            f"FLOPs per {task.unit[:-1]}",
            f"{count(flops / items)}, {passes}, counted dense",
        ),
        *matmuls.rows(),
        (
            "memory estimate",
            f"{size(others + sparse)}: {size(sparse)} sparse weights ({sum(each):.1f} bytes per "
            f"weight), {size(others)} others, "
            f"with gradients, moments{' and averages' if averages else ''}"
            f"\n{size(saved)} activations per micro-batch ({run.batch.micro})"
            f"\n{size(others + sparse + saved)} together, "
            f"{(others + sparse + saved) / dense:.3f} times as much as a dense run",
        ),
        ("checkpoint", f"{size(stored)}: weights, moments{' and averages' if averages else ''}"),
        *teacher_rows(teacher, flops),
        *shard_rows(run, shards),
        *reach_rows(run, sparsifier, task),
        (
            "steps",
            f"{run.steps:,} of {run.batch.size} samples in {micro_batches} "
            f"micro-batch{'' if micro_batches == 1 else 'es'}; {count(items * run.steps)} "
            f"{task.unit} in all",
        ),
        ("precision, device", f"{describe(run.precision)}, {device}"),
        ("compute", duration(run, device, every * run.steps)),
        *compile_rows(run, device, cost),
        *micro_rows(run, model, cost, state, device_bytes),
    ]
    console.table(f"{run.name} (dry run)", rows)


def compile_rows(run: Run, device: torch.device, cost: StepCost) -> list[tuple[str, str]]:
    """Return what ``compile=auto`` comes to on a GPU; else no rows."""
    if run.compile != "auto" or device.type != "cuda":
        return []
    seconds = cost.eager_seconds(run, run.nproc)
    why = f"about {clock(math.ceil(seconds))} of training; blocks from {clock(COMPILED_FROM)} on"
    if run.probe:
        why = "probes need blocks that are not compiled"
    return [("compile", f"auto: {scope_of(run, device, seconds).mode} ({why})")]


def teacher_rows(teacher: FoundTeacher | None, flops: float) -> list[tuple[str, str]]:
    """Return the line about a teacher; ``flops``: of a step of the student."""
    if teacher is None:
        return []
    text = (
        f"{teacher.source.path}: {teacher.parameters / 1e6:.1f}M parameters, "
        f"{size(4 * teacher.parameters)} in addition; its forward adds "
        f"{teacher.flops / flops:.0%} to the FLOPs of a step"
    )
    return [("teacher", text)]


def reach_rows(run: Run, sparsifier: Sparsifier, task: Task) -> list[tuple[str, str]]:
    """Return the line about weights that the end prunes; else no rows.

    Raises:
        ConfigError: the steps cannot move them to zero.
    """
    steps = steps_to_zero(run, sparsifier)
    if steps is None:
        return []
    layers = sparsifier.layers
    if sum(layer.weight.numel() for layer in layers.values()) > READ_AT_MOST:
        text = f"Σ lr·α = {significant(steps)}; the start of the run compares it with the weights"
        return [("pruned at the end", text)]
    model = build_model(task, torch.device("cpu"))
    if run.init.path:
        source = weights.find(run.init.path, lambda line: None)
        load_initial(source, run, task, model, Console.silent())
    drawn = dict(model.named_parameters())
    initial = {name: drawn[layer.parameter_name] for name, layer in layers.items()}
    reach = require_reach(run, sparsifier, initial)
    return [("pruned at the end", f"{reach} of what the first masks prune")]


class ShardMemory(NamedTuple):
    """Bytes of a rank of ``parallel=fsdp``, by formula."""

    own: float
    """Its shards of weights, gradients, moments and operands."""
    gathered: float
    """Operands outside blocks, gathered for the whole forward."""
    block: float
    """Operands of the largest block."""
    gradients: float
    """Gradients of whole weights between micro-batches; 0 if they are reduced in each."""


def shard_memory(
    run: Run, model: nn.Module, sparsifier: Sparsifier, state: float
) -> ShardMemory | None:
    """Return the memory of a rank whose ``state`` bytes are sharded; None: it is not."""
    processes = run.nproc
    if run.parallel.name != "fsdp" or processes == 1:
        return None
    width = compute_dtype(run.precision).itemsize
    twice = set()  # weights whose B is gathered too
    if sparsifier.method.sparse_row.has_two_weights():
        twice = {layer.weight for layer in sparsifier.layers.values()}

    def entries(module: nn.Module) -> int:  # that are gathered for a forward
        return sum(p.numel() * (2 if p in twice else 1) for p in module.parameters())

    each = [entries(block) for block in blocks(model)]
    whole = entries(model)
    accumulates = run.batch.size > run.batch.micro * processes and not run.parallel.reduce_each
    parameters = sum(p.numel() for p in model.parameters())
    return ShardMemory(
        own=state / (processes // run.parallel.replicas),
        gathered=width * (whole - sum(each)),
        block=width * max(each, default=0),
        gradients=max(4, width) * parameters * accumulates,
    )


def shard_rows(run: Run, memory: ShardMemory | None) -> list[tuple[str, str]]:
    """Return the lines about a rank of ``parallel=fsdp``; else no rows."""
    if memory is None:
        return []
    replicas = run.parallel.replicas
    copies = f" in each of {replicas} replicas" if replicas > 1 else ""
    text = (
        f"{size(memory.own)}: 1/{run.nproc // replicas} of the above{copies}"
        f"\n{size(memory.gathered)} gathered for the whole forward, "
        f"{size(memory.block)} for a block"
    )
    if memory.gradients:
        text += f"\n{size(memory.gradients)} gradients, which parallel.reduce_each=true frees"
    return [("memory per process", text)]


def micro_rows(
    run: Run, model: nn.Module, cost: StepCost, state: float, device_bytes: int | None
) -> list[tuple[str, str]]:
    """Propose a larger ``batch.micro`` where one fits; else no rows.

    Casts of weights and sums of gradients recur in every micro-batch: by arithmetic, 32 instead of
    8 samples give GPT-2 124M 9 % more tokens per second on an H100, 64 instead of 16 give Llama 1B
    18 %.

    Args:
        run: the checked configuration.
        model: says if BatchNorm depends on the micro-batch.
        cost: of a step of ``run``.
        state: bytes of a rank besides activations.
        device_bytes: memory of the device; None: unknown.
    """
    if device_bytes is None:
        return []
    before = run.batch.micro
    # the loss needs the gradient of the logits, and another copy of them while it computes it
    sample = (cost.saved + 2 * cost.largest) / before

    def fits(micro: int) -> bool:
        larger = dataclasses.replace(run, batch=dataclasses.replace(run.batch, micro=micro))
        divides = run.batch.size % micro == 0 and not any(shares(larger, run.nproc))
        return divides and state + sample * micro <= FILLED * device_bytes

    most = run.batch.size // run.nproc
    best = next((micro for micro in range(most, before, -1) if fits(micro)), None)
    if best is None:
        return []
    casts = compute_dtype(run.precision).itemsize < 4
    work = "weights are cast and gradients summed" if casts else "gradients are summed"
    text = (
        f"{before} → {best} fits: {work} {best / before:.3g} times less often (estimate "
        f"{size(state + sample * best)} of {size(device_bytes)}), in another run directory"
    )
    if isinstance(run.precision, SimulatedFP8):
        text += "; fp8 scales change"
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        text += "; batches of BatchNorm change"
    return [("batch.micro", text)]


def check(run: Run) -> None:
    """Refuse problems that only a built model shows, without data or memory."""
    check_login(run.tracker)
    require_a_sparse_step(run)
    device = World.single(run.parallel.device).device
    task = _task_with_metrics(run)
    sparsifier = sparsify_model(run, task, build_model(task, META), device)
    require_fixed_mask(run, sparsifier, sharded=run.parallel.name == "fsdp")
    find_teacher(run, lambda line: None)


def _task_with_metrics(run: Run) -> Task:
    """Build the task; raise an error if the metrics of its evaluations need a missing package."""
    task = build_task(run)
    if run.eval.batches != 0:
        task.require_metrics()
    return task


def size(number: float) -> str:
    """Bytes, such as ``1.50 GiB``."""
    unit, power = next(((u, p) for u, p in UNITS if number >= p), UNITS[-1])
    return f"{number / power:.2f} {unit}"


def peak_items(session: Session) -> float | None:
    """Items per second at the dense peak of all ranks' devices; None where no peak is known."""
    peak = peak_flops(session.device, session.run.precision.name)
    if peak is None or session.setup.cost is None:
        return None
    return peak * session.world.size * session.setup.cost.items / session.setup.cost.flops


def duration(run: Run, device: torch.device, total: float) -> str:
    """Return the time of ``total`` FLOPs in words."""
    text = count(total)
    work = f"{text.rstrip('kMGTPEZ')} {text.lstrip('0123456789.')}FLOPs in all, counted dense"
    peak = peak_flops(device, run.precision.name)
    if peak is None:
        return f"{work}; no time, since no peak is known for this device and precision"
    seconds = total / peak / 0.4
    return f"{work}; {clock(math.ceil(seconds))} at 40% MFU"


class BytesPerEntry(NamedTuple):
    """Memory of one entry of a weight, in bytes."""

    weight: float
    gradient: float
    moments: float
    """The optimizer's state."""
    operands: float
    """A(W) and B(W) in the dtype of the matmuls; of a dense weight the cast that autocast keeps."""
    masks: float = 0.0
    """The mask that flips are counted against, packed: one bit."""


def bytes_per_entry(run: Run, sparsifier: Sparsifier) -> tuple[BytesPerEntry, BytesPerEntry]:
    """Return bytes per entry of a sparse and of a dense weight, by formula.

    Both have 4 bytes of weight, 4 of gradient and the moments; where weights are frozen, gradient
    and moments are those of the method's Parameters, such as logits. Numbers that a method keeps
    per weight count as weights. A(W) is stored where it is not W itself, B(W) where it is not A(W),
    each in the dtype of the matmuls. Masks that some methods keep in addition (1/8 byte each) are
    left out: less than 1 % of the sum. With Muon dense weights count as those of AdamW, also in
    blocks.
    """
    method = sparsifier.method
    width = compute_dtype(run.precision).itemsize
    fp8 = isinstance(run.precision, SimulatedFP8)
    cast = width if width < 4 else 0
    in_block, elsewhere = moments(run, method)
    stored = (method.sparse_row.A != W or fp8) + method.sparse_row.has_two_weights()
    operands = stored * (1 if fp8 else width) if stored else cast
    layers = sparsifier.layers.values()
    entries = sum(layer.weight.numel() for layer in layers)
    weight = 4.0
    for layer in layers:
        for buffer in layer.sparsity.buffers():
            if buffer.is_floating_point() and buffer.numel() == layer.weight.numel():
                weight += buffer.nbytes / entries
    dense = BytesPerEntry(4, 4, elsewhere, cast)
    if method.trains != "model":
        dense = BytesPerEntry(4, 0, 0, cast)
    if method.trains == "method":
        learned = sum(p.numel() for layer in layers for p in layer.sparsity.parameters())
        own = learned / entries
        return BytesPerEntry(weight + 4 * own, 4 * own, in_block * own, operands, 1 / 8), dense
    return BytesPerEntry(weight, 4, in_block, operands, 1 / 8), dense


def moments(run: Run, method: Method) -> tuple[float, float]:
    """Bytes that the optimizer keeps per entry of a weight in a block, and of another weight."""
    weights = nn.ModuleDict({"block": nn.Sequential(nn.Linear(64, 64)), "other": nn.Linear(64, 64)})
    optimizer = build_optimizer(weights, run.optim, method.build_optimizer)
    for parameter in weights.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    def size_of(weight: Tensor) -> float:
        state = optimizer.state[weight].values()
        sizes = [value.nbytes for value in state if isinstance(value, Tensor) and value.dim()]
        return sum(sizes) / weight.numel()

    found = [p for p in weights.parameters() if p.dim() == 2]
    return size_of(found[0]), size_of(found[1])


def warn_of_random_weights(run: Run, warn: Callable[[str], None]) -> None:
    """Warn if a run learns masks of weights that stay as they are, and those are random."""
    name = run.sparsity.name
    implementation: type[Method] = registry.get("method", name)
    if run.init.path is None and implementation.trains != "model":
        warn(
            f"sparsity={name} learns masks of weights that stay as they are, and this run starts "
            "from random ones: start from a trained model with `sparsepretrain finetune RUN …`"
        )


def require_a_sparse_step(run: Run) -> None:
    """Refuse a sparse method whose phases leave no step of the run in which it is sparse."""
    implementation: type[Method] = registry.get("method", run.sparsity.name)
    try:
        method = implementation(run.sparsity, run.steps)
    except ConfigError as error:
        raise error.under("sparsity") from error
    if not method.sparse_row.sparse:
        return  # a dense baseline
    if method.dense_training and not method.prunes_at_end:
        return  # evaluation is N:M from the first step on
    schedule = method.schedule
    last = int(min(run.steps, schedule.stop)) - 1
    what = "would train sparse"
    # most phases, once entered, last to the end of the window: then the first look is enough
    steps = (last, *range(schedule.start, last))
    if method.prunes_at_end:
        what = "is followed by the pruning, which the end of the run brings"
        steps = (run.steps,)
    if method.scalars:  # the optimizer decides
        if schedule.earliest <= last:
            return
    elif any(method.phase_of(step).row.sparse for step in steps):
        return
    keys = [f"sparsity.{key}" for key in PHASES if hasattr(run.sparsity, key)]
    raise ConfigError(
        f"sparsity={run.sparsity.name}: none of the {run.steps} steps {what}: change "
        f"{' or '.join(keys)}, or give more steps"
    )


def warmup_note(run: Run) -> str | None:
    """Return a line about a warm-up that is not over when the run ends; None: it is."""
    warmup = warmup_steps(run.schedule, run.steps)
    if warmup < run.steps:
        return None
    share = learning_rate(run.schedule, 1.0, run.steps - 1, run.steps)
    return (
        f"the warm-up ({warmup:,} steps) is not over when the run ends ({run.steps:,} steps): "
        f"the learning rate reaches {share:.0%} of optim.lr; lower schedule.warmup"
    )
