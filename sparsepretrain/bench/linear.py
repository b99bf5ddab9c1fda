"""One sparse linear layer, forward and backward, against nn.Linear (``suite=linear``).

The projection of the weight is part of every call, as in a run with one micro-batch per step.
Products are dense on zero-filled weights: what is measured is what a method costs, not a gain; or,
with ``backend=auto``, sparse where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsepretrain import registry
from sparsepretrain.bench import EVERYTHING, Choice, gpu
from sparsepretrain.bench.kernels import CUDA, Timed, Work, difference, draw, failure, skipped
from sparsepretrain.bench.timing import interleaved
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import Sparsifier, sparsify
from sparsepretrain.sparsity.layers import SparseLayer

__all__ = [
    "DENSE",
    "cases",
    "described",
    "draw",
    "durations",
    "timed",
    "timed_methods",
    "works_of",
]

LAYERS = {"GPT-2 124M": (768, 3072), "LLaMA 7B": (4096, 11008)}
"""(in_features, out_features)."""
TOKENS = 16384
DENSE = "nn.Linear"
CPU = torch.device("cpu")
TOLERANCE = 1e-2
"""Most that sparse products may differ from emulated ones, over the largest value: two roundings
to bf16."""

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


def cases(quick: bool, choice: Choice = EVERYTHING) -> list[Timed | Work]:
    """Every method on every layer; without a GPU these are skipped, and a tiny one is timed."""
    if not torch.cuda.is_available():
        found = [skipped(_title(name, choice), []) for name in LAYERS]
        return [*found, partial(_layer, "tiny", (64, 128), 64, CPU, 2, choice)]
    rounds = 5 if quick else 25
    return [
        partial(_layer, name, sizes, TOKENS, CUDA, rounds, choice) for name, sizes in LAYERS.items()
    ]


def _layer(
    name: str,
    sizes: tuple[int, int],
    tokens: int,
    device: torch.device,
    rounds: int,
    choice: Choice,
) -> list[Timed]:
    build, shape = partial(nn.Linear, *sizes), [tokens, *sizes]
    return timed(_title(name, choice), shape, build, (tokens, sizes[0]), device, rounds, choice)


def _title(layer: str, choice: Choice) -> str:
    return f"linear, {layer}, forward and backward{described(choice)}"


def described(choice: Choice) -> str:
    """How products are computed, for the name of a case."""
    return f", bf16{choice.how}"


def timed(
    case: str,
    shape: list[int],
    build: Callable[[], nn.Module],
    inputs: Sequence[int],
    device: torch.device,
    rounds: int,
    choice: Choice,
    *,
    targets: Sequence[str] = ("*",),
    fresh: bool = True,
    training: bool = True,
) -> list[Timed]:
    """A module of every method beside the same with nn.Linear, as rows of a suite.

    Where sparse products are allowed, what they give is compared with emulated ones first.

    Args:
        case: its name in the results.
        shape: what the results tell of its size.
        build: see :func:`works_of`.
        inputs: shape of the module's input.
        device: CUDA, or the CPU in a rehearsal.
        rounds: interleaved.
        choice: methods, backend and precision.
        targets: layers of the module that become sparse.
        fresh: see :func:`works_of`, as for ``training``.
        training: forward and backward; else the forward alone.
    """

    def works(backend: str) -> dict[str, Callable[[], Any]]:
        rest: Any = {"targets": [*targets], "total_steps": 1000, "backend": backend}
        rest["precision"] = choice.precision(device)
        variants: dict[str, Sparsify | None] = {DENSE: None}
        for label, (method, options) in timed_methods(choice.methods).items():
            variants[label] = partial(sparsify, method=method, **rest, **options)
        return works_of(build, inputs, device, variants, fresh=fresh, training=training)

    try:
        ours = works(choice.backend)
        rows = {label: Timed(case=case, shape=shape, impl=label) for label in ours}
        for label, emulated in works("emulate").items() if choice.backend != "emulate" else ():
            if label == DENSE:
                continue
            rows[label].max_err = error = difference([*ours[label]()], [*emulated()])
            if not error <= TOLERANCE:
                rows[label].status = "wrong"
                del ours[label]
        measured = durations(ours, device, rounds)
    except torch.OutOfMemoryError:
        return [skipped(case, shape, "skipped: out of memory")]
    except RuntimeError as error:
        return [skipped(case, shape, failure(error))]
    for label, series in measured.items():
        rows[label].mode, rows[label].us = series.mode, series.percentiles()
        rows[label].ratio_to = {DENSE: gpu.median_ratio(measured[DENSE], series)}
    return list(rows.values())


def works_of(
    build: Callable[[], nn.Module],
    shape: Sequence[int],
    device: torch.device,
    variants: Mapping[str, Sparsify | None],
    *,
    dtype: torch.dtype = torch.bfloat16,
    fresh: bool = True,
    training: bool = True,
) -> dict[str, Callable[[], Any]]:
    """Forward and backward of a module and of what ``variants`` make of it, with equal numbers.

    Args:
        build: the module, dense.
        shape: of its input, (…, tokens of a sample, in_features).
        device: CUDA, or the CPU in a rehearsal.
        variants: name -> makes layers of a module sparse; None: it stays as it is.
        dtype: of the products.
        fresh: whether the weights are projected in every call, as with one micro-batch per step;
            else their operands are stored.
        training: forward and backward; else the forward alone, without gradients.
    """
    torch.manual_seed(0)
    x = torch.randn(*shape, device=device, requires_grad=training)
    works = {}
    for label, make in variants.items():
        torch.manual_seed(1)
        model = nn.Sequential(build().to(device))  # a layer that is replaced needs a parent
        if make is not None:
            sparsifier = make(model)
            if not fresh:
                sparsifier.store_operands(dtype)
        works[label] = _work(model, x, dtype, fresh, training)
    return works


def _work(
    model: nn.Module, x: Tensor, dtype: torch.dtype, fresh: bool, training: bool
) -> Callable[[], Any]:
    """The gradients of the input and of the weights; the output alone without ``training``."""
    weights = list(model.parameters())
    with torch.no_grad(), torch.autocast(x.device.type, dtype):
        grad = torch.randn_like(model(x))

    def call() -> Any:
        for layer in model.modules() if fresh else ():
            if isinstance(layer, SparseLayer):
                layer.sparsity.forget()
        with torch.set_grad_enabled(training), torch.autocast(x.device.type, dtype):
            y = model(x)
        return torch.autograd.grad(y, [x, *weights], grad) if training else (y,)

    return call


def durations(
    works: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int
) -> dict[str, gpu.Series]:
    """Interleaved times of ``works``."""
    if device.type == "cuda":
        return gpu.measure({name: [work] for name, work in works.items()}, rounds=rounds)
    seconds = interleaved(dict(works), rounds=rounds, warmup=1)
    return {k: gpu.Series(us=[1e6 * s for s in s], mode="eager") for k, s in seconds.items()}
