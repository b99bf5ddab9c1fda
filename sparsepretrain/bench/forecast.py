"""What sparse products can gain in a training step: by arithmetic, and measured on a GPU.

Arithmetic is the roofline: a product takes as long as its FLOPs at the peak or its bytes at the
bandwidth of the memory, whichever is longer; operands are made, and weights updated, as fast as
their bytes are moved. No kernel reaches these ceilings, and what lies between products is left out:
durations are lower bounds, and gains are upper bounds.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from sparsepretrain.bench.doctor import META, present_gpu
from sparsepretrain.bench.linear import durations, works_of
from sparsepretrain.config.groups import SimulatedFP8
from sparsepretrain.config.schema import Run
from sparsepretrain.kernels.cusparselt.packed24 import unsupported
from sparsepretrain.sparsity import Sparsifier, sparsify_with
from sparsepretrain.sparsity.coverage import collapsed
from sparsepretrain.sparsity.execution import EMULATE, Backend
from sparsepretrain.sparsity.execution.semi_structured import PRODUCT, objection
from sparsepretrain.sparsity.method import Row
from sparsepretrain.tasks import build_task
from sparsepretrain.tracking.console import Console, count
from sparsepretrain.training.assembly import build_model, layer_inputs, sparsify_model
from sparsepretrain.training.hardware import GPU, known_gpu
from sparsepretrain.training.plan import bytes_per_entry, size, sparse_from_the_start, step_cost
from sparsepretrain.training.precision import compute_dtype, describe, execution

WIDTH = 2
"""Bytes of an entry in fp16 and bf16."""
PACKED = 9 / 8
"""The same of a packed operand: half of the values, and where they stand."""
SPEEDS = (1.2, 1.4, 1.6, 2.0)
"""How many times faster a sparse product may be; 2 is what the hardware computes at most."""
SAMPLING = {"P": 2 * WIDTH, "U": 2 * WIDTH}
"""Bytes moved per entry to make an operand from G, be its product sparse or not."""
PACKING = {
    "A": WIDTH + PACKED,
    "B": 3 * WIDTH + PACKED,  # transposed first
    "P": WIDTH + PACKED,
    "U": 3 * WIDTH + PACKED,
}
"""Bytes moved per entry to pack it: of A and B once per step, of P and U in each micro-batch."""
SMALL = 1024
SMALL_IS_SLOW = (
    f"Measure before you rely on it: no sparse layer has more than {SMALL:,} features on both "
    "sides, and products of that size were 0.75 to 1.2 times as fast in public measurements."
)
"""1024³ in bf16: H100 PCIe 0.75, B200 0.83, A100 1.20 (github.com/bcacdwk/vllmbench, 92a8ca4)."""
ROUNDS = 15


class Product(NamedTuple):
    """A matrix product of one layer in one micro-batch."""

    name: str  # fprop, dgrad, wgrad
    operand: str  # in words
    place: str  # in the row, of the operand that is N:M; "": there is none
    why: str  # it is not sparse; "": it can be
    m: int  # rows of the operand that would be packed, k its columns
    n: int
    k: int
    passes: float  # share of a packing per micro-batch

    @property
    def sparse(self) -> bool:
        """Whether it can be."""
        return bool(self.place) and not self.why

    @property
    def flops(self) -> float:
        """As a dense product."""
        return 2.0 * self.m * self.n * self.k

    def bytes(self, packed: bool = False) -> float:
        """Read and written, each operand once."""
        own = self.m * self.k * (PACKED if packed else WIDTH)
        return own + WIDTH * self.n * (self.k + self.m)

    def seconds(self, gpu: GPU, *, sparse: bool) -> float:
        """At least, with what it takes to make the operand; a dense one is that of a dense run."""
        if not sparse:
            return max(self.flops / gpu.flops, self.bytes() / gpu.memory)
        product = max(self.flops / gpu.flops / SPEEDS[-1], self.bytes(True) / gpu.memory)
        moved = SAMPLING.get(self.place, 0) + self.passes * PACKING[self.place]
        return product + self.m * self.k * moved / gpu.memory

    def best(self, gpu: GPU) -> float:
        """What ``auto`` would choose: sparse, or dense after the same sampling."""
        sampled = self.m * self.k * SAMPLING.get(self.place, 0) / gpu.memory
        emulated = self.seconds(gpu, sparse=False) + sampled
        return min(emulated, self.seconds(gpu, sparse=True)) if self.sparse else emulated


class Layers(NamedTuple):
    """Linear layers of one size."""

    name: str
    number: int
    sizes: tuple[int, int]  # (out_features, in_features)
    inputs: tuple[int, ...]  # (…, tokens of a sample)
    products: list[Product]


class Step(NamedTuple):
    """An optimiser step of a run, as arithmetic."""

    layers: list[Layers]
    reasons: list[str]
    """Why products with an N:M operand are not sparse, of layers that are not linear too."""
    micro_batches: int
    items: int
    flops: float  # all of the step, dense
    updates: float  # bytes that the optimiser and the projections move

    @property
    def products(self) -> list[tuple[float, Product]]:
        """How often in the step, and what."""
        return [(r.number * self.micro_batches, p) for r in self.layers for p in r.products]

    @property
    def share(self) -> float:
        """Of the FLOPs, those in products that can be sparse."""
        return sum(times * p.flops for times, p in self.products if p.sparse) / self.flops

    @property
    def layer_share(self) -> float:
        """Of the FLOPs, those in linear layers that have a product that can be sparse."""
        found = [
            row.number * sum(p.flops for p in row.products)
            for row in self.layers
            if any(p.sparse for p in row.products)
        ]
        return self.micro_batches * sum(found) / self.flops

    def seconds(self, gpu: GPU) -> tuple[float, float]:
        """Of a dense step and of this one, at least."""
        counted = sum(times * p.flops for times, p in self.products)
        other = max(0.0, self.flops - counted) / gpu.flops
        other += self.updates / gpu.memory
        dense = sum(times * p.seconds(gpu, sparse=False) for times, p in self.products)
        return dense + other, sum(times * p.best(gpu) for times, p in self.products) + other


def amdahl(share: float, speed: float) -> float:
    """How much faster a step is of which a ``share`` is ``speed`` times as fast."""
    return 1 / (1 - share + share / speed)


def step_of(run: Run, device: torch.device | None = None) -> Step:
    """Trace one step on the meta device; ``device``: where it would run, None: not known."""
    task = build_task(run)
    model = build_model(task, META)
    flops, _, items = step_cost(run, task, model)
    inputs = layer_inputs(run, task, model)
    entries = sum(p.numel() for p in model.parameters())
    sparsifier = sparsify_model(run, task, model, backend=Backend("auto", device))
    row, dtype = sparsifier.method.sparse_row, compute_dtype(run.precision)
    micro_batches = run.batch.size // run.batch.micro
    found: list[Layers] = []
    reasons: list[str] = []
    weights = 0
    for name, layer in sparsifier.layers.items():
        state = layer.sparsity
        weights += layer.weight.numel()
        tokens = tuple(inputs[name][:-1])
        fits = {p: why or objection(p, tokens, dtype, state.base) for p, why in state.fits.items()}
        reasons += filter(None, fits.values())
        if layer.weight.dim() == 2:
            sizes = layer.weight.shape[1 - state.dim], layer.weight.shape[state.dim]
            products = [*_products(row, fits, sizes, torch.Size(tokens).numel(), micro_batches)]
            found.append(Layers(name, 1, sizes, tokens, products))
    each, other = bytes_per_entry(run)
    moved = [2 * (e.master + e.moments + e.state) + e.gradient + e.operands for e in (each, other)]
    return Step(
        layers=_alike(found),
        reasons=reasons,
        micro_batches=micro_batches,
        items=items,
        flops=flops,
        updates=weights * moved[0] + (entries - weights) * moved[1],
    )


def _products(
    row: Row, fits: dict[str, str], sizes: tuple[int, int], tokens: int, micro_batches: int
) -> Iterable[Product]:
    out, inner = sizes
    for name, words in row.products.items():
        place = next((place for place in fits if PRODUCT[place] == name), "")
        dims = {
            "fprop": (out, tokens, inner),
            "dgrad": (tokens, inner, out) if place == "P" else (inner, tokens, out),
            "wgrad": (out, inner, tokens),
        }[name]
        passes = 1.0 if place in SAMPLING else 1 / micro_batches
        operand = ", ".join(map(str, words))
        yield Product(name, operand, place, fits.get(place, ""), *dims, passes)


def _alike(layers: list[Layers]) -> list[Layers]:
    """Layers that have the same products as one row."""
    groups: dict[Any, list[Layers]] = {}
    for layer in layers:
        groups.setdefault((layer.sizes, layer.inputs, *layer.products), []).append(layer)
    return [
        alike[0]._replace(
            name=", ".join(name for (name,) in collapsed([[layer.name] for layer in alike])),
            number=len(alike),
        )
        for alike in groups.values()
    ]


def forecast(run: Run, console: Console, named: GPU | None = None) -> None:
    """Print what a step of ``run`` costs and what sparse products gain in it.

    Args:
        run: a checked configuration.
        console: prints.
        named: the GPU to reckon with; None: the one that is here. The one that is here is measured
            too.
    """
    device = present_gpu()
    if device is not None and named not in (None, known_gpu(torch.cuda.get_device_name(device))):
        device = None  # of the machine that is meant nothing is known but its data sheet
    gpu = named or (None if device is None else known_gpu(torch.cuda.get_device_name(device)))
    step = step_of(run, device)
    where = ", no GPU to reckon with: --gpu NAME" if gpu is None else f" on {gpu}"
    if isinstance(run.precision, SimulatedFP8) or EMULATE.unpackable(
        "A", compute_dtype(run.precision)
    ):
        gpu, where = None, ""  # data sheets are about other products
    console.info(f"\n{run.name}, {run.sparsity.name}, {describe(run.precision)}{where}\n")
    head = ["layer", "product", "operand", "m × n × k", "GFLOP", "µs dense", "µs sparse", "gain"]
    if step.layers:
        console.table("", _product_rows(step, gpu), head, lines=False)
        console.info("")
    if step.layers and gpu is not None:
        console.info(
            "µs of a layer in a micro-batch, at least; sparse: with sampling and packing; "
            "backend=auto emulates what gains nothing\n"
        )
    console.table("one optimiser step", step_rows(run, step, gpu), lines=False)
    console.info(f"\n{verdict(run, step, gpu)}")
    if device is not None and step.share:
        _measure(run, console, step, device)


def _product_rows(step: Step, gpu: GPU | None) -> list[list[str]]:
    rows = []
    for layer in step.layers:
        for index, p in enumerate(layer.products):
            cells = ["", "", ""]
            if gpu is not None:
                dense = p.seconds(gpu, sparse=False)
                cells[0] = f"{1e6 * dense:.1f}"
                if p.sparse:
                    sparse = p.seconds(gpu, sparse=True)
                    cells[1:] = f"{1e6 * sparse:.1f}", f"{dense / sparse:.2f}×"
            if not p.sparse:
                cells[1] = "emulated" if p.place else "dense"
            size_ = f"{p.m} × {p.n} × {p.k}"
            name = "" if index else layer.name
            rows.append([name, p.name, p.operand, size_, f"{p.flops / 1e9:.3g}", *cells])
    return rows


def step_rows(run: Run, step: Step, gpu: GPU | None) -> list[tuple[str, str]]:
    """What the step does, and its bounds."""
    unit = build_task(run).unit
    several = "es" * (step.micro_batches != 1)
    products = sum(times * p.bytes(p.sparse) for times, p in step.products)
    rows = [
        ("batch", f"{run.batch.size} samples in {step.micro_batches} micro-batch{several}, "
                  f"{step.items:,} {unit}"),
        ("FLOPs", f"{count(step.flops)}: {step.share:.0%} in products that can be sparse, "
                  f"{1 - step.share:.0%} in others"),
        ("bytes", f"{size(step.updates)} of optimiser and projections, "
                  f"{size(products)} of products of these layers"),
    ]  # fmt: skip
    if gpu is not None:
        dense, sparse = step.seconds(gpu)
        speed = count(step.items / sparse)
        text = f"{dense:.3g} s dense, {sparse:.3g} s with sparse products, {dense / sparse:.2f}×"
        rows.append(("at least", f"{text}; {speed} {unit}/s"))
    if step.share:
        gains = ", ".join(f"{amdahl(step.share, s):.2f}× if {s:g} times" for s in SPEEDS)
        text = f"{gains} as fast (Amdahl; {SPEEDS[-1]:g}: the hardware's limit)"
        rows.append(("if sparse products are faster", text))
    return rows


def verdict(run: Run, step: Step, gpu: GPU | None) -> str:
    """What to expect, in a sentence or two."""
    if not step.share:
        why = statistics.mode(step.reasons) if step.reasons else ""
        return f"No speed-up is to be expected: {why or f'{run.sparsity.name} has no N:M operand'}."
    most = f"{amdahl(step.share, SPEEDS[-1]):.2f}×"
    if gpu is None:
        if here := unsupported(present_gpu() or torch.device("cpu"), fp8=False):
            return f"No speed-up is to be expected here: {here}. Elsewhere it is at most {most}."
        return f"At most {most}."
    dense, sparse = step.seconds(gpu)
    if sparse >= dense:
        return (
            f"No speed-up is to be expected on {gpu.name}: sampling and packing take longer than "
            "sparse products gain."
        )
    text = f"At most {dense / sparse:.2f}× on {gpu.name}, from its data sheet."
    wide = any(min(r.sizes) > SMALL for r in step.layers if any(p.sparse for p in r.products))
    return text if wide else f"{text} {SMALL_IS_SLOW}"


def _measure(run: Run, console: Console, step: Step, device: torch.device) -> None:
    rows, sums = [], [0.0, 0.0]
    for layer in step.layers:
        if not any(p.sparse for p in layer.products):
            continue
        series = measured(run, layer, device, fresh=step.micro_batches == 1)
        dense, emulated, sparse = (statistics.median(us) for us in series.values())
        sums = [sums[0] + layer.number * dense, sums[1] + layer.number * sparse]
        ratios = [a / b for a, b in zip(series["dense"], series["sparse"], strict=True)]
        text = f"{statistics.median(ratios):.2f}×"
        rows.append([layer.name, f"{dense:.1f}", f"{emulated:.1f}", f"{sparse:.1f}", text])
    console.info("")
    head = ["layer", "µs nn.Linear", "µs emulated", "µs sparse", "gain"]
    console.table("measured, forward and backward of a micro-batch", rows, head, lines=False)
    console.info(f"\n{judge(step.layer_share, sums[0] / sums[1])}")


def judge(share: float, gain: float) -> str:
    """What measured layers, a ``share`` of the FLOPs, ``gain`` times as fast, mean for a step."""
    if gain <= 1:
        return f"No speed-up is to be expected: these layers were {gain:.2f}× as fast as dense."
    whole = f"{amdahl(share, gain):.2f}×"
    return f"These layers were {gain:.2f}× as fast as dense, a whole step is at most {whole}."


def measured(
    run: Run, layer: Layers, device: torch.device, *, fresh: bool, rounds: int = ROUNDS
) -> dict[str, Sequence[float]]:
    """Microseconds of nn.Linear and of a sparse layer, emulated and sparse, in interleaved rounds.

    Args:
        run: gives method, precision and seed; the layer is in the method's sparse phase.
        layer: its sizes and inputs.
        device: where it runs.
        fresh: whether every call projects and packs the weight, as with one micro-batch per step.
        rounds: how often each is timed.
    """
    options = sparse_from_the_start(dataclasses.replace(run.sparsity, targets="ffn"))
    dtype = compute_dtype(run.precision)

    def sparse(backend: str) -> Callable[[nn.Module], Sparsifier]:
        rest: Any = {"targets": ["*"], "total_steps": 1000, "backend": backend}
        rest["precision"] = execution(run.precision)
        return partial(sparsify_with, options=options, **rest)

    backends = {"emulated": "emulate", "sparse": "semi_structured"}
    variants = {"dense": None} | {name: sparse(backend) for name, backend in backends.items()}
    build, inputs = partial(nn.Linear, *layer.sizes[::-1]), (*layer.inputs, layer.sizes[1])
    works = works_of(build, inputs, device, variants, dtype=dtype, fresh=fresh)
    return {name: series.us for name, series in durations(works, device, rounds).items()}
