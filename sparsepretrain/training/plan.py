"""What a run would do, worked out on the meta device: no data, no memory, no directory."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sparsepretrain.config import freeze
from sparsepretrain.config.schema import Run, SimulatedFP8
from sparsepretrain.tasks import Task, build_task
from sparsepretrain.tracking.console import Console, clock, count
from sparsepretrain.tracking.wandb import check_login
from sparsepretrain.training import preflight
from sparsepretrain.training.build import build_model, pick_device, sparsify_model
from sparsepretrain.training.hardware import peak_flops
from sparsepretrain.training.memory import bytes_per_entry
from sparsepretrain.training.precision import compute_dtype, describe

GIB = 2**30
_META = torch.device("meta")


def dry_run(run: Run, console: Console | None = None) -> None:
    """Print coverage, parameters, FLOPs, memory and steps of ``run``."""
    console = console or Console()
    check_login(run.tracker)
    preflight.require_a_sparse_step(run)
    device = pick_device(run)
    task = build_task(run)
    model = build_model(run, task, _META)
    flops, saved, items = _measure(run, task, model)
    coverage = sparsify_model(run, task, model).coverage()
    console.info(str(coverage))
    items_per_step = items * run.batch.size // run.batch.micro
    parameters = sum(p.numel() for p in model.parameters())
    each, other = bytes_per_entry(run)
    averages = 4 * parameters * (run.ema is not None)
    others = (parameters - coverage.sparse_parameters) * sum(other) + averages
    sparse = coverage.sparse_parameters * sum(each)
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
        (
            "memory estimate",
            f"{(others + sparse) / GIB:.2f} GiB: {sparse / GIB:.2f} sparse weights, "
            f"{others / GIB:.2f} others, with gradients, moments{' and averages' * bool(averages)}"
            f"\n{saved / GIB:.2f} GiB activations per micro-batch ({run.batch.micro})",
        ),
        ("bytes per entry", f"{each}; others: {sum(other):.3g}"),
        (
            "steps",
            f"{run.steps:,} of {run.batch.size} samples in {run.batch.size // run.batch.micro} "
            f"micro-batches; {count(items_per_step * run.steps)} {task.unit} in all",
        ),
        ("precision, device", f"{describe(run.precision)}, {device}"),
        ("compute", duration(run, device, flops / items * items_per_step * run.steps)),
    ]
    console.table(f"{run.name} (dry run)", rows)


def flops_per_item(run: Run, task: Task) -> float:
    """FLOPs of forward and backward per item, all products counted as dense."""
    flops, _, items = _measure(run, task, build_model(run, task, _META))
    return flops / items


def step_cost(run: Run, task: Task, model: nn.Module) -> tuple[float, int]:
    """(FLOPs, items) of one optimiser step; ``model`` is on the meta device, not sparse."""
    flops, _, items = _measure(run, task, model)
    micro_batches = run.batch.size // run.batch.micro
    return flops * micro_batches, items * micro_batches


def _measure(run: Run, task: Task, model: nn.Module) -> tuple[float, float, int]:
    """(FLOPs of forward and backward, bytes saved for the backward, items) of one micro-batch.

    One sample is traced and scaled: all three are linear in the number of samples.
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
    batch = task.example(1, _META)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with counter, hooks:
        loss, items = task.loss(model, batch)
        loss.backward()
    model.zero_grad(set_to_none=True)
    width = compute_dtype(run.precision).itemsize
    return (
        float(counter.get_total_flops()) * run.batch.micro,
        sum(sizes.values()) * run.batch.micro * width / 4,
        items * run.batch.micro,
    )


def duration(run: Run, device: torch.device, total: float) -> str:
    """What ``total`` FLOPs take, in words."""
    text = count(total)
    work = f"{text.rstrip('kMGTPEZ')} {text.lstrip('0123456789.')}FLOPs in all, counted dense"
    if isinstance(run.precision, SimulatedFP8):
        return f"{work}; simulated fp8 has no peak to compare with"
    peak = peak_flops(device, run.precision.name)
    if peak is None:
        return f"{work}; no time, since no peak is known for this device"
    seconds = total / peak / 0.4
    return f"{work}; {clock(math.ceil(seconds))} at 40% MFU"
