"""The loops on the CPU against the shortest formulation in torch, on a GPT-2 124M weight."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from sparsepretrain import kernels
from sparsepretrain.bench.timing import Case, interleaved, ratio


def cases(rounds: int, on_round: Callable[[int], object]) -> list[Case]:
    """The 2:4 operations of a step, each beside what one would write first."""
    draw = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(3072, 768, generator=draw) for _ in range(2))
    patterns = _transposable_patterns()
    pairs: list[tuple[str, float | None, Callable[[], object], Callable[[], object]]] = [
        ("2:4 mask, topk", 10.0, lambda: topk(weight), lambda: kernels.nm_mask(weight)),
        (
            "soft threshold, sort",
            15.0,
            lambda: soft_by_sort(weight),
            lambda: kernels.soft_threshold(weight),
        ),
        (
            "transposable mask, product with 90 patterns",
            None,
            lambda: _transposable_by_product(weight, patterns),
            lambda: kernels.transposable_mask(weight),
        ),
        (
            "approximate MVUE, multinomial",
            15.0,
            lambda: _mvue_by_multinomial(gradient),
            lambda: kernels.mvue(gradient, dim=0, key=0),
        ),
    ]
    works: dict[str, Callable[[], object]] = {}
    for name, _, simple, ours in pairs:
        works[name], works[f"{name}, ours"] = simple, ours
    seconds = interleaved(works, rounds=rounds, on_round=on_round)
    return [
        ratio(
            f"{name} over ours, 3072×768", seconds[name], seconds[f"{name}, ours"], at_least=limit
        )
        for name, limit, _, _ in pairs
    ]


def topk(weight: Tensor) -> Tensor:
    """The 2:4 mask as 0 and 1, the usual formulation."""
    groups = weight.abs().view(-1, 4)
    mask = torch.zeros_like(groups)
    return mask.scatter_(1, groups.topk(2, 1).indices, 1).view_as(weight)


def soft_by_sort(weight: Tensor) -> Tensor:
    """The 2:4 soft threshold by sorting every group."""
    groups = weight.view(-1, 4)
    threshold = groups.abs().sort(1).values[:, 1:2]
    return (groups.sign() * (groups.abs() - threshold).clamp(min=0)).view_as(weight)


def _transposable_patterns() -> Tensor:
    """(16, 90) fp32."""
    found = [
        bits
        for bits in itertools.product((1.0, 0.0), repeat=16)
        if all(sum(bits[4 * i : 4 * i + 4]) == 2 == sum(bits[i::4]) for i in range(4))
    ]
    return torch.tensor(found).t().contiguous()


def _transposable_by_product(weight: Tensor, patterns: Tensor) -> Tensor:
    rows, columns = weight.shape[0] // 4, weight.shape[1] // 4
    blocks = weight.abs().view(rows, 4, columns, 4).transpose(1, 2).reshape(-1, 16)
    best = patterns.t().bool()[(blocks @ patterns).argmax(1)]
    return best.view(rows, columns, 4, 4).transpose(1, 2).reshape(weight.shape)


def _mvue_by_multinomial(gradient: Tensor) -> Tensor:
    """Two of four drawn without replacement, divided by the probability to be among them."""
    groups = gradient.t().reshape(-1, 4)
    p = groups.abs() / groups.abs().sum(1, keepdim=True)
    odds = p / (1 - p)
    p = p * (1 + odds.sum(1, keepdim=True) - odds)
    mask = torch.zeros_like(p).scatter_(1, torch.multinomial(groups.abs(), 2), 1)
    return (groups / p * mask).view(gradient.shape[1], -1).t()
