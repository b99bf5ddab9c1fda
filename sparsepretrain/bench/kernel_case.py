"""A kernel as a case: what it is called with, what it may cost, what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
OFFLINE: Shape = (1024, 4096)
ONE = (90,)


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
    rotate: bool = True
    """Whether inputs must be rotated so that they are not found in the L2 cache."""
    offline: Shape = OFFLINE
    """What is compiled: divides every tile, so that the count is the kernel's own."""
    architectures: tuple[int, ...] = (80, 90, 100)
    """What it is compiled for; variants of a kernel are compiled for one."""
    refused: tuple[int, ...] = ()
    """Those of them that cannot run it: compiling must fail there."""

    def elements(self, shape: Shape) -> int:
        """What bytes and instructions are counted per."""
        return shape[0] * shape[1]


def normal(shape: Shape, device: torch.device, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Normal values; benchmarks on constants are 12–16 % faster by power alone."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=FP32).to(dtype)


def tensor(dtype: torch.dtype, columns: bool = False) -> Callable[..., tuple[Any, ...]]:
    """One tensor; ``columns``: stored transposed, so that rows are strided."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        x = normal(shape, device, dtype)
        return (x.t().contiguous().t() if columns else x,)

    return make


def far_apart(dtype: torch.dtype) -> Callable[..., tuple[Any, ...]]:
    """More than 2³¹ elements apart, untouched: for compilation only."""

    def make(shape: Shape, device: torch.device) -> tuple[Any, ...]:
        rows, columns = shape
        step = 2**31 // rows + 16
        return (torch.empty(rows * step, dtype=dtype, device=device).view(rows, -1)[:, :columns],)

    return make


def short(dtype: torch.dtype) -> str:
    """Name in the tables."""
    return {FP32: "fp32", FP16: "fp16", BF16: "bf16"}[dtype]
