"""Variants of the kernels that no benchmark times: other types, patterns, layouts and options.

``tests/suites/compile_only`` compiles them like the cases of ``benchmarks/kernel_cases.py`` and
``tests/suites/gpu`` compares them with the reference.
"""

import torch

from kernel_cases import (
    ALL,
    BF16,
    DRAWN,
    FP32,
    KEY,
    ONE,
    REFUSED,
    KernelCase,
    codes,
    decaying,
    kernel_cases,
    normal,
    op,
    operand,
    soft,
    tensor,
    weight_and_scale,
    with_clock,
)
from sparsepretrain import kernels


def all_cases():
    """The timed cases and the variants."""
    parts = hard_masks, soft_thresholds, others, samples, pruned_gradients, fp8
    return [*kernel_cases(), *(case for part in parts for case in part())]


def columns(shape, device):
    """One tensor stored transposed, so that rows are strided."""
    return (normal(shape, device).t().contiguous().t(),)


def far_apart(shape, device):
    """Rows more than 2³¹ elements apart, untouched: for compilation only."""
    step = 2**31 // shape[0] + 16
    memory = torch.empty(shape[0] * step, dtype=BF16, device=device)
    return (memory.view(shape[0], -1)[:, : shape[1]],)


def part(shape, device):
    """A slice whose rows are not aligned."""
    return (normal((shape[0], shape[1] + 6), device)[:, :-6],)


def on_device(make):
    """The numbers among the inputs as tensors."""

    def moved(shape, device):
        def move(value):
            if isinstance(value, kernels.NoiseKey):
                return kernels.NoiseKey(*map(move, value))
            return torch.full((), value, device=device) if isinstance(value, int | float) else value

        return tuple(map(move, make(shape, device)))

    return moved


def variant(name, make, run, **words):
    return KernelCase(name, make, run, **{"architectures": ONE, **words})


def hard_masks():
    mask = op("nm_mask")
    yield variant("2:4 mask, fp16", tensor(torch.float16), mask, architectures=ALL)
    yield variant("2:4 mask low ties, fp32", tensor(), op("nm_mask", ties="low"))
    yield variant("2:4 mask along columns, fp32", tensor(), op("nm_mask", dim=0))
    yield variant("2:4 mask 64-bit offsets, bf16", far_apart, mask)
    for n, m, name, make, columns in (
        (2, 6, " of a slice", part, 3072),
        (1, 4, "", tensor(), 512),
        (2, 6, "", tensor(), 768),
        (16, 32, "", tensor(), 4096),
    ):
        shape = (1024, columns)
        yield variant(f"{n}:{m} mask{name}, fp32", make, op("nm_mask", n, m), offline=shape)


def soft_thresholds():
    def without_scale(shape, device):
        return normal(shape, device), None

    for name, make, run in (
        ("×β, fp32→fp16", weight_and_scale(), soft(dtype=torch.float16)),
        ("×β, fp32→fp32", weight_and_scale(), soft(dtype=FP32)),
        ("without β, fp32→fp32", without_scale, soft(dtype=FP32)),
        ("γ = 0.2, fp32→bf16", weight_and_scale(), soft(gamma=0.2)),
        ("along columns, fp32→bf16", weight_and_scale(), soft(dim=0)),
    ):
        yield variant(f"2:4 soft threshold {name}", make, run)
    run = op("nm_prune", dim=0, named=("out",))
    yield variant("2:4 prune along columns into bf16, mask in bits", operand(), run)
    run = op("soft_prune", dim=0, gamma=0.2, named=("out",))
    yield variant("S-STE along columns into bf16, mask in bits", operand(), run)


def others():
    def unaligned(shape, device):
        return tuple(code[1:] for code in codes(shape, device))

    name = "transposable mask, fp32, stored transposed"
    yield variant(name, columns, op("transposable_mask"))
    name = "masked decay, fp32, λ on the device"
    yield variant(name, on_device(decaying()), op("masked_decay_"))
    yield variant("flip count, packed, odd length", unaligned, op("packed_flip_count"))


def samples():
    def given(shape, device):
        draws = torch.rand(shape[1], shape[0] // 4, 2, device=device)
        return normal(shape, device, BF16), draws

    def words(shape, device):
        return normal(shape, device, BF16), KEY

    for name, make, named, dim in (
        ("key of numbers", words, "key", 0),
        ("key on the device", on_device(words), "key", 0),
        ("along features", with_clock(), "key", -1),
        ("given uniforms", given, "uniforms", 0),
    ):
        yield variant(f"MVUE approximate, {name}, bf16", make, op("mvue", named=(named,), dim=dim))
    run = op("mvue", named=("key",), dim=0, order="tokens_last")
    yield variant("MVUE approximate, turned", with_clock(), run, architectures=ALL)


def pruned_gradients():
    run = op("prune_gradient", 8, 16)
    yield variant("SDGP 8:16 magnitude, bf16", tensor(BF16), run, architectures=ALL)
    yield variant("SDGP 8:16 random, bf16", tensor(BF16), op("prune_gradient", 8, 16, **DRAWN))


def fp8():
    def quantized(format):
        return lambda shape, device: kernels.quantize_fp8(
            normal(shape, device), format, backend="reference"
        )

    for format, refused in REFUSED.items():
        words = {"architectures": ALL, "refused": refused}
        yield variant(f"quantize {format}, fp32", tensor(), op("quantize_fp8", format), **words)
        yield variant(f"dequantize {format}", quantized(format), op("dequantize_fp8"), **words)
