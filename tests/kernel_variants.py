"""Variants of the kernels that no benchmark times: other types, patterns, layouts and options.

``tests/kernels_offline`` compiles them like the cases of ``benchmarks/kernel_cases.py`` and
``tests/gpu`` compares them with the reference.
"""

from dataclasses import replace

import torch

from kernel_cases import (
    BF16,
    DRAWN,
    FP32,
    KEY,
    ONE,
    QUANTIZING,
    REFUSED,
    KernelCase,
    Limit,
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


def hard_masks():
    limits, mask = {"nm._mask_24": Limit(18.5, 32)}, op("nm_mask")
    yield KernelCase("2:4 mask, fp16", tensor(torch.float16), mask, 3, limits)
    for name, make, run, most in (
        ("low ties, fp32", tensor(), op("nm_mask", ties="low"), Limit(19.5, 32)),
        ("along columns, fp32", tensor(), op("nm_mask", dim=0), Limit(20.5, 40)),
        ("64-bit offsets, bf16", far_apart, mask, Limit(20.5, 32)),
    ):
        yield KernelCase(f"2:4 mask {name}", make, run, 5, {"nm._mask_24": most}, architectures=ONE)
    # a width that is no power of two wastes a quarter of the lanes and has no aligned loads
    for n, m, name, make, columns, most in (
        (2, 6, " of a slice", part, 3072, Limit(49.0, 64, 0)),
        (1, 4, "", tensor(), 512, Limit(19.5, 64)),
        (2, 6, "", tensor(), 768, Limit(51.0, 88, 0)),
        (16, 32, "", tensor(), 4096, Limit(380.0, 88)),
    ):
        name, run, limits = f"{n}:{m} mask{name}, fp32", op("nm_mask", n, m), {"nm._mask_nm": most}
        shape = (1024, columns)
        yield KernelCase(name, make, run, 5, limits, architectures=ONE, offline=shape)


def soft_thresholds():
    def without_scale(shape, device):
        return normal(shape, device), None

    for name, make, run, size, most in (
        ("×β, fp32→fp16", weight_and_scale(), soft(dtype=torch.float16), 6, 16.5),
        ("×β, fp32→fp32", weight_and_scale(), soft(dtype=FP32), 8, 16.0),
        ("without β, fp32→fp32", without_scale, soft(dtype=FP32), 8, 14.0),
        ("γ = 0.2, fp32→bf16", weight_and_scale(), soft(gamma=0.2), 6, 18.5),
        ("along columns, fp32→bf16", weight_and_scale(), soft(dim=0), 6, 16.5),
    ):
        limits = {"soft._soft_24": Limit(most, 40)}
        name = f"2:4 soft threshold {name}"
        yield KernelCase(name, make, run, size, limits, architectures=ONE)

    name, limits = (
        "2:4 prune along columns into bf16, mask in bits",
        {"nm._prune_24": Limit(49, 72)},
    )
    run = op("nm_prune", dim=0, named=("out",))
    yield KernelCase(name, operand(), run, 6.125, limits, architectures=ONE)
    limits = {"soft._soft_24": Limit(32.5, 48)}
    name = "S-STE along columns into bf16, mask in bits"
    run = op("soft_prune", dim=0, gamma=0.2, named=("out",))
    yield KernelCase(name, operand(), run, 6.125, limits, architectures=ONE)


def others():
    def unaligned(shape, device):
        return tuple(code[1:] for code in codes(shape, device))

    for name, make, run, size, limits in (
        (
            *("transposable mask, fp32, stored transposed", columns, op("transposable_mask"), 5),
            {"transposable._search": Limit(30.0, 80)},
        ),
        (
            *("masked decay, fp32, λ on the device", on_device(decaying())),
            *(op("masked_decay_"), 13, {"masks._masked_decay": Limit(13, 56)}),
        ),
        (
            *("flip count, packed, odd length", unaligned, op("packed_flip_count"), 0.25),
            {"masks._differing_bits": Limit(2.6, 48, 0)},
        ),
    ):
        yield KernelCase(name, make, run, size, limits, architectures=ONE)


def samples():
    def given(shape, device):
        draws = torch.rand(shape[1], shape[0] // 4, 2, device=device)
        return normal(shape, device, BF16), draws

    def words(shape, device):
        return normal(shape, device, BF16), KEY

    for name, make, named, dim, size, most in (
        ("key of numbers", words, "key", 0, 4, Limit(53.5, 80, 0)),
        ("key on the device", on_device(words), "key", 0, 4, Limit(55.5, 80, 0)),
        ("along features", with_clock(), "key", -1, 4, Limit(56, 80, 0)),
        ("given uniforms", given, "uniforms", 0, 6, Limit(46, 80, 0)),
    ):
        run, limits = op("mvue", named=(named,), dim=dim), {"mvue24._sample": most}
        name = f"MVUE approximate, {name}, bf16"
        yield KernelCase(name, make, run, size, limits, architectures=ONE)
    limits = {"mvue24._sample": Limit(62.5, 80, 0)}
    run, name = op("mvue", named=("key",), dim=0, order="tokens_last"), "MVUE approximate, turned"
    yield KernelCase(name, with_clock(), run, 4, limits)


def pruned_gradients():
    limits, run = {"sdgp._prune_nm": Limit(172.0, 96)}, op("prune_gradient", 8, 16)
    case = KernelCase("SDGP 8:16 magnitude, bf16", tensor(BF16), run, 4, limits)
    yield case
    limits, run = {"sdgp._prune_nm": Limit(208.0, 96)}, op("prune_gradient", 8, 16, **DRAWN)
    name = "SDGP 8:16 random, bf16"
    yield replace(case, name=name, run=run, limits=limits, architectures=ONE)


def fp8():
    def quantized(format):
        return lambda shape, device: kernels.quantize_fp8(
            normal(shape, device), format, backend="reference"
        )

    for format, limits in QUANTIZING.items():
        name, run, refused = f"quantize {format}, fp32", op("quantize_fp8", format), REFUSED[format]
        yield KernelCase(name, tensor(), run, 9, limits, refused=refused)
        run, limits = op("dequantize_fp8"), {"fp8._dequantize": Limit(26.5, 40)}
        name = f"dequantize {format}"
        yield KernelCase(name, quantized(format), run, 5, limits, refused=refused)
