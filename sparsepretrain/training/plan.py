"""What a run would do, known before it starts: costs, and whether it can do what it says.

Models are traced on the meta device: no data, no memory, no directory.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from sparsepretrain import registry
from sparsepretrain.config import freeze
from sparsepretrain.config.groups import SimulatedFP8
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.sparsity import MethodOptions, Sparsifier, Window
from sparsepretrain.sparsity.method import Method
from sparsepretrain.tasks import Task, build_task
from sparsepretrain.tracking.console import Console, clock, count
from sparsepretrain.tracking.wandb import check_login
from sparsepretrain.training.assembly import (
    META,
    attach_optimizer,
    build_model,
    layer_inputs,
    sparsify_model,
)
from sparsepretrain.training.compilation import blocks
from sparsepretrain.training.hardware import peak_flops
from sparsepretrain.training.precision import autocast, compute_dtype, describe
from sparsepretrain.training.schedules import learning_rate, warmup_steps
from sparsepretrain.training.speedup import matmul_flops
from sparsepretrain.training.world import World

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

SPARSE = {"at": 0.0, "until": 0.0, "clipping": (0.0, 0.0), "dense_tail": 0.0, "window": Window()}
"""Options of methods that say when a run trains sparse, with which it does from its first step."""


def dry_run(run: Run, console: Console | None = None) -> None:
    """Print coverage, parameters, FLOPs, the bound of the speed-up, memory and steps of ``run``."""
    console = console or Console()
    check_login(run.tracker)
    require_a_sparse_step(run)
    device = World.single(run.parallel.device).device
    task = build_task(run)
    model = build_model(task, META)
    flops, saved, items = step_cost(run, task, model)
    inputs = layer_inputs(run, task, model)
    sparsifier = sparsify_model(run, task, model, device)
    coverage = sparsifier.coverage()
    console.info(str(coverage))
    micro_batches = run.batch.size // run.batch.micro
    dtype = compute_dtype(run.precision)
    matmuls = matmul_flops(sparsifier, inputs, micro_batches, dtype, flops)
    parameters = sum(p.numel() for p in model.parameters())
    each, other = bytes_per_entry(run)
    averages = 4 * parameters * (run.ema is not None)
    entries = coverage.sparse_parameters, parameters - coverage.sparse_parameters
    sparse, others = entries[0] * sum(each), entries[1] * sum(other) + averages
    casts = entries[0] * each.casts + entries[1] * other.casts
    method: type[Method] = registry.get("method", "dense")
    dense = dataclasses.replace(run, sparsity=method.Options(name="dense"))
    beside = sum(entries) * sum(bytes_per_entry(dense)[1]) + averages + saved
    rows = [
        ("run directory", str(freeze.run_directory(run))),
        ("parameters", f"{parameters:,} ({parameters / 1e6:.1f}M)"),
        (
            "sparse",
            f"{coverage.sparse_parameters:,} in {len(coverage.layers)} layers, {coverage.title}; "
            f"products with an N:M operand: {coverage.sparse_products}",
        ),
        (
            f"FLOPs per {task.unit[:-1]}",
            f"{count(flops / items)}, forward and backward, counted dense",
        ),
        *matmuls.rows(),
        (
            "memory estimate",
            f"{size(others + sparse)}: {size(sparse)} sparse weights, {size(others)} others, "
            f"with gradients, moments{' and averages' * bool(averages)}"
            f"\n{size(saved)} activations per micro-batch ({run.batch.micro})"
            f"\n{(others + sparse + saved) / beside:.3f} of what a dense run needs",
        ),
        ("bytes per entry", f"{each}; others: {sum(other):.3g}"),
        *shard_rows(run, model, sparsifier, others + sparse - casts),
        (
            "steps",
            f"{run.steps:,} of {run.batch.size} samples in {micro_batches} "
            f"micro-batch{'es' * (micro_batches != 1)}; {count(items * run.steps)} "
            f"{task.unit} in all",
        ),
        ("precision, device", f"{describe(run.precision)}, {device}"),
        ("compute", duration(run, device, flops * run.steps)),
    ]
    console.table(f"{run.name} (dry run)", rows)


def shard_rows(
    run: Run, model: nn.Module, sparsifier: Sparsifier, state: float
) -> list[tuple[str, str]]:
    """What a process of ``parallel=fsdp`` holds and receives, by arithmetic; empty for others.

    Args:
        run: says how many processes there are in ``parallel.nproc``.
        model: sparse, not sharded.
        sparsifier: of it.
        state: bytes of weights, gradients, moments and operands in one process.
    """
    processes = getattr(run.parallel, "nproc", None) or 1
    if run.parallel.name != "fsdp" or processes == 1:
        return []
    replicas, again = run.parallel.replicas, 1 + run.parallel.reshard_after_forward
    shards, width = processes // replicas, compute_dtype(run.precision).itemsize
    master = max(4, width)
    twice = set()  # weights whose B is gathered too
    if sparsifier.method.two_operands:
        twice = {layer.weight for layer in sparsifier.layers.values()}

    def entries(module: nn.Module) -> int:  # that are gathered for a forward
        return sum(p.numel() * (1 + (p in twice)) for p in module.parameters())

    each, whole = [entries(block) for block in blocks(model)], entries(model)
    numbers = sum(p.numel() for p in model.parameters())
    part = 1 - 1 / shards
    gathers = again * width * whole * part
    sums = master * numbers * part
    sums += 2 * (1 - 1 / replicas) * master * numbers / shards
    micro_batches = run.batch.size // (run.batch.micro * processes)
    copies = f" in each of {replicas} replicas" if replicas > 1 else ""
    return [
        (
            "memory per process",
            f"{size(state / shards)}: 1/{shards} of the above{copies}"
            f"\n{size(width * (whole - sum(each)))} gathered for the whole forward, "
            f"{size(width * max(each, default=0))} for a block; {size(width * whole)} in "
            "evaluation",
        ),
        (
            "received per process",
            f"{size(gathers + sums)} per micro-batch, {size((gathers + sums) * micro_batches)} "
            f"per step: {size(gathers)} operands, {size(sums)} gradients",
        ),
    ]


def check(run: Run) -> None:
    """Refuse what only a built model tells, without data or memory.

    Raises:
        ConfigError: no sparse step, targets that match nothing, widths that do not fit, no GPU.
    """
    check_login(run.tracker)
    require_a_sparse_step(run)
    device = World.single(run.parallel.device).device
    task = build_task(run)
    sparsify_model(run, task, build_model(task, META), device)


def size(number: float) -> str:
    """Bytes, such as ``1.50 GiB``."""
    unit, power = next(((u, p) for u, p in UNITS if number >= p), UNITS[-1])
    return f"{number / power:.2f} {unit}"


def peak_items(run: Run, task: Task, device: torch.device) -> float | None:
    """Items per second at the dense peak of ``device``; None where no peak is known."""
    peak = peak_flops(device, run.precision.name)
    if peak is None:
        return None
    flops, _, items = step_cost(run, task, build_model(task, META))
    return peak * items / flops


def step_cost(run: Run, task: Task, model: nn.Module) -> tuple[float, float, int]:
    """FLOPs of an optimizer step, bytes that a micro-batch saves for its backward, items of a step.

    FLOPs are those of dense products. One sample is traced and scaled: all three are linear in the
    number of samples.

    Args:
        model: on the meta device, not sparse.
    """
    sizes: dict[int, int] = {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage._cdata not in parameters:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(saved)
        return saved

    alive: list[Tensor] = []  # keeps storages, and so their identities, distinct
    counter = FlopCounterMode(display=False)
    batch = task.example(1, META)
    hooks = saved_tensors_hooks(pack, lambda saved: saved)
    with counter, hooks:
        loss, items = task.loss(model, batch)
        loss.backward()
    model.zero_grad(set_to_none=True)
    width = compute_dtype(run.precision).itemsize
    return (
        float(counter.get_total_flops()) * run.batch.size,
        sum(sizes.values()) * run.batch.micro * width / 4,
        items * run.batch.size,
    )


def duration(run: Run, device: torch.device, total: float) -> str:
    """What ``total`` FLOPs take, in words."""
    text = count(total)
    work = f"{text.rstrip('kMGTPEZ')} {text.lstrip('0123456789.')}FLOPs in all, counted dense"
    if isinstance(run.precision, SimulatedFP8):
        kind = "simulated fp8" if run.precision.name == "fp8_sim" else "fp8 beside other types"
        return f"{work}; {kind} has no peak to compare with"
    peak = peak_flops(device, run.precision.name)
    if peak is None:
        return f"{work}; no time, since no peak is known for this device"
    seconds = total / peak / 0.4
    return f"{work}; {clock(math.ceil(seconds))} at 40% MFU"


class BytesPerEntry(NamedTuple):
    """Of one weight."""

    master: float
    gradient: float
    moments: float
    """The optimiser's state."""
    operands: float = 0.0
    """A and B as products read them, and what else is kept between two steps."""
    state: float = 0.0
    """Masks and scales in the state dict."""
    casts: float = 0.0
    """What autocast makes of a weight that has no operand, while a micro-batch is computed."""

    def __str__(self) -> str:
        return ", ".join(f"{v:.3g} {k}" for k, v in self._asdict().items())


def bytes_per_entry(run: Run) -> tuple[BytesPerEntry, BytesPerEntry]:
    """Of a weight while it is sparse, and of one that is not.

    Trains two small layers for a step with the method, optimiser and precision of ``run``, and
    counts what is there afterwards.
    """
    options = dataclasses.replace(sparse_from_the_start(run.sparsity), targets="ffn")
    run = dataclasses.replace(run, sparsity=options)
    width = 4 * options.m * -(-128 // options.m)  # what is one per layer or row hardly counts
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
    task = cast(Any, SimpleNamespace(roles={"ffn": ["0"]}))
    saved: list[list[Tensor]] = []  # what each layer keeps for its backward, in both steps

    def note(tensor: Tensor) -> Tensor:
        saved[-1].append(tensor)
        return tensor

    with warnings.catch_warnings():  # about the course of training, of which this is none
        warnings.simplefilter("ignore", SparsePretrainWarning)
        optimizer = attach_optimizer(run, model, sparsify_model(run, task, model))
        for step in range(2):
            y = torch.ones(8, width, requires_grad=True)
            hooks = saved_tensors_hooks(note, lambda tensor: tensor)
            with autocast(run.precision, torch.device("cpu")), hooks:
                for layer in model:
                    saved.append([])
                    y = layer(y)
            y.float().sum().backward()
            if not step:  # then the operands of the next one are there as well
                optimizer.step()
                optimizer.zero_grad()
    sparse, other = map(_count, model, saved[2:], (optimizer, optimizer))
    return sparse, other


def sparse_from_the_start(options: MethodOptions) -> MethodOptions:
    """``options`` without what says that a run trains sparse later, or not to its end."""
    phases: dict[str, Any] = {k: value for k, value in SPARSE.items() if hasattr(options, k)}
    return dataclasses.replace(options, **phases)


def _count(layer: Any, used: list[Tensor], optimizer: Optimizer) -> BytesPerEntry:
    """``used``: what the layer saved for its backward."""
    weight = layer.weight
    saved = {t.untyped_storage()._cdata for t in layer.state_dict().values()}
    shared = {id(layer.sparsity.model)} if hasattr(layer, "sparsity") else set()
    kept = [t for t in tensors(layer, shared) if t is not weight]
    found = [
        [weight],
        [weight.grad],
        [*tensors(optimizer.state[weight])],
        [t for t in kept if t.untyped_storage()._cdata not in saved],
        [t for t in kept if t.untyped_storage()._cdata in saved],
    ]
    there = {t.untyped_storage()._cdata for part in found for t in part}
    casts = [t for t in used if t.numel() == weight.numel()]
    found.append([t for t in casts if t.untyped_storage()._cdata not in there])
    return BytesPerEntry(*(_bytes(part) / weight.numel() for part in found))


def tensors(value: Any, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors that ``value`` holds: in containers, modules and objects of this package."""
    seen = set() if _seen is None else _seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif type(value).__module__.partition(".")[0] in ("sparsepretrain", "torch"):
        slots = getattr(type(value), "__slots__", ())
        inner = [*getattr(value, "__dict__", {}).values(), *(getattr(value, s, 0) for s in slots)]
    for part in inner:
        yield from tensors(part, seen)


def _bytes(found: list[Tensor]) -> int:
    """Of all storages, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


def require_a_sparse_step(run: Run) -> None:
    """Refuse a sparse method whose phases leave no step of the run in which it is sparse.

    Raises:
        ConfigError: names the options that decide.
    """
    implementation: type[Method] = registry.get("method", run.sparsity.name)
    try:
        method = implementation(run.sparsity, run.steps)
    except ConfigError as error:
        raise error.under("sparsity") from error
    if not method.sparse_row.sparse:
        return  # a dense baseline
    last = int(min(run.steps, method.window[1])) - 1
    # most phases, once entered, last to the end of the window: then the first look is enough
    if any(map(method.may_be_sparse, (last, *range(method.window[0], last)))):
        return
    keys = [key for key in SPARSE if hasattr(run.sparsity, key)]
    raise ConfigError(
        f"sparsity={run.sparsity.name}: none of the {run.steps} steps would train sparse: change "
        f"{' or '.join(f'sparsity.{key}' for key in keys)}, or give more steps"
    )


def notes(run: Run) -> list[str]:
    """What a run does that its length makes unlikely to be meant, one line each."""
    found = []
    warmup = warmup_steps(run.schedule, run.steps)
    if warmup >= run.steps:
        share = learning_rate(run.schedule, 1.0, run.steps - 1, run.steps)
        found.append(
            f"the warm-up ({warmup:,} steps) is not over when the run ends ({run.steps:,} steps): "
            f"the learning rate reaches {share:.0%} of optim.lr; lower schedule.warmup"
        )
    if run.eval.batches != 0 and not run.eval.every:
        found.append("one evaluation only, at the end: eval.every=0")
    return found
