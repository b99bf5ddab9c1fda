"""Short formulations in torch of the 2:4 operations, to compare the kernels with."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def topk(weight: Tensor) -> Tensor:
    """Return the 2:4 mask as 0 and 1, the usual formulation."""
    groups = weight.abs().view(-1, 4)
    mask = torch.zeros_like(groups)
    return mask.scatter_(1, groups.topk(2, 1).indices, 1).view_as(weight)


def soft_by_sort(weight: Tensor) -> Tensor:
    """Return the 2:4 soft threshold by sorting every group."""
    groups = weight.view(-1, 4)
    threshold = groups.abs().sort(1).values[:, 1:2]
    return (groups.sign() * (groups.abs() - threshold).clamp(min=0)).view_as(weight)


def transposable_patterns() -> Tensor:
    """Return the 4×4 masks that are 2:4 along both axes, (16, 90) fp32."""
    found = [
        bits
        for bits in itertools.product((1.0, 0.0), repeat=16)
        if all(sum(bits[4 * i : 4 * i + 4]) == 2 == sum(bits[i::4]) for i in range(4))
    ]
    return torch.tensor(found).t().contiguous()


def transposable_by_matmul(weight: Tensor, patterns: Tensor) -> Tensor:
    """Return the best pattern of every 4×4 block, by a matmul with all of them."""
    rows, columns = weight.shape[0] // 4, weight.shape[1] // 4
    blocks = weight.abs().view(rows, 4, columns, 4).transpose(1, 2).reshape(-1, 16)
    best = patterns.t().bool()[(blocks @ patterns).argmax(1)]
    return best.view(rows, columns, 4, 4).transpose(1, 2).reshape(weight.shape)


def mvue_by_multinomial(gradient: Tensor) -> Tensor:
    """Draw two of four without replacement, divided by the probability of being drawn."""
    groups = gradient.t().reshape(-1, 4)
    p = groups.abs() / groups.abs().sum(1, keepdim=True)
    odds = p / (1 - p)
    p = p * (1 + odds.sum(1, keepdim=True) - odds)
    mask = torch.zeros_like(p).scatter_(1, torch.multinomial(groups.abs(), 2), 1)
    return (groups / p * mask).view(gradient.shape[1], -1).t()
