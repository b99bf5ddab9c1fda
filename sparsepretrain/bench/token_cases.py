"""Cases of what happens to gradients and activations in every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.bench.kernel_case import (
    BF16,
    FP32,
    ONE,
    TOKENS,
    KernelCase,
    Limit,
    Shape,
    normal,
    short,
    tensor,
)

KEY = kernels.NoiseKey(0x243F6A88, 0x85A308D3, 7)


def noise() -> Iterator[KernelCase]:
    """Philox4x32-10: uniforms, and the key of a stream from a step in device memory."""

    def uniforms(backend: str | None, shape: Shape, device: torch.device) -> Any:
        if backend == "reference":
            return torch.stack(kernels.uniform_noise(KEY, *shape, 2)).to(device)
        from sparsepretrain.kernels.triton import noise as noise_triton

        return noise_triton.uniform_noise(*noise_triton.key_parts(KEY, device), *shape, 2, device)

    def key(backend: str | None, step: Tensor) -> Any:
        if backend == "reference":
            return torch.stack(list(kernels.noise_key(5, step.cpu(), 3, 2))[:2]).to(step.device)
        from sparsepretrain.kernels.triton import noise as noise_triton

        return noise_triton.noise_key(step, 5, 3, 2)

    yield KernelCase(
        name="uniform noise, two words",
        make=lambda shape, device: (shape, device),
        run=uniforms,
        bytes=8,
        limits={"noise._uniforms": Limit(instructions=54, registers=96, wide_loads=0)},
        shapes={"GPT-2 124M": (4096, 3072)},
    )
    yield KernelCase(
        name="key of a stream",
        make=lambda shape, device: (torch.full((), 2**33 + 12345, device=device),),
        run=key,
        bytes=24 / (1024 * 4096),
        limits={"noise._derive_key": Limit(instructions=0.01, registers=32, wide_loads=0)},
    )


def mvue() -> Iterator[KernelCase]:
    """Unbiased 2:4 samples of the output gradient along tokens (G7, without the packing)."""

    def inputs(dtype: torch.dtype, on_device: bool) -> Callable[..., tuple[Any, ...]]:
        def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
            key = KEY
            if on_device:
                key = kernels.NoiseKey(*(torch.full((), part, device=device) for part in KEY))
            return normal(shape, device, dtype), key

        return make

    def run(dim: int = 0, estimator: str = "approximate") -> Callable[..., Any]:
        return lambda backend, x, key: kernels.mvue(
            x, dim=dim, estimator=estimator, key=key, backend=backend
        )

    # exact divisions, so that the bits are those of the reference: a third of the instructions
    for name, dtype, on_device, options, main in (
        ("approximate, bf16", BF16, False, {}, True),
        ("approximate, fp32", FP32, False, {}, True),
        ("approximate, key on the device, bf16", BF16, True, {}, False),
        ("exact, bf16", BF16, False, {"estimator": "exact"}, True),
        ("approximate, along features, bf16", BF16, False, {"dim": -1}, False),
    ):
        yield KernelCase(
            name=f"MVUE {name}",
            make=inputs(dtype, on_device),
            run=run(**options),
            bytes=2 * dtype.itemsize,
            limits={
                "mvue24._sample": Limit(
                    instructions=77 if name.startswith("exact") else 101,
                    registers=112,
                    wide_loads=0,
                )
            },
            shapes=TOKENS if main else {},
            goal=0.25 if main and dtype == BF16 and not options else None,
            architectures=(80, 90, 100) if main else ONE,
        )


def given_uniforms() -> KernelCase:
    """MVUE with the draws read from memory."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        draws = torch.rand(shape[1], shape[0] // 4, 2, device=device)
        return normal(shape, device, BF16), draws

    return KernelCase(
        name="MVUE approximate, given uniforms, bf16",
        make=make,
        run=lambda backend, x, draws: kernels.mvue(x, dim=0, uniforms=draws, backend=backend),
        bytes=6,
        limits={"mvue24._sample": Limit(instructions=105, registers=128, wide_loads=0)},
        architectures=ONE,
    )


def pruned_gradients() -> Iterator[KernelCase]:
    """SDGP: by magnitude, at random, rescaled."""

    def run(n: int, m: int, **options: Any) -> Callable[..., Any]:
        return lambda backend, g: kernels.prune_gradient(g, n, m, **options, backend=backend)

    drawn: dict[str, Any] = {"variant": "random", "rescale": True, "key": KEY}
    variants: tuple[tuple[str, int, int, str, dict[str, Any], float], ...] = (
        ("magnitude", 2, 4, "sdgp._prune_24", {}, 15.0),
        ("random", 2, 4, "sdgp._prune_24", drawn, 61.0),
        ("magnitude", 8, 16, "sdgp._prune_nm", {}, 21.0),
        ("random", 8, 16, "sdgp._prune_nm", drawn, 69.0),
    )
    for name, n, m, kernel, options, instructions in variants:
        yield KernelCase(
            name=f"SDGP {n}:{m} {name}, bf16",
            make=tensor(BF16),
            run=run(n, m, **options),
            bytes=4,
            limits={kernel: Limit(instructions=instructions, registers=96)},
            shapes=TOKENS if m == 4 else {},
            architectures=(80, 90, 100) if name == "magnitude" else ONE,
        )


def gates() -> Iterator[KernelCase]:
    """GEGLU and SwiGLU, forward and backward, per element of the result (G8)."""

    def forward(name: str) -> Callable[..., Any]:
        function = getattr(kernels, name)
        return lambda backend, x: function(x, backend=backend)

    def backward(name: str) -> Callable[..., Any]:
        function = getattr(kernels, name)

        def run(backend: str | None, x: Tensor, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                return torch.autograd.grad(function(leaf, backend=backend), leaf, grad)[0]

        return run

    def inputs(with_grad: bool) -> Callable[..., tuple[Any, ...]]:
        def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
            x = normal((shape[0], 2 * shape[1]), device, BF16)
            return (x, normal(shape, device, BF16, seed=1)) if with_grad else (x,)

        return make

    for name, once, both in (("geglu", 33.0, 47.0), ("swiglu", 26.0, 35.5)):
        yield KernelCase(
            name=f"{name} forward, bf16",
            make=inputs(False),
            run=forward(name),
            bytes=6,
            limits={"glu._forward": Limit(instructions=once, registers=48)},
            shapes=TOKENS,
            goal=0.85,
            tolerance=2**-7,  # the reference rounds the activation to bf16, then the product
        )
        yield KernelCase(
            name=f"{name} forward and backward, bf16",
            make=inputs(True),
            run=backward(name),
            bytes=16,
            limits={
                "glu._forward": Limit(instructions=once, registers=48),
                "glu._backward": Limit(instructions=both, registers=88),
            },
            shapes=TOKENS,
            tolerance=2**-6,
        )


def fp8() -> Iterator[KernelCase]:
    """Current scaling: a pass for the largest magnitude, a pass that casts."""

    def quantize(format: str) -> Callable[..., Any]:
        return lambda backend, x: kernels.quantize_fp8(x, format, backend=backend)

    def quantized(format: str) -> Callable[..., tuple[Any, ...]]:
        return lambda shape, device: kernels.quantize_fp8(
            normal(shape, device), format, backend="reference"
        )

    formats: tuple[tuple[str, tuple[int, ...], float], ...] = (
        ("e4m3", (80,), 14.5),
        ("e5m2", (), 20.5),  # sm_80 has no instruction for it; 13.4 on the others
    )
    for format, refused, instructions in formats:
        quantizing = Limit(instructions=instructions, registers=32)
        for dtype in (FP32, BF16):
            yield KernelCase(
                name=f"quantize {format}, {short(dtype)}",
                make=tensor(dtype),
                run=quantize(format),
                bytes=2 * dtype.itemsize + 1,
                limits={
                    "fp8._largest": Limit(instructions=6.5, registers=32),
                    "fp8._quantize": quantizing,
                },
                shapes=TOKENS if dtype == BF16 else {},
                refused=refused,
            )
        yield KernelCase(
            name=f"dequantize {format}",
            make=quantized(format),
            run=lambda backend, q, scale: kernels.dequantize_fp8(q, scale, backend=backend),
            bytes=5,
            limits={"fp8._dequantize": Limit(instructions=26.5, registers=40)},
            refused=refused,
        )


def cases() -> list[KernelCase]:
    """All of them."""
    return [
        *noise(),
        *mvue(),
        given_uniforms(),
        *pruned_gradients(),
        *gates(),
        *fp8(),
    ]
