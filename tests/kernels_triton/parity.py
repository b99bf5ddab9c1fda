"""What the tests of the Triton kernels share: nasty inputs and comparison bit for bit."""

import os

import torch

DEVICE = os.environ.get("SPARSEPRETRAIN_TEST_DEVICE", "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def nasty(shape, seed, *, special=True):
    """fp32 values with ties, both zeros, subnormals and, if ``special``, infinities and NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    ties = torch.randint(-3, 4, shape, generator=g).float()
    kind = torch.randint(0, 20, shape, generator=g)
    x = torch.where(kind < 10, ties, x)
    for value, where in ((-0.0, 10), (1e-42, 11), (-3e-41, 12), (1e30, 13), (2.0**-30, 14)):
        x[kind == where] = value
    if special:
        rare = torch.randint(0, 60, shape, generator=g)
        for i, value in enumerate((float("inf"), -float("inf"), float("nan"))):
            x[rare == i] = value
    return x.to(DEVICE)


def layouts(x):
    """``x`` with its own, transposed, sliced and expanded strides."""
    yield x
    yield x.t().contiguous().t()
    yield torch.stack([x, x], -1)[..., 1]
    yield x[:1].expand_as(x)


def assert_same_bits(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    nan = got.float().isnan()
    assert torch.equal(nan, expected.float().isnan())
    integer = _INTEGER[got.element_size()]
    bits = [t.contiguous().view(integer)[~nan] for t in (got, expected)]
    assert torch.equal(*bits), f"{int((bits[0] != bits[1]).sum())} of {bits[0].numel()} differ"
