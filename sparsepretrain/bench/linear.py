"""One sparse linear layer, forward and backward, against nn.Linear (``suite=linear``).

The projection of the weight is part of every call, as in a run with one micro-batch per step.
Products are dense on zero-filled weights: what is measured is what a method costs, not a gain; or,
with ``backend=auto``, sparse where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from sparsepretrain import registry
from sparsepretrain.bench import EVERYTHING, Choice, gpu
from sparsepretrain.bench.kernels import Timed, details, draw
from sparsepretrain.bench.timing import interleaved
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import Sparsifier, sparsify
from sparsepretrain.sparsity.layers import SparseLayer

__all__ = ["DENSE", "cases", "details", "draw", "durations", "timed_methods"]

LAYERS = {"GPT-2 124M": (768, 3072), "LLaMA 7B": (4096, 11008)}
"""(in_features, out_features)."""
TOKENS = 16384
DENSE = "nn.Linear"

Sparsify = Callable[[nn.Module], Sparsifier]


def timed_methods(only: Sequence[str] = ()) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name in the results -> method and options: what every method says is worth timing.

    ``only``: these methods and dense; none: all.

    Raises:
        ConfigError: there is no such method.
    """
    names = sorted(registry.names("method"), key="dense".__ne__)  # the yardstick first
    if wrong := [name for name in only if name not in names]:
        raise ConfigError(f"no method {wrong[0]!r}{registry.suggestion(wrong[0], names)}")
    names = [name for name in names if not only or name in ("dense", *only)]
    methods: dict[str, Any] = {name: registry.get("method", name) for name in names}
    return {
        f"{name}, {label}" if label else name: (name, options)
        for name, method in methods.items()
        for label, options in method.timed.items()
    }


def cases(quick: bool, choice: Choice = EVERYTHING) -> list[Timed]:
    """Every method on every layer; one tiny layer without a GPU."""
    if not torch.cuda.is_available():
        return _layer("tiny", (64, 128), 64, torch.device("cpu"), 2, choice)
    rounds = 5 if quick else 25
    return [
        timed
        for name, sizes in LAYERS.items()
        for timed in _layer(name, sizes, TOKENS, torch.device("cuda"), rounds, choice)
    ]


def _layer(
    name: str,
    sizes: tuple[int, int],
    tokens: int,
    device: torch.device,
    rounds: int,
    choice: Choice,
) -> list[Timed]:
    rest: Any = {"targets": ["*"], "total_steps": 1000, "backend": choice.backend}
    variants: dict[str, Sparsify] = {
        label: partial(sparsify, method=method, **rest, **options)
        for label, (method, options) in timed_methods(choice.methods).items()
    }
    measured = durations(sizes, (tokens,), device, rounds, variants)
    how = ", bf16" + f", backend={choice.backend}" * (choice.backend != "emulate")
    return [
        Timed(
            case=f"linear, {name}, forward and backward{how}",
            shape=[tokens, *sizes],
            impl=label,
            mode=series.mode,
            us=series.percentiles(),
            ratio_to={DENSE: gpu.median_ratio(measured[DENSE], series)},
        )
        for label, series in measured.items()
    ]


def durations(
    sizes: tuple[int, int],
    inputs: tuple[int, ...],
    device: torch.device,
    rounds: int,
    variants: dict[str, Sparsify],
    *,
    dtype: torch.dtype = torch.bfloat16,
    fresh: bool = True,
) -> dict[str, gpu.Series]:
    """Forward and backward of nn.Linear (:data:`DENSE`) and of what ``variants`` make of one.

    Args:
        sizes: (in_features, out_features).
        inputs: (…, tokens of a sample).
        device: CUDA, or the CPU in a rehearsal.
        rounds: interleaved.
        variants: name -> makes the linear layers of a module sparse.
        dtype: of the products.
        fresh: whether the weight is projected in every call, as with one micro-batch per step;
            else its operands are stored.
    """
    torch.manual_seed(0)
    x = torch.randn(*inputs, sizes[0], device=device, requires_grad=True)
    grad = torch.randn(*inputs, sizes[1], device=device, dtype=dtype)
    works = {DENSE: _work(nn.Linear(*sizes).to(device), x, grad, fresh)}
    for label, make in variants.items():
        layer = nn.Sequential(nn.Linear(*sizes).to(device))
        sparsifier = make(layer)
        if not fresh:
            sparsifier.store_operands(dtype)
        works[label] = _work(layer, x, grad, fresh)
    if device.type == "cuda":
        return gpu.measure({k: [work] for k, work in works.items()}, rounds=rounds)
    seconds = interleaved(works, rounds=rounds, warmup=1)
    return {k: gpu.Series(us=[1e6 * s for s in s], mode="eager") for k, s in seconds.items()}


def _work(
    model: nn.Module, x: torch.Tensor, grad: torch.Tensor, fresh: bool
) -> Callable[[], object]:
    """Forward and backward."""
    weights = list(model.parameters())

    def call() -> Any:
        for layer in model.modules() if fresh else ():
            if isinstance(layer, SparseLayer):
                layer.sparsity.forget()
        with torch.autocast(x.device.type, grad.dtype):
            y = model(x)
        return torch.autograd.grad(y, [x, *weights], grad)

    return call
