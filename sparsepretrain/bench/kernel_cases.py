"""Every kernel as a case: what it is called with, what it may cost, what it is compared with.

One table for all: ``suite=kernels`` times the cases on a GPU, ``tests/gpu`` compares them with the
reference, ``tests/kernels_offline`` compiles what they launch and holds it to the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsepretrain import kernels

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}
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
FFN_124M = [(3072, 768), (768, 3072)] * 12
"""All feed-forward weights of GPT-2 124M."""
TINY: Shape = (64, 256)
ALL, ONE = (80, 90, 100), (90,)
"""Architectures: what a case is compiled for; variants of a kernel are compiled for one."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What the machine code of one kernel may cost, on any architecture."""

    instructions: float
    """Per element of the case, loops counted once."""
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
    architectures: tuple[int, ...] = ALL
    shapes: dict[str, Shape] = field(default_factory=dict)
    """What the GPU suite times; empty: compiled only."""
    goal: float | None = None
    """Fraction of a device copy's bandwidth."""
    goal_us: float | None = None
    """Or microseconds, on an H200."""
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Formulations to compare with: ``other(*inputs)``."""
    tolerance: float = 0.0
    """Largest error relative to the largest value; 0: the reference's bits."""
    rotate: bool = True
    """Whether inputs must be rotated so that they are not found in the L2 cache."""
    offline: Shape = (1024, 4096)
    """What is compiled: divides every tile, so that the count is the kernel's own."""
    refused: tuple[int, ...] = ()
    """Architectures that cannot run it: compiling must fail there."""


def kernel_cases() -> list[KernelCase]:
    """All cases, in the order of the operations of a training step."""
    parts = hard_masks, soft_thresholds, transposable, masks, noise, mvue, pruned_gradients
    return [case for part in (*parts, gates, fp8) for case in part()]


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


def columns(shape: Shape, device: torch.device) -> tuple[Tensor]:
    """One tensor stored transposed, so that rows are strided."""
    return (normal(shape, device).t().contiguous().t(),)


def far_apart(shape: Shape, device: torch.device) -> tuple[Tensor]:
    """Rows more than 2³¹ elements apart, untouched: for compilation only."""
    step = 2**31 // shape[0] + 16
    memory = torch.empty(shape[0] * step, dtype=BF16, device=device)
    return (memory.view(shape[0], -1)[:, : shape[1]],)


def _topk_mask(x: Tensor) -> Tensor:
    """2:4 by topk and scatter, the usual formulation."""
    groups = x.abs().view(-1, 4)
    kept = groups.topk(2, dim=1).indices
    return torch.zeros_like(groups).scatter_(1, kept, 1).bool().view_as(x)


def hard_masks() -> Iterator[KernelCase]:
    """N:M masks, of which a bool per element is written, and STE's W∘M with its mask."""
    rows = {"nm._mask_24": Limit(14.5, 32)}
    for dtype, shapes, goal, others in (
        (FP32, WEIGHTS, 0.85, {"topk": _topk_mask}),
        (FP16, {}, None, {}),
        (BF16, WEIGHTS, None, {}),
    ):
        name, size = f"2:4 mask, {NAMES[dtype]}", dtype.itemsize + 1
        run = op("nm_mask")
        yield KernelCase(name, tensor(dtype), run, size, rows, ALL, shapes, goal, others=others)
    across = {"nm._mask_24": Limit(18.5, 40)}
    low, by_columns = op("nm_mask", ties="low"), op("nm_mask", dim=0)
    yield KernelCase("2:4 mask low ties, fp32", tensor(), low, 5, rows, ONE)
    yield KernelCase("2:4 mask along columns, fp32", tensor(), by_columns, 5, across, ONE)
    yield KernelCase("2:4 mask 64-bit offsets, bf16", far_apart, op("nm_mask"), 5, rows, ONE)

    def part(shape: Shape, device: torch.device) -> tuple[Tensor]:
        return (normal((shape[0], shape[1] + 6), device)[:, :-6],)

    limits, shape = {"nm._mask_nm": Limit(30, 64, 0)}, (1024, 3072)
    yield KernelCase(
        "2:6 mask of a slice, fp32", part, op("nm_mask", 2, 6), 5, limits, ONE, offline=shape
    )
    # a width that is no power of two wastes a quarter of the lanes and has no aligned loads
    for n, m, limit, architectures, shapes in (
        (1, 4, Limit(19.0, 88), ONE, {}),
        (2, 6, Limit(31.5, 88, 0), ONE, {}),
        (2, 8, Limit(18.5, 88), ALL, WEIGHTS),
        (16, 32, Limit(20.0, 88), ONE, {}),
    ):
        name, run, limits = f"{n}:{m} mask, fp32", op("nm_mask", n, m), {"nm._mask_nm": limit}
        shape = (1024, 128 * m)
        yield KernelCase(name, tensor(), run, 5, limits, architectures, shapes, offline=shape)
    for n, m, limits in (
        (2, 4, {"nm._mask_24": Limit(25.0, 88)}),
        (2, 8, {"nm._mask_nm": Limit(26.0, 88)}),
    ):
        name = f"{n}:{m} prune and mask, fp32"
        yield KernelCase(name, tensor(), op("nm_prune", n, m), 9, limits, ALL, WEIGHTS)


def _three_passes(x: Tensor, scale: Tensor) -> Tensor:
    """What the published code launches: threshold, scale, cast."""
    return kernels.soft_threshold(x).mul_(scale).to(BF16)


def _by_sort(x: Tensor, scale: Tensor) -> Tensor:
    """The threshold by sorting every group."""
    groups = x.view(-1, 4)
    threshold = groups.abs().sort(1).values[:, 1:2]
    soft = groups.sign() * (groups.abs() - threshold).clamp_(min=0)
    return (soft * scale).to(BF16).view_as(x)


def soft_thresholds() -> Iterator[KernelCase]:
    """S-STE's β·S(W) for the matrix products: threshold, scale and cast in one pass."""

    def inputs(dtype: torch.dtype = FP32, beta: float | None = 1.484) -> Make:
        return lambda shape, device: (
            normal(shape, device, dtype),
            None if beta is None else torch.full((), beta, device=device),
        )

    def run(n: int = 2, m: int = 4, dtype: torch.dtype = BF16, **options: Any) -> Any:
        return op("soft_threshold", n, m, named=("scale",), dtype=dtype, **options)

    # the goal is 12, reached on sm_100, which adds and multiplies two numbers at a time
    usual = {"soft._soft_24": Limit(14.0, 40)}
    for dtype, to, architectures, shapes, goal, others in (
        (FP32, BF16, ALL, WEIGHTS, 0.85, {"three passes": _three_passes, "sort": _by_sort}),
        (FP32, FP16, ONE, {}, None, {}),
        (FP32, FP32, ONE, {}, None, {}),
        (BF16, BF16, ALL, WEIGHTS, None, {}),
    ):
        name = f"2:4 soft threshold ×β, {NAMES[dtype]}→{NAMES[to]}"
        size, work = dtype.itemsize + to.itemsize, run(dtype=to)
        make = inputs(dtype)
        yield KernelCase(name, make, work, size, usual, architectures, shapes, goal, others=others)
    for name, make, work, size, instructions in (
        ("without β, fp32→fp32", inputs(beta=None), run(dtype=FP32), 8, 14.0),
        ("γ = 0.2, fp32→bf16", inputs(), run(gamma=0.2), 6, 16.0),
        ("along columns, fp32→bf16", inputs(), run(dim=0), 6, 19.5),
    ):
        limits = {"soft._soft_24": Limit(instructions, 40)}
        yield KernelCase(f"2:4 soft threshold {name}", make, work, size, limits, ONE)
    name, limits = "2:8 soft threshold ×β, fp32→bf16", {"soft._soft_nm": Limit(24.5, 88)}
    yield KernelCase(name, inputs(), run(2, 8), 6, limits, ALL, WEIGHTS)

    def all_weights(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        sizes = FFN_124M if device.type == "cuda" else [shape]
        weights = [normal(size, device, seed=i) for i, size in enumerate(sizes)]
        return weights, torch.full((), 1.484, device=device)

    def one_step(backend: str | None, weights: list[Tensor], scale: Tensor) -> list[Tensor]:
        return [run()(backend, weight, scale) for weight in weights]

    name, shapes = "β·S(W) of all FFN weights of 124M", {"24 weights": (24 * 3072, 768)}
    yield KernelCase(
        name, all_weights, one_step, 6, usual, ONE, shapes, goal_us=150.0, rotate=False
    )


def transposable() -> Iterator[KernelCase]:
    """The best of 90 masks per 4×4 block."""
    # The goal is 26: 19 profiles instead of 90 sums. A thread holds a whole block, so that loads
    # of 16-bit types are 64 bits wide.
    for name, make, size, wide, architectures, shapes, goal in (
        ("fp32", tensor(), 5, 1, ALL, WEIGHTS, 0.3),
        ("bf16", tensor(BF16), 3, 0, ALL, WEIGHTS, 0.3),
        ("fp32, stored transposed", columns, 5, 1, ONE, {}, None),
    ):
        limits, run = {"transposable._search": Limit(48.0, 56, wide)}, op("transposable_mask")
        name = f"transposable mask, {name}"
        yield KernelCase(name, make, run, size, limits, architectures, shapes, goal)


def masks() -> Iterator[KernelCase]:
    """SR-STE's pull on the gradient, flips of masks and of packed masks, packing."""

    def decaying(dtype: torch.dtype = FP32, on_device: bool = False) -> Make:
        def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
            grad, weight = normal(shape, device, dtype), normal(shape, device, seed=1)
            decay = torch.full((), 6e-5, device=device) if on_device else 6e-5
            return grad, weight, weight.abs() > 0.67, decay

        return make

    for name, make, size, architectures, shapes, goal in (
        ("fp32", decaying(), 13.0, ALL, WEIGHTS, 0.85),
        ("fp32, λ on the device", decaying(on_device=True), 13, ONE, {}, None),
        ("bf16 gradient", decaying(BF16), 9, ALL, WEIGHTS, None),
    ):
        limits, run = {"masks._masked_decay": Limit(13, 56)}, op("masked_decay_")
        name = f"masked decay, {name}"
        yield KernelCase(name, make, run, size, limits, architectures, shapes, goal)

    def pair(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return normal(shape, device) > 0, normal(shape, device, seed=1) > 0

    def codes(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return tuple(kernels.pack_24(mask) for mask in pair(shape, device))

    def unaligned(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return tuple(code[1:] for code in codes(shape, device))

    packed = op("packed_flip_count")
    for name, make, run, size, limit, architectures, shapes, goal in (
        ("masks", pair, op("flip_count"), 2.0, Limit(2.0, 48), ALL, WEIGHTS, None),
        ("packed", codes, packed, 0.25, Limit(0.25, 48), ALL, WEIGHTS, 0.8),
        ("packed, odd length", unaligned, packed, 0.25, Limit(2.0, 48, 0), ONE, {}, None),
    ):
        name, limits = f"flip count, {name}", {"masks._differing_bits": limit}
        yield KernelCase(name, make, run, size, limits, architectures, shapes, goal)

    def code_of(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return codes(shape, device)[0], shape

    limits = {"masks._pack": Limit(8.5, 32, 0)}
    pack, unpack = op("pack_24"), op("unpack_24")
    yield KernelCase(
        "pack mask", lambda *where: pair(*where)[:1], pack, 1.125, limits, ALL, WEIGHTS
    )
    limits = {"masks._unpack": Limit(4.5, 32, 0)}
    yield KernelCase("unpack mask", code_of, unpack, 1.125, limits, ALL, WEIGHTS)


KEY = kernels.NoiseKey(0x243F6A88, 0x85A308D3, 7)


def noise() -> Iterator[KernelCase]:
    """Philox4x32-10: uniforms, and the key of a stream from a step in device memory."""

    def uniforms(backend: str | None, shape: Shape, device: torch.device) -> Any:
        # the reference runs on the CPU, whose bits the device must have
        where = torch.device("cpu") if backend == "reference" else device
        words = kernels.uniform_noise(KEY, *shape, 2, where, backend=backend)
        return torch.stack(words).to(device)

    def key(backend: str | None, step: Tensor) -> Any:
        if backend == "reference":
            return torch.stack(list(kernels.noise_key(5, step.cpu(), 3, 2))[:2]).to(step.device)
        from sparsepretrain.kernels.triton.noise import noise_key

        return noise_key(step, 5, 3, 2)

    def grid(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return shape, device

    def step(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return (torch.full((), 2**33 + 12345, device=device),)

    name, limits = "uniform noise, two words", {"noise._uniforms": Limit(54, 96, 0)}
    yield KernelCase(name, grid, uniforms, 8, limits, ALL, {"GPT-2 124M": (4096, 3072)})
    limits = {"noise._derive_key": Limit(0.01, 32, 0)}
    yield KernelCase("key of a stream", step, key, 24 / (1024 * 4096), limits)


def mvue() -> Iterator[KernelCase]:
    """Unbiased 2:4 samples of the output gradient along tokens."""

    def inputs(dtype: torch.dtype = BF16, on_device: bool = False) -> Make:
        def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
            parts = (torch.full((), part, device=device) if on_device else part for part in KEY)
            return normal(shape, device, dtype), kernels.NoiseKey(*parts)

        return make

    def given(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        draws = torch.rand(shape[1], shape[0] // 4, 2, device=device)
        return normal(shape, device, BF16), draws

    def run(named: str = "key", dim: int = 0, **options: Any) -> Callable[..., Any]:
        return op("mvue", named=(named,), dim=dim, **options)

    # exact divisions, so that the bits are those of the reference: a third of the instructions
    usual, exact = Limit(101, 112, 0), Limit(77, 112, 0)
    for name, make, work, size, limit, architectures, shapes, goal in (
        ("approximate, bf16", inputs(), run(), 4, usual, ALL, TOKENS, 0.25),
        ("approximate, fp32", inputs(FP32), run(), 8, usual, ALL, TOKENS, None),
        (
            *("approximate, key on the device, bf16", inputs(on_device=True), run()),
            *(4, usual, ONE, {}, None),
        ),
        ("exact, bf16", inputs(), run(estimator="exact"), 4, exact, ALL, TOKENS, None),
        ("approximate, along features, bf16", inputs(), run(dim=-1), 4, usual, ONE, {}, None),
        (
            *("approximate, given uniforms, bf16", given, run("uniforms")),
            *(6, Limit(105, 128, 0), ONE, {}, None),
        ),
    ):
        limits = {"mvue24._sample": limit}
        yield KernelCase(f"MVUE {name}", make, work, size, limits, architectures, shapes, goal)


def pruned_gradients() -> Iterator[KernelCase]:
    """SDGP, by magnitude and at random."""
    drawn: dict[str, Any] = {"variant": "random", "rescale": True, "key": KEY}
    for name, n, m, options, limits, architectures in (
        ("magnitude", 2, 4, {}, {"sdgp._prune_24": Limit(15.0, 96)}, ALL),
        ("random", 2, 4, drawn, {"sdgp._prune_24": Limit(61.0, 96)}, ONE),
        ("magnitude", 8, 16, {}, {"sdgp._prune_nm": Limit(21.0, 96)}, ALL),
        ("random", 8, 16, drawn, {"sdgp._prune_nm": Limit(69.0, 96)}, ONE),
    ):
        run, shapes = op("prune_gradient", n, m, **options), TOKENS if m == 4 else {}
        name = f"SDGP {n}:{m} {name}, bf16"
        yield KernelCase(name, tensor(BF16), run, 4, limits, architectures, shapes)


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
        yield KernelCase(label, gate, op(name), 6, limits, ALL, TOKENS, 0.85, tolerance=near)
        limits = {**limits, "glu._backward": Limit(both, 88)}
        label, work = f"{name} forward and backward, bf16", backward(op(name))
        yield KernelCase(label, with_grad, work, 16, limits, ALL, TOKENS, tolerance=2 * near)


def fp8() -> Iterator[KernelCase]:
    """Current scaling: a pass for the largest magnitude, a pass that casts."""

    def quantized(format: str) -> Make:
        return lambda shape, device: kernels.quantize_fp8(
            normal(shape, device), format, backend="reference"
        )

    for format, refused, quantizing in (
        ("e4m3", (80,), Limit(14.5, 32)),
        ("e5m2", (), Limit(20.5, 32)),  # sm_80 has no instruction for it; 13.4 on the others
    ):
        limits = {"fp8._largest": Limit(6.5, 32), "fp8._quantize": quantizing}
        for dtype, shapes in ((FP32, {}), (BF16, TOKENS)):
            name, size = f"quantize {format}, {NAMES[dtype]}", 2 * dtype.itemsize + 1
            run = op("quantize_fp8", format)
            yield KernelCase(name, tensor(dtype), run, size, limits, ALL, shapes, refused=refused)
        run, limits = op("dequantize_fp8"), {"fp8._dequantize": Limit(26.5, 40)}
        yield KernelCase(f"dequantize {format}", quantized(format), run, 5, limits, refused=refused)
