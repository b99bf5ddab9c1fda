"""Zeros of initial weights: say which pattern they have and what keeps them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor, nn

from sparsepretrain.kernels import nonzeros_per_group
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.sparsity.engine.banks import banks_of
from sparsepretrain.sparsity.engine.layer_classes import dense_weights
from sparsepretrain.sparsity.engine.own_forwards import layer_family
from sparsepretrain.sparsity.methods.asp import EXCEPTIONS, PRUNED

PATTERNS = ((1, 8), (1, 4), (2, 8), (4, 16), (1, 2), (2, 4), (4, 8), (8, 16))
"""Patterns that are recognized, the sparsest first."""


def zeros_note(model: nn.Module, sparsifier: Sparsifier) -> str:
    """Return a note if layers of the initial weights were pruned and zeros will train, or ""."""
    method = sparsifier.method
    patterns = {layer: layer.operands.method.final_pattern for layer in sparsifier.layers.values()}
    kept = {*sparsifier.layers.values()} if method.keeps_zeros else set()
    pruned: dict[tuple[tuple[int, int] | None, bool], list[int]] = defaultdict(list)
    others: list[str] = []
    for name, module in model.named_modules():
        family = layer_family(type(module))
        if family is None:
            sparse = banks_of(module).items()
            banks = dense_weights(module) | {k: b.weight for k, b in sparse if b not in kept}
            pruned_banks = [key for key, bank in banks.items() if _is_pruned(bank)]
            others += [f"{name}.{key}" if name else key for key in pruned_banks]
            continue
        weight: Any = module._parameters.get("weight")
        if weight is None or not _is_pruned(weight):
            continue
        pattern, exceptions = pattern_of(weight, 1 if family in (nn.Linear, nn.Conv2d) else 0)
        is_kept = module in kept
        if is_kept and pattern is not None:
            n, m = patterns[module]
            if pattern[0] * m >= n * pattern[1]:
                continue  # as many non-zeros as the mask keeps, or more, of which a warning tells
        pruned[pattern, is_kept].append(exceptions)
    parts = [
        _described(pattern, is_kept, exceptions, method.options.name, bool(kept))
        for (pattern, is_kept), exceptions in pruned.items()
    ]
    if len({pattern for pattern, _ in pruned if pattern is not None}) > 1:
        parts.append("sparsity.patterns keeps layers with different patterns in one run")
    if others:
        count = "1 weight" if len(others) == 1 else f"{len(others)} weights"
        more = "" if len(others) == 1 else ", …"
        parts.append(
            f"{count} of the checkpoint that no linear layer holds ({others[0]}{more}), such as "
            "banks of experts, have zeros, which train: a method that keeps zeros, such as "
            "sparsity=asp sparsity.at=0, with sparsity.targets that name them keeps them"
        )
    return f"note: {'; '.join(parts)}" if parts else ""


def _is_pruned(weight: Tensor) -> bool:
    """Return True if many values are zero, but not all."""
    return bool(weight.any()) and float((weight == 0).float().mean()) >= PRUNED


def pattern_of(weight: Tensor, dim: int) -> tuple[tuple[int, int] | None, int]:
    """Return the sparsest pattern N:M of a weight along ``dim``, and the groups that differ.

    None: the zeros have no pattern that is known.
    """
    for n, m in PATTERNS:
        if weight.shape[dim] % m == 0:
            nonzeros = nonzeros_per_group(weight, m, dim=dim)
            full = int((nonzeros > n).sum())
            if full < EXCEPTIONS * nonzeros.numel():
                return (n, m), full
    return None, 0


def _described(
    pattern: tuple[int, int] | None,
    is_kept: bool,
    exceptions: list[int],
    method: str,
    keeps_some: bool,
) -> str:
    """Say what happens to the zeros of layers of one pattern, and what keeps them."""
    count = len(exceptions)
    layers = (
        "1 layer of the checkpoint is" if count == 1 else f"{count} layers of the checkpoint are"
    )
    but = f" but for {sum(exceptions):,} groups" if sum(exceptions) else ""
    kind = "pruned without a pattern" if pattern is None else f"{pattern[0]}:{pattern[1]}"
    if is_kept:
        return f"{layers} {kind}{but}, and some of their zeros train: init.mask=zeros keeps them"
    if keeps_some:
        lost = "they are not among the targets: their zeros train"
        return f"{layers} {kind}{but}, and {lost}: sparsity.targets with these layers keeps them"
    words = "sparsity=asp sparsity.at=0"
    if pattern is None:
        words += " sparsity.n=4 sparsity.m=4 init.mask=zeros"
    else:
        words += f" sparsity.n={pattern[0]}" if pattern[0] != 2 else ""
        words += f" sparsity.m={pattern[1]}" if pattern[1] != 4 else ""
    return f"{layers} {kind}{but}, and sparsity={method} trains their zeros too: {words} keeps them"
