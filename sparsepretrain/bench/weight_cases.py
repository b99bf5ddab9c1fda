"""Cases of what happens to a weight once per optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.bench.kernel_case import (
    BF16,
    FFN_124M,
    FP16,
    FP32,
    ONE,
    WEIGHTS,
    KernelCase,
    Limit,
    Shape,
    far_apart,
    normal,
    short,
    tensor,
)

SOFT_24 = Limit(instructions=14.0, registers=40)
"""The goal is 12, reached on sm_100, which adds and multiplies two numbers at a time."""


def _topk_mask(x: Tensor) -> Tensor:
    """2:4 by topk and scatter, the usual formulation."""
    groups = x.abs().view(-1, 4)
    kept = groups.topk(2, dim=1).indices
    return torch.zeros_like(groups).scatter_(1, kept, 1).bool().view_as(x)


def masks() -> Iterator[KernelCase]:
    """Hard N:M masks; a bool per element is written."""

    def run(n: int = 2, m: int = 4, dim: int = -1, ties: str = "high") -> Callable[..., Any]:
        return lambda backend, x: kernels.nm_mask(x, n, m, dim=dim, ties=ties, backend=backend)

    rows, columns = Limit(instructions=14.5, registers=32), Limit(instructions=18.5, registers=40)
    for dtype in (FP32, FP16, BF16):
        yield KernelCase(
            name=f"2:4 mask, {short(dtype)}",
            make=tensor(dtype),
            run=run(),
            bytes=dtype.itemsize + 1,
            limits={"nm._mask_24": rows},
            shapes=WEIGHTS if dtype != FP16 else {},
            goal=0.85 if dtype == FP32 else None,
            others={"topk": _topk_mask} if dtype == FP32 else {},
        )
    variants: tuple[tuple[str, dict[str, Any], Any, Limit], ...] = (
        ("low ties, fp32", {"ties": "low"}, tensor(FP32), rows),
        ("along columns, fp32", {"dim": 0}, tensor(FP32), columns),
        ("64-bit offsets, bf16", {}, far_apart(BF16), rows),
    )
    for name, options, make, limit in variants:
        yield KernelCase(
            name=f"2:4 mask {name}",
            make=make,
            run=run(**options),
            bytes=5,
            limits={"nm._mask_24": limit},
            architectures=ONE,
        )
    yield KernelCase(
        name="2:6 mask of a slice, fp32",
        make=lambda shape, device: (normal((shape[0], shape[1] + 6), device)[:, :-6],),
        run=run(2, 6),
        offline=(1024, 3072),
        bytes=5,
        limits={"nm._mask_nm": Limit(instructions=30, registers=64, wide_loads=0)},
        architectures=ONE,
    )
    # a width that is no power of two wastes a quarter of the lanes and has no aligned loads
    for n, m, instructions in ((1, 4, 19.0), (2, 6, 31.5), (2, 8, 18.5), (16, 32, 20.0)):
        yield KernelCase(
            name=f"{n}:{m} mask, fp32",
            make=tensor(FP32),
            run=run(n, m),
            offline=(1024, 128 * m),
            architectures=(80, 90, 100) if m == 8 else ONE,
            bytes=5,
            limits={
                "nm._mask_nm": Limit(
                    instructions=instructions, registers=88, wide_loads=0 if m == 6 else 1
                )
            },
            shapes=WEIGHTS if m == 8 else {},
        )


def pruned() -> Iterator[KernelCase]:
    """STE's W∘M with its mask, in one pass."""
    for n, m, kernel, instructions in ((2, 4, "nm._mask_24", 25.0), (2, 8, "nm._mask_nm", 26.0)):
        yield KernelCase(
            name=f"{n}:{m} prune and mask, fp32",
            make=tensor(FP32),
            run=lambda backend, x, n=n, m=m: kernels.nm_prune(x, n, m, backend=backend),
            bytes=9,
            limits={kernel: Limit(instructions=instructions, registers=88)},
            shapes=WEIGHTS,
        )


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
    """S-STE's β·S(W) for the matrix products: threshold, scale and cast in one pass (G1, G5)."""

    def run(n: int = 2, m: int = 4, to: torch.dtype = BF16, **options: Any) -> Callable[..., Any]:
        return lambda backend, x, scale: kernels.soft_threshold(
            x, n, m, scale=scale, dtype=to, backend=backend, **options
        )

    def inputs(dtype: torch.dtype, scale: bool = True) -> Callable[..., tuple[Any, ...]]:
        def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
            beta = torch.full((), 1.484, device=device) if scale else None
            return normal(shape, device, dtype), beta

        return make

    for dtype, to in ((FP32, BF16), (FP32, FP16), (FP32, FP32), (BF16, BF16)):
        main = dtype == FP32 and to == BF16
        yield KernelCase(
            name=f"2:4 soft threshold ×β, {short(dtype)}→{short(to)}",
            make=inputs(dtype),
            run=run(to=to),
            bytes=dtype.itemsize + to.itemsize,
            limits={"soft._soft_24": SOFT_24},
            shapes=WEIGHTS if to == BF16 else {},
            architectures=(80, 90, 100) if to == BF16 else ONE,
            goal=0.85 if main else None,
            others={"three passes": _three_passes, "sort": _by_sort} if main else {},
        )
    variants: tuple[tuple[str, dict[str, Any], bool, float], ...] = (
        ("without β, fp32→fp32", {"to": FP32}, False, 14.0),
        ("γ = 0.2, fp32→bf16", {"gamma": 0.2}, True, 16.0),
        ("along columns, fp32→bf16", {"dim": 0}, True, 19.5),
    )
    for name, options, scaled, instructions in variants:
        yield KernelCase(
            name=f"2:4 soft threshold {name}",
            make=inputs(FP32, scaled),
            run=run(**options),
            bytes=8 if "to" in options else 6,
            limits={"soft._soft_24": Limit(instructions=instructions, registers=40)},
            architectures=ONE,
        )
    yield KernelCase(
        name="2:8 soft threshold ×β, fp32→bf16",
        make=inputs(FP32),
        run=run(2, 8),
        bytes=6,
        limits={"soft._soft_nm": Limit(instructions=24.5, registers=88)},
        shapes=WEIGHTS,
    )


def ffn_124m() -> KernelCase:
    """All feed-forward weights of GPT-2 124M in one captured step (G9)."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        sizes = FFN_124M if device.type == "cuda" else [shape]
        weights = [normal(size, device, seed=i) for i, size in enumerate(sizes)]
        return weights, torch.full((), 1.484, device=device)

    def run(backend: str | None, weights: list[Tensor], scale: Tensor) -> list[Tensor]:
        return [
            kernels.soft_threshold(w, scale=scale, dtype=BF16, backend=backend) for w in weights
        ]

    return KernelCase(
        name="β·S(W) of all FFN weights of 124M",
        make=make,
        run=run,
        bytes=6,
        limits={"soft._soft_24": SOFT_24},
        architectures=ONE,
        shapes={"24 weights": (24 * 3072, 768)},
        goal_us=150.0,
        rotate=False,
    )


def transposable() -> Iterator[KernelCase]:
    """The best of 90 masks per 4×4 block (G6)."""
    # The goal is 26: 19 profiles instead of 90 sums. A thread holds a whole block, so that loads
    # of 16-bit types are 64 bits wide.
    instructions, registers = 48.0, 56
    for name, dtype, columns in (
        ("fp32", FP32, False),
        ("bf16", BF16, False),
        ("fp32, stored transposed", FP32, True),
    ):
        yield KernelCase(
            name=f"transposable mask, {name}",
            make=tensor(dtype, columns),
            run=lambda backend, w: kernels.transposable_mask(w, backend=backend),
            bytes=dtype.itemsize + 1,
            limits={
                "transposable._search": Limit(
                    instructions=instructions, registers=registers, wide_loads=int(dtype == FP32)
                )
            },
            architectures=ONE if columns else (80, 90, 100),
            shapes={} if columns else WEIGHTS,
            goal=None if columns else 0.3,
        )


def decays() -> Iterator[KernelCase]:
    """SR-STE's pull on the gradient (G8)."""

    def inputs(dtype: torch.dtype, on_device: bool) -> Callable[..., tuple[Any, ...]]:
        def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
            grad, weight = normal(shape, device, dtype), normal(shape, device, seed=1)
            decay = torch.full((), 6e-5, device=device) if on_device else 6e-5
            return grad, weight, weight.abs() > 0.67, decay

        return make

    def run(backend: str | None, grad: Tensor, *others: Any) -> Tensor:
        return kernels.masked_decay_(grad, *others, backend=backend)

    for name, dtype, on_device in (
        ("fp32", FP32, False),
        ("fp32, λ on the device", FP32, True),
        ("bf16 gradient", BF16, False),
    ):
        yield KernelCase(
            name=f"masked decay, {name}",
            make=inputs(dtype, on_device),
            run=run,
            bytes=5 + 2 * dtype.itemsize,
            limits={"decay._masked_decay": Limit(instructions=13, registers=56)},
            architectures=ONE if on_device else (80, 90, 100),
            shapes={} if on_device else WEIGHTS,
            goal=0.85 if dtype == FP32 and not on_device else None,
        )


def flips() -> Iterator[KernelCase]:
    """Flip counting on masks and on packed masks (G8)."""

    def pair(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        return normal(shape, device) > 0, normal(shape, device, seed=1) > 0

    def codes(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        previous, current = pair(shape, device)
        return kernels.pack_24(previous), kernels.pack_24(current)

    def unaligned(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        previous, current = codes(shape, device)
        return previous[1:], current[1:]

    def packed(backend: str | None, previous: Tensor, current: Tensor) -> Tensor:
        return kernels.packed_flip_count(previous, current, backend=backend)

    def limit(instructions: float, wide: int = 1) -> dict[str, Limit]:
        return {
            "flips._differing_bits": Limit(instructions=instructions, registers=48, wide_loads=wide)
        }

    yield KernelCase(
        name="flip count, masks",
        make=pair,
        run=lambda backend, *masks: kernels.flip_count(*masks, backend=backend),
        bytes=2,
        limits=limit(2.0),
        shapes=WEIGHTS,
    )
    yield KernelCase(
        name="flip count, packed",
        make=codes,
        run=packed,
        bytes=0.25,
        limits=limit(0.25),
        shapes=WEIGHTS,
        goal=0.8,
    )
    yield KernelCase(
        name="flip count, packed, odd length",
        make=unaligned,
        run=packed,
        bytes=0.25,
        limits=limit(2.0, wide=0),
        architectures=ONE,
    )


def packing() -> Iterator[KernelCase]:
    """Masks to bits and back."""
    yield KernelCase(
        name="pack mask",
        make=lambda shape, device: (normal(shape, device) > 0,),
        run=lambda backend, mask: kernels.pack_24(mask, backend=backend),
        bytes=1.125,
        limits={"flips._pack": Limit(instructions=8.5, registers=32, wide_loads=0)},
        shapes=WEIGHTS,
    )
    yield KernelCase(
        name="unpack mask",
        make=lambda shape, device: (kernels.pack_24(normal(shape, device) > 0), shape),
        run=lambda backend, code, shape: kernels.unpack_24(code, shape, backend=backend),
        bytes=1.125,
        limits={"flips._unpack": Limit(instructions=4.5, registers=32, wide_loads=0)},
        shapes=WEIGHTS,
    )


def cases() -> list[KernelCase]:
    """All of them."""
    return [
        *masks(),
        *pruned(),
        *soft_thresholds(),
        ffn_124m(),
        *transposable(),
        *decays(),
        *flips(),
        *packing(),
    ]
