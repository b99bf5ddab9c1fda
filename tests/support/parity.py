"""Inputs of the tests of the Triton kernels: any shape, with sums that stay finite."""

import torch

from support.same_bits import DEVICE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


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
