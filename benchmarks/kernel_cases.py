"""Every kernel as a case: what it is called with, what it may cost, what it is compared with.

`kernels.py` times the cases on a GPU. The tests add variants that are not timed
(`tests/kernel_variants.py`); on a GPU they compare all with the reference, and everywhere they
compile the kernels that a case launches and hold them to the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from formulations import soft_by_sort, topk
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
class Limit:
    """What the machine code of one kernel may cost, on any architecture."""

    slots: float
    """Of the issue of instructions, per element, in which any pipe may be busy: an instruction
    takes one, one that half as many lanes execute takes two (``tests/kernels_offline``)."""
    registers: int = 128
    """Per thread; 128 still lets 16 warps live on a multiprocessor of 64k registers."""
    wide_loads: int = 1
    """At least so many 128-bit loads; 0 where the layout has none."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One operation with one pattern, dtype and layout."""

    name: str
    make: Make
    """Inputs with random values, the same for every implementation."""
    run: Callable[..., Any]
    """``run(backend, *inputs)``: the public function."""
    bytes: float
    """What an ideal kernel moves, per element of the shape."""
    limits: dict[str, Limit]
    """Kernel that the case launches -> limit. Another kernel is an error."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Shapes that `kernels.py` times on a GPU."""
    goal: float | None = None
    """Fraction of a device copy's bandwidth."""
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Formulations to compare with: ``other(*inputs)``."""
    tolerance: float = 0.0
    """Largest error relative to the largest value; 0: the reference's bits."""
    architectures: tuple[int, ...] = ALL
    """What it is compiled for."""
    offline: Shape = (1024, 4096)
    """What is compiled: divides every tile, so that the count is the kernel's own."""
    refused: tuple[int, ...] = ()
    """Architectures that cannot run it: compiling must fail there."""


def kernel_cases() -> list[KernelCase]:
    """All cases, in the order of the operations of a training step."""
    parts = hard_masks, soft_thresholds, transposable, masks, noise, mvue
    return [case for part in (*parts, pruned_gradients, gates, fp8) for case in part()]


def op(name: str, *args: Any, named: tuple[str, ...] = (), **options: Any) -> Callable[..., Any]:
    """The public function ``name``; the last inputs are given by the keywords ``named``."""

    def run(backend: str | None, *inputs: Any) -> Any:
        split = len(inputs) - len(named)
        keywords = dict(zip(named, inputs[split:], strict=True)) | options
        return getattr(kernels, name)(*inputs[:split], *args, **keywords, backend=backend)

    return run


def normal(shape: Shape, device: torch.device, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Normal values; benchmarks on constants are 12–16 % faster by power alone."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=FP32).to(dtype)


def tensor(dtype: torch.dtype = FP32) -> Make:
    """One tensor of random values."""
    return lambda shape, device: (normal(shape, device, dtype),)


def hard_masks() -> Iterator[KernelCase]:
    """N:M masks, of which a bool per element is written, and STE's W∘M with its mask."""
    usual, limits = {"topk": lambda x: topk(x).bool()}, {"nm._mask_24": Limit(19.5, 32)}
    mask = op("nm_mask")
    yield KernelCase("2:4 mask, fp32", tensor(), mask, 5, limits, WEIGHTS, 0.85, others=usual)
    yield KernelCase("2:4 mask, bf16", tensor(BF16), mask, 3, limits, WEIGHTS)
    name, limits = "2:4 mask in bits, fp32", {"nm._code_24": Limit(26.0, 40)}
    yield KernelCase(name, tensor(), op("nm_mask", packed=True), 4.125, limits, WEIGHTS)
    for name, run, size, limits in (
        ("2:8 mask", op("nm_mask", 2, 8), 5, {"nm._mask_nm": Limit(26.5, 64)}),
        ("2:4 prune and mask", op("nm_prune"), 9, {"nm._mask_24": Limit(36.5, 88)}),
        ("2:8 prune and mask", op("nm_prune", 2, 8), 9, {"nm._mask_nm": Limit(37.0, 88)}),
    ):
        yield KernelCase(f"{name}, fp32", tensor(), run, size, limits, WEIGHTS)
    name, limits = "2:4 prune into bf16, mask in bits", {"nm._prune_24": Limit(34.0, 56)}
    yield KernelCase(name, operand(), op("nm_prune", named=("out",)), 6.125, limits, WEIGHTS)


def operand(*others: Callable[[Shape, torch.device], Tensor]) -> Make:
    """A weight, what else is wanted, and the memory of its operand in bf16."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        out = torch.zeros(shape, dtype=BF16, device=device)
        return normal(shape, device), *(other(shape, device) for other in others), out

    return make


def _three_passes(x: Tensor, scale: Tensor) -> Tensor:
    """What the published code launches: threshold, scale, cast."""
    return kernels.soft_threshold(x).mul_(scale).to(BF16)


def weight_and_scale(dtype: torch.dtype = FP32) -> Make:
    """W and β."""
    return lambda shape, device: (
        normal(shape, device, dtype),
        torch.full((), 1.484, device=device),
    )


def _scale(shape: Shape, device: torch.device) -> Tensor:
    return torch.full((), 1.484, device=device)


def soft(n: int = 2, m: int = 4, dtype: torch.dtype = BF16, **options: Any) -> Any:
    """β·S(W) in ``dtype``."""
    return op("soft_threshold", n, m, named=("scale",), dtype=dtype, **options)


def soft_thresholds() -> Iterator[KernelCase]:
    """S-STE's β·S(W) for the matrix products: threshold, scale and cast in one pass."""
    limits = {"soft._soft_24": Limit(16.5, 40)}
    usual = {
        "three passes": _three_passes,
        "sort": lambda x, beta: (soft_by_sort(x) * beta).to(BF16),
    }
    name, make = "2:4 soft threshold ×β, fp32→bf16", weight_and_scale()
    yield KernelCase(name, make, soft(), 6, limits, WEIGHTS, 0.85, others=usual)
    name, make = "2:4 soft threshold ×β, bf16→bf16", weight_and_scale(BF16)
    yield KernelCase(name, make, soft(), 4, limits, WEIGHTS)
    name, any_limits = "2:8 soft threshold ×β, fp32→bf16", {"soft._soft_nm": Limit(36.0, 64)}
    yield KernelCase(name, weight_and_scale(), soft(2, 8), 6, any_limits, WEIGHTS)

    into = op("soft_prune", named=("scale", "out"))
    limits = {"soft._soft_24": Limit(22.0, 40)}
    name, make = "2:4 soft threshold ×β into bf16, mask in bits", operand(_scale)
    yield KernelCase(name, make, into, 6.125, limits, WEIGHTS)


def transposable() -> Iterator[KernelCase]:
    """The best of 90 masks per 4×4 block."""
    # a thread holds a whole block, so that loads of 16-bit types are 64 bits wide
    for dtype, most, wide in ((FP32, 30.5, 1), (BF16, 29.5, 0)):
        limits, run = {"transposable._search": Limit(most, 80, wide)}, op("transposable_mask")
        name, size = f"transposable mask, {NAMES[dtype]}", dtype.itemsize + 1
        yield KernelCase(name, tensor(dtype), run, size, limits, WEIGHTS, 0.3)


def decaying(dtype: torch.dtype = FP32) -> Make:
    """Gradient, weight, mask and λ."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        grad, weight = normal(shape, device, dtype), normal(shape, device, seed=1)
        return grad, weight, weight.abs() > 0.67, 6e-5

    return make


def _code(shape: Shape, device: torch.device) -> Tensor:
    return kernels.pack_rows(normal(shape, device, seed=1).abs() > 0.67)


def packed_decaying(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """Gradient, weight, packed mask and λ."""
    return *decaying()(shape, device)[:2], _code(shape, device), 6e-5


def pair(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """Two masks."""
    return normal(shape, device) > 0, normal(shape, device, seed=1) > 0


def codes(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """Two packed masks."""
    return tuple(kernels.pack_24(mask) for mask in pair(shape, device))


def masks() -> Iterator[KernelCase]:
    """SR-STE's pull on the gradient, flips of masks and of packed masks, packing."""
    limits, decay = {"masks._masked_decay": Limit(13, 56)}, op("masked_decay_")
    yield KernelCase("masked decay, fp32", decaying(), decay, 13, limits, WEIGHTS, 0.85)
    yield KernelCase("masked decay, bf16 gradient", decaying(BF16), decay, 9, limits, WEIGHTS)
    name = "masked decay, fp32, mask in bits"
    yield KernelCase(name, packed_decaying, decay, 12.125, limits, WEIGHTS)
    name, limits = "W∘M into bf16, mask in bits", {"masks._select": Limit(10.0, 32)}
    run = op("apply_mask", named=("out",))
    yield KernelCase(name, operand(_code), run, 6.125, limits, WEIGHTS)
    limits = {"masks._differing_bits": Limit(2.1, 48)}
    yield KernelCase("flip count, masks", pair, op("flip_count"), 2, limits, WEIGHTS)
    limits, run = {"masks._differing_bits": Limit(0.26, 48)}, op("packed_flip_count")
    yield KernelCase("flip count, packed", codes, run, 0.25, limits, WEIGHTS, 0.8)
    run = op("packed_flip_count", replace=True)
    yield KernelCase("flip count, packed, replaced", codes, run, 0.375, limits, WEIGHTS)

    def one(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return pair(shape, device)[:1]

    def code_of(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return codes(shape, device)[0], shape

    limits = {"masks._pack": Limit(1.6, 32)}
    yield KernelCase("pack mask", one, op("pack_24"), 1.125, limits, WEIGHTS)
    limits = {"masks._unpack": Limit(7.0, 32, 0)}
    yield KernelCase("unpack mask", code_of, op("unpack_24"), 1.125, limits, WEIGHTS)


KEY = kernels.NoiseKey(0x243F6A88, 0x85A308D3, 7)


def noise() -> Iterator[KernelCase]:
    """Philox4x32-10: uniforms."""

    def uniforms(backend: str | None, shape: Shape, device: torch.device) -> Any:
        # the reference runs on the CPU, whose bits the device must have
        where = torch.device("cpu") if backend == "reference" else device
        words = kernels.uniform_noise(KEY, *shape, 2, where, backend=backend)
        return torch.stack(words).to(device)

    def grid(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return shape, device

    name, limits = "uniform noise, two words", {"noise._uniforms": Limit(54, 96, 0)}
    yield KernelCase(name, grid, uniforms, 8, limits, {"GPT-2 124M": (4096, 3072)})


def with_clock(dtype: torch.dtype = BF16) -> Make:
    """A gradient and the key of its draws, as in training."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        clock = torch.tensor([2**33 + 12345, 2], device=device)
        return normal(shape, device, dtype), kernels.ClockKey(clock, 2**40 + 5, 3, 2, 2**30)

    return make


def mvue() -> Iterator[KernelCase]:
    """Unbiased 2:4 samples of the output gradient along tokens."""
    for estimator, dtype, most, goal in (
        ("approximate", BF16, 60, 0.25),
        ("approximate", FP32, 56, None),
        ("exact", BF16, 55, None),
    ):
        limits = {"mvue24._sample": Limit(most, 80, 0)}
        run = op("mvue", named=("key",), dim=0, estimator=estimator)
        name, size = f"MVUE {estimator}, {NAMES[dtype]}", 2 * dtype.itemsize
        yield KernelCase(name, with_clock(dtype), run, size, limits, TOKENS, goal)


DRAWN: dict[str, Any] = {"variant": "random", "rescale": True, "key": KEY}


def pruned_gradients() -> Iterator[KernelCase]:
    """SDGP, by magnitude and at random."""
    limits, run = {"sdgp._prune_24": Limit(21.0, 96)}, op("prune_gradient")
    yield KernelCase("SDGP 2:4 magnitude, bf16", tensor(BF16), run, 4, limits, TOKENS)
    limits, run = {"sdgp._prune_24": Limit(64.0, 96)}, op("prune_gradient", **DRAWN)
    name = "SDGP 2:4 random, bf16"
    yield KernelCase(name, tensor(BF16), run, 4, limits, TOKENS, architectures=ONE)


def gates() -> Iterator[KernelCase]:
    """GEGLU and SwiGLU, forward and backward, per element of the result."""

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

    for name, once, both in (("geglu", 33.0, 47.0), ("swiglu", 26.0, 35.5)):
        limits = {"glu._forward": Limit(once, 48)}
        # the reference rounds the activation to bf16, then the product
        label, near = f"{name} forward, bf16", 2**-7
        yield KernelCase(label, gate, op(name), 6, limits, TOKENS, 0.85, tolerance=near)
        limits = {**limits, "glu._backward": Limit(both, 88)}
        label, work = f"{name} forward and backward, bf16", backward(op(name))
        yield KernelCase(label, with_grad, work, 16, limits, TOKENS, tolerance=2 * near)


QUANTIZING = {
    format: {"fp8._largest": Limit(6.5, 32), "fp8._quantize": Limit(most, 32)}
    # sm_80 has no instruction for e5m2; 13.4 on the others
    for format, most in (("e4m3", 14.5), ("e5m2", 26.5))
}
REFUSED = {"e4m3": (80,), "e5m2": ()}


def fp8() -> Iterator[KernelCase]:
    """Current scaling: a pass for the largest magnitude, a pass that casts."""
    for format, limits in QUANTIZING.items():
        name, run, refused = f"quantize {format}, bf16", op("quantize_fp8", format), REFUSED[format]
        yield KernelCase(name, tensor(BF16), run, 5, limits, TOKENS, refused=refused)
