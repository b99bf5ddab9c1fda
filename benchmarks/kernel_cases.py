"""Cases of all kernels: inputs, memory traffic, baselines.

`kernels.py` times the cases on a GPU. Tests add untimed variants
(`tests/support/kernel_variants.py`),
compile the kernels of every case, and on a GPU compare them with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparsepretrain import kernels

FP32, BF16 = torch.float32, torch.bfloat16
NAMES = {FP32: "fp32", BF16: "bf16"}
Shape = tuple[int, int]
Make = Callable[[Shape, torch.device], tuple[Any, ...]]
WEIGHTS: dict[str, Shape] = {
    "GPT-2 124M": (3072, 768),
    "4096²": (4096, 4096),
    "LLaMA 7B": (11008, 4096),
}
"""(out_features, in_features) of feed-forward weights."""
TOKENS: dict[str, Shape] = {"GPT-2 124M": (16384, 3072), "LLaMA 7B": (16384, 11008)}
"""(tokens, features) of gradients and activations."""
TINY: Shape = (64, 256)
ALL, ONE = (80, 90, 100), (90,)
"""Architectures that a case is compiled for; variants of a kernel need one."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Operation with one pattern, dtype and layout."""

    name: str
    make: Make
    """Returns random inputs, equal for all implementations."""
    run: Callable[..., Any]
    """Public function as ``run(backend, *inputs)``."""
    bytes: float = 0.0
    """Memory traffic of an ideal kernel, per element of the shape."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Shapes that `kernels.py` times on a GPU."""
    goal: float | None = None
    """Fraction of a device copy's bandwidth."""
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Baselines to compare with, called as ``other(*inputs)``."""
    tolerance: float = 0.0
    """Largest error relative to the largest value; 0: the reference's bits."""
    architectures: tuple[int, ...] = ALL
    """Architectures to compile for."""
    offline: Shape = (1024, 4096)
    """Shape to compile for; a multiple of every tile."""
    refused: tuple[int, ...] = ()
    """Architectures that cannot run it: compiling must fail there."""


def kernel_cases() -> list[KernelCase]:
    """Return all cases, in the order of a training step."""
    parts = hard_masks, soft_thresholds, transposable, masks, noise, mvue
    return [case for part in (*parts, pruned_gradients, gates, fp8) for case in part()]


def op(name: str, *args: Any, named: tuple[str, ...] = (), **options: Any) -> Callable[..., Any]:
    """Return the public function ``name``; ``named``: keywords of the last inputs."""

    def run(backend: str | None, *inputs: Any) -> Any:
        split = len(inputs) - len(named)
        keywords = dict(zip(named, inputs[split:], strict=True)) | options
        return getattr(kernels, name)(*inputs[:split], *args, **keywords, backend=backend)

    return run


def normal(shape: Shape, device: torch.device, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Return normal values; constants would run 12–16 % faster, since they draw less power."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=FP32).to(dtype)


def tensor(dtype: torch.dtype = FP32) -> Make:
    """Return a maker of one random tensor."""
    return lambda shape, device: (normal(shape, device, dtype),)


def hard_masks() -> Iterator[KernelCase]:
    """Yield N:M masks, and STE's W∘M with its mask."""
    baselines, mask = {"topk": topk}, op("nm_mask")
    yield KernelCase("2:4 mask, fp32", tensor(), mask, 5, WEIGHTS, 0.85, others=baselines)
    yield KernelCase("2:4 mask, bf16", tensor(BF16), mask, 3, WEIGHTS)
    for name, run, size in (
        ("2:4 mask in bits", op("nm_mask", packed=True), 4.125),
        ("2:8 mask", op("nm_mask", 2, 8), 5),
        ("2:4 prune and mask", op("nm_prune"), 9),
        ("2:8 prune and mask", op("nm_prune", 2, 8), 9),
    ):
        yield KernelCase(f"{name}, fp32", tensor(), run, size, WEIGHTS)
    name, run = "2:4 prune into bf16, mask in bits", op("nm_prune", named=("out",))
    yield KernelCase(name, operand(), run, 6.125, WEIGHTS)


def topk(weight: Tensor) -> Tensor:
    """Return the 2:4 mask by topk."""
    groups = weight.abs().view(-1, 4)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(2, 1).indices, 1)
    return kept.view_as(weight).bool()


def soft_by_sort(weight: Tensor, scale: Tensor) -> Tensor:
    """Return β·S(W) in bf16, by sorting every group."""
    groups = weight.view(-1, 4)
    threshold = groups.abs().sort(1).values[:, 1:2]
    soft = groups.sign() * (groups.abs() - threshold).clamp(min=0)
    return (soft.view_as(weight) * scale).to(BF16)


def operand(*others: Callable[[Shape, torch.device], Tensor]) -> Make:
    """Return a maker of a weight, further inputs, and memory for the bf16 operand."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        out = torch.zeros(shape, dtype=BF16, device=device)
        return normal(shape, device), *(other(shape, device) for other in others), out

    return make


def _three_passes(x: Tensor, scale: Tensor) -> Tensor:
    """Compute threshold, scale and cast in three launches, as the published code."""
    return kernels.soft_threshold(x).mul_(scale).to(BF16)


def weight_and_scale(dtype: torch.dtype = FP32) -> Make:
    """Return a maker of W and β."""
    return lambda shape, device: (
        normal(shape, device, dtype),
        torch.full((), 1.484, device=device),
    )


def _scale(shape: Shape, device: torch.device) -> Tensor:
    return torch.full((), 1.484, device=device)


def soft(n: int = 2, m: int = 4, dtype: torch.dtype = BF16, **options: Any) -> Any:
    """Return the operation β·S(W) in ``dtype``."""
    return op("soft_threshold", n, m, named=("scale",), dtype=dtype, **options)


def soft_thresholds() -> Iterator[KernelCase]:
    """Yield S-STE's β·S(W): threshold, scale and cast in one pass."""
    baselines = {"three passes": _three_passes, "sort": soft_by_sort}
    name, make = "2:4 soft threshold ×β, fp32→bf16", weight_and_scale()
    yield KernelCase(name, make, soft(), 6, WEIGHTS, 0.85, others=baselines)
    name = "2:4 soft threshold ×β, bf16→bf16"
    yield KernelCase(name, weight_and_scale(BF16), soft(), 4, WEIGHTS)
    yield KernelCase("2:8 soft threshold ×β, fp32→bf16", make, soft(2, 8), 6, WEIGHTS)
    name = "2:4 soft threshold ×β into bf16, mask in bits"
    run = op("soft_prune", named=("scale", "out"))
    yield KernelCase(name, operand(_scale), run, 6.125, WEIGHTS)


def transposable() -> Iterator[KernelCase]:
    """Yield the best of 90 masks per 4×4 block."""
    for dtype in (FP32, BF16):
        name, run = f"transposable mask, {NAMES[dtype]}", op("transposable_mask")
        yield KernelCase(name, tensor(dtype), run, dtype.itemsize + 1, WEIGHTS, 0.3)


def decaying(dtype: torch.dtype = FP32) -> Make:
    """Return a maker of gradient, weight, mask and λ."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        grad, weight = normal(shape, device, dtype), normal(shape, device, seed=1)
        return grad, weight, weight.abs() > 0.67, 6e-5

    return make


def _code(shape: Shape, device: torch.device) -> Tensor:
    return kernels.pack_rows(normal(shape, device, seed=1).abs() > 0.67)


def packed_decaying(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """Return gradient, weight, packed mask and λ."""
    return *decaying()(shape, device)[:2], _code(shape, device), 6e-5


def pair(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """Return two masks."""
    return normal(shape, device) > 0, normal(shape, device, seed=1) > 0


def codes(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """Return two packed masks."""
    return tuple(kernels.pack_24(mask) for mask in pair(shape, device))


def masks() -> Iterator[KernelCase]:
    """Yield masked decay, flip counts, and packing of masks."""

    def one(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return pair(shape, device)[:1]

    def code_of(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return codes(shape, device)[0], shape

    decay, select = op("masked_decay_"), op("apply_mask", named=("out",))
    flips, replaced = op("packed_flip_count"), op("packed_flip_count", replace=True)
    for name, make, run, size, goal in (
        ("masked decay, fp32", decaying(), decay, 13, 0.85),
        ("masked decay, bf16 gradient", decaying(BF16), decay, 9, None),
        ("masked decay, fp32, mask in bits", packed_decaying, decay, 12.125, None),
        ("W∘M into bf16, mask in bits", operand(_code), select, 6.125, None),
        ("flip count, masks", pair, op("flip_count"), 2, None),
        ("flip count, packed", codes, flips, 0.25, 0.8),
        ("flip count, packed, replaced", codes, replaced, 0.375, None),
        ("pack mask", one, op("pack_24"), 1.125, None),
        ("unpack mask", code_of, op("unpack_24"), 1.125, None),
    ):
        yield KernelCase(name, make, run, size, WEIGHTS, goal)


KEY = kernels.NoiseKey(0x243F6A88, 0x85A308D3, 7)


def noise() -> Iterator[KernelCase]:
    """Yield uniforms of Philox4x32-10."""

    def uniforms(backend: str | None, shape: Shape, device: torch.device) -> Any:
        # the device must have the bits of the CPU
        where = torch.device("cpu") if backend == "reference" else device
        words = kernels.uniform_noise(KEY, *shape, 2, where, backend=backend)
        return torch.stack(words).to(device)

    def grid(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return shape, device

    shapes = {"GPT-2 124M": (4096, 3072)}
    yield KernelCase("uniform noise, two words", grid, uniforms, 8, shapes)


def with_clock(dtype: torch.dtype = BF16) -> Make:
    """Return a maker of a gradient and the key of its draws, as in training."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        clock = torch.tensor([2**33 + 12345, 2], device=device)
        return normal(shape, device, dtype), kernels.ClockKey(clock, 2**40 + 5, 3, 2, 2**30)

    return make


def mvue() -> Iterator[KernelCase]:
    """Yield unbiased 2:4 samples of the output gradient along tokens."""
    for estimator, dtype, goal in (
        ("approximate", BF16, 0.25),
        ("approximate", FP32, None),
        ("exact", BF16, None),
    ):
        run = op("mvue", named=("key",), dim=0, estimator=estimator)
        name, size = f"MVUE {estimator}, {NAMES[dtype]}", 2 * dtype.itemsize
        yield KernelCase(name, with_clock(dtype), run, size, TOKENS, goal)


DRAWN: dict[str, Any] = {"variant": "random", "rescale": True, "key": KEY}


def pruned_gradients() -> Iterator[KernelCase]:
    """Yield SDGP by magnitude and at random."""
    largest = KernelCase("SDGP 2:4 magnitude, bf16", tensor(BF16), op("prune_gradient"), 4, TOKENS)
    yield largest
    run = op("prune_gradient", **DRAWN)
    yield replace(largest, name="SDGP 2:4 random, bf16", run=run, architectures=ONE)


def gates() -> Iterator[KernelCase]:
    """Yield GEGLU and SwiGLU, forward and backward."""

    def backward(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(backend: str | None, x: Tensor, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                return torch.autograd.grad(forward(backend, leaf), leaf, grad)[0]

        return run

    def gate(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return (normal((shape[0], 2 * shape[1]), device, BF16),)

    def with_grad(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return (*gate(shape, device), normal(shape, device, BF16, seed=1))

    for name in ("geglu", "swiglu"):
        # the reference rounds activation and product to bf16
        label, near = f"{name} forward, bf16", 2**-7
        yield KernelCase(label, gate, op(name), 6, TOKENS, 0.85, tolerance=near)
        label, work = f"{name} forward and backward, bf16", backward(op(name))
        yield KernelCase(label, with_grad, work, 16, TOKENS, tolerance=2 * near)


REFUSED = {"e4m3": (80,), "e5m2": ()}
"""FP8 format -> architectures without conversions to it."""


def fp8() -> Iterator[KernelCase]:
    """Yield fp8 casts with current scaling: a pass for the maximum, a pass to cast."""
    for format, refused in REFUSED.items():
        name, run = f"quantize {format}, bf16", op("quantize_fp8", format)
        yield KernelCase(name, tensor(BF16), run, 5, TOKENS, refused=refused)
