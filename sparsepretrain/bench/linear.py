"""One sparse linear layer, forward and backward, against nn.Linear (``suite=linear``).

The projection of the weight is part of every call, as in a run with one micro-batch per step.
Products are dense on zero-filled weights: what is measured is what a method costs, not a gain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparsepretrain import registry
from sparsepretrain.bench import gpu
from sparsepretrain.bench.kernels import Timed, details
from sparsepretrain.bench.timing import interleaved
from sparsepretrain.sparsity import sparsify
from sparsepretrain.sparsity.layers import SparseLayer

__all__ = ["cases", "details", "timed_methods"]

LAYERS = {"GPT-2 124M": (768, 3072), "LLaMA 7B": (4096, 11008)}
"""(in_features, out_features)."""
TOKENS = 16384


def timed_methods() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name in the results -> method and options: what every method says is worth timing."""
    names = sorted(registry.names("method"), key="dense".__ne__)  # the yardstick first
    methods: dict[str, Any] = {name: registry.get("method", name) for name in names}
    return {
        f"{name}, {label}" if label else name: (name, options)
        for name, method in methods.items()
        for label, options in method.timed.items()
    }


def cases(quick: bool) -> list[Timed]:
    """Every method on every layer; one tiny layer without a GPU."""
    if not torch.cuda.is_available():
        return _layer("tiny", (64, 128), 64, torch.device("cpu"), 2)
    rounds = 5 if quick else 25
    return [
        timed
        for name, sizes in LAYERS.items()
        for timed in _layer(name, sizes, TOKENS, torch.device("cuda"), rounds)
    ]


def _layer(
    name: str, sizes: tuple[int, int], tokens: int, device: torch.device, rounds: int
) -> list[Timed]:
    torch.manual_seed(0)
    x = torch.randn(tokens, sizes[0], device=device, requires_grad=True)
    grad = torch.randn(tokens, sizes[1], device=device, dtype=torch.bfloat16)
    works: dict[str, Callable[[], Any]] = {"nn.Linear": _work(nn.Linear(*sizes), x, grad)}
    for label, (method, options) in timed_methods().items():
        layer = nn.Sequential(nn.Linear(*sizes).to(device))
        sparsify(layer, method, targets=["*"], total_steps=1000, **options)
        works[label] = _work(layer, x, grad)
    if device.type == "cuda":
        measured = gpu.measure({k: [work] for k, work in works.items()}, rounds=rounds)
    else:
        seconds = interleaved(works, rounds=rounds, warmup=1)
        measured = {
            k: gpu.Series(us=[1e6 * s for s in series], mode="eager")
            for k, series in seconds.items()
        }
    return [
        Timed(
            case=f"linear, {name}, forward and backward, bf16",
            shape=[tokens, *sizes],
            impl=label,
            mode=series.mode,
            us=series.percentiles(),
            ratio_to={"nn.Linear": gpu.median_ratio(measured["nn.Linear"], series)},
        )
        for label, series in measured.items()
    ]


def _work(model: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward with a fresh projection."""
    model = model.to(x.device)
    weights = list(model.parameters())

    def call() -> Any:
        for layer in model.modules():
            if isinstance(layer, SparseLayer):
                layer.sparsity.forget()
        with torch.autocast(x.device.type, torch.bfloat16):
            y = model(x)
        return torch.autograd.grad(y, [x, *weights], grad)

    return call
