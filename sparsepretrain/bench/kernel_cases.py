"""Every kernel as a case: what it is called with, what it should cost, what it is compared with.

One registry serves two suites: ``offline`` compiles the launches of a case and reads the machine
code, ``kernels`` runs it on a GPU against the reference, other formulations and a device copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsepretrain import kernels

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Shape = tuple[int, int]
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
OFFLINE: Shape = (4096, 4096)
"""Divides every tile, so that the instruction count per element is the kernel's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the machine code of one kernel may cost, on any architecture."""

    instructions: float
    """Per element of the case, loops counted once."""
    registers: int = 128
    """Per thread; 128 still lets 16 warps live on a multiprocessor of 64k registers."""
    wide_loads: int = 1
    """At least so many 128-bit loads; 0 where the layout has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One operation with one pattern, dtype and layout."""

    name: str
    make: Callable[[Shape, torch.device], tuple[Any, ...]]
    """Inputs with random values, the same for every implementation."""
    run: Callable[..., Any]
    """``run(backend, *inputs)``: the public function."""
    bytes: float
    """What an ideal kernel moves, per element of the shape."""
    limits: dict[str, Limit]
    """Kernel that the case launches -> limit. Another kernel is an error."""
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
    lowest: int = 80
    """First architecture that can run it."""

    def elements(self, shape: Shape) -> int:
        """What bytes and instructions are counted per."""
        return shape[0] * shape[1]


def normal(shape: Shape, device: torch.device, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Normal values; benchmarks on constants are 12–16 % faster by power alone."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=FP32).to(dtype)


def _tensor(dtype: torch.dtype, columns: bool = False) -> Callable[..., tuple[Any, ...]]:
    """One tensor; ``columns``: stored transposed, so that rows are strided."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        x = normal(shape, device, dtype)
        return (x.t().contiguous().t() if columns else x,)

    return make


def _wide(dtype: torch.dtype) -> Callable[..., tuple[Any, ...]]:
    """More than 2³¹ elements apart, untouched: for compilation only."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        rows, columns = shape
        step = 2**31 // rows + 16
        return (torch.empty(rows * step, dtype=dtype, device=device).view(rows, -1)[:, :columns],)

    return make


def _topk_mask(x: Tensor) -> Tensor:
    """2:4 by topk and scatter, the usual formulation."""
    groups = x.abs().view(-1, 4)
    kept = groups.topk(2, dim=1).indices
    return torch.zeros_like(groups).scatter_(1, kept, 1).bool().view_as(x)


def masks() -> Iterator[KernelCase]:
    """Hard N:M masks; a bool per element is written."""

    def run(n: int = 2, m: int = 4, dim: int = -1, ties: str = "high") -> Callable[..., Any]:
        return lambda backend, x: kernels.nm_mask(x, n, m, dim=dim, ties=ties, backend=backend)

    two_four = {"nm._mask_24": Limit(instructions=18, registers=40)}
    for dtype, size in ((FP32, 4), (FP16, 2), (BF16, 2)):
        yield KernelCase(
            name=f"2:4 mask, {_short(dtype)}",
            make=_tensor(dtype),
            run=run(),
            bytes=size + 1,
            limits=two_four,
            shapes=WEIGHTS if dtype != FP16 else {},
            goal=0.85 if dtype == FP32 else None,
            others={"topk": _topk_mask} if dtype == FP32 else {},
        )
    yield KernelCase(
        name="2:4 mask, low ties, fp32",
        make=_tensor(FP32),
        run=run(ties="low"),
        bytes=5,
        limits=two_four,
    )
    yield KernelCase(
        name="2:4 mask along columns, fp32",
        make=_tensor(FP32),
        run=run(dim=0),
        bytes=5,
        limits=two_four,
        shapes=WEIGHTS,
    )
    yield KernelCase(
        name="2:4 mask, 64-bit offsets, bf16",
        make=_wide(BF16),
        run=run(),
        bytes=3,
        limits={"nm._mask_24": Limit(instructions=24, registers=64)},
    )
    for n, m in ((1, 4), (2, 8), (2, 6), (16, 32)):
        yield KernelCase(
            name=f"{n}:{m} mask, fp32",
            make=_tensor(FP32),
            run=run(n, m),
            bytes=5,
            limits={"nm._mask_nm": Limit(instructions=22, registers=96, wide_loads=0 if m == 6 else 1)},
            shapes=WEIGHTS if (n, m) == (2, 8) else {},
        )


def _short(dtype: torch.dtype) -> str:
    return {FP32: "fp32", FP16: "fp16", BF16: "bf16"}[dtype]


def kernel_cases() -> list[KernelCase]:
    """All cases, in the order of the operations of a training step."""
    return [*masks()]
