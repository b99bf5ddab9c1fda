"""Time one sparse linear layer, forward and backward, against nn.Linear.

Every call projects the weight, as in a run with one micro-batch per step. With the default,
``--sparse-matmuls emulate``, matmuls are dense on zero-filled weights: the overhead of a method.
With ``--sparse-matmuls auto`` matmuls are sparse where that is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import harness
from harness import CPU, CUDA, Case, Options, Work, difference, interleave, main, timed
from sparsepretrain import registry
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import sparsify
from sparsepretrain.sparsity.engine.layers import SparseLayer
from sparsepretrain.sparsity.method import Method

LAYERS = {"GPT-2 124M": (768, 3072), "LLaMA 7B": (4096, 11008)}
"""(in_features, out_features)."""
TOKENS = 16384
DENSE = "nn.Linear"


def works(options: Options) -> dict[str, Work]:
    """Return a work per layer; without a GPU for a tiny one."""
    found: dict[str, Work] = {}
    sizes, tokens, device, rounds = LAYERS, TOKENS, CUDA, 5 if options.quick else 25
    if not torch.cuda.is_available():
        sizes, tokens, device, rounds = {"tiny": (64, 128)}, 64, CPU, 2
    for name, (inner, outer) in sizes.items():
        build, inputs = partial(nn.Linear, inner, outer), (tokens, inner)
        title = f"linear, {name}, forward and backward, bf16{options.label}"
        found[name] = partial(compare, title, build, inputs, device, rounds, options)
    return found


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "asp": {"": {"at": 0.0}},
    "sste": {"mvue=none": {"mvue": "none"}, "": {}},
    "step": {"dense phase": {"clipping": [1.0, 1.0]}, "sparse phase": {"clipping": [0.0, 0.0]}},
    "tsrste": {"mvue=none": {"mvue": "none"}, "": {}},
}
"""Method -> variants to time: label -> options; other methods are timed with their defaults."""


def timed_methods(
    only: Sequence[str] = (), *, with_backward: bool = False
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return label -> (method, options) of all timed variants, or of ``only`` and dense.

    ``with_backward``: without methods that learn from losses alone.
    """
    names = sorted(registry.names("method"), key="dense".__ne__)  # the baseline first
    if wrong := [name for name in only if name not in names]:
        raise ConfigError(f"no method {wrong[0]!r}{registry.suggestion(wrong[0], names)}")
    names = [name for name in names if not only or name in ("dense", *only)]
    if with_backward:
        names = [name for name in names if not _method(name).follows_policy]
    return {
        f"{name}, {label}" if label else name: (name, options)
        for name in names
        for label, options in VARIANTS.get(name, {"": {}}).items()
    }


def _method(name: str) -> type[Method]:
    found: type[Method] = registry.get("method", name)
    return found


def compare(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Sequence[int],
    device: torch.device,
    rounds: int,
    options: Options,
    *,
    targets: Sequence[str] = ("*",),
    stored: bool = False,
    training: bool = True,
) -> list[Case]:
    """Time a module with every method against the same module with nn.Linear.

    Results of sparse matmuls are compared with emulated ones first.

    Args:
        name: name of the module.
        build: returns the dense module.
        inputs: shape of the input.
        device: CUDA, or the CPU in a rehearsal.
        rounds: interleaved timing rounds.
        options: methods, sparse matmuls and precision.
        targets: layers that become sparse.
        stored: store operands once instead of projecting in every call.
        training: forward and backward; else the forward alone.
    """

    def calls(sparse_matmuls: str) -> dict[str, Callable[[], Any]]:
        rest: Any = {"targets": [*targets], "total_steps": 1000, "sparse_matmuls": sparse_matmuls}
        rest["precision"] = options.precision(device)
        torch.manual_seed(0)
        x = torch.randn(*inputs, device=device, requires_grad=training)
        found: dict[str, Callable[[], Any]] = {}
        for label, (method, chosen) in {DENSE: ("", {}), **methods}.items():
            torch.manual_seed(1)
            model = nn.Sequential(build().to(device))  # replaced layers need a parent
            if label != DENSE:
                sparsifier = sparsify(model, method, **rest, **chosen)
                sparsifier.detach()  # no optimizer is forgotten here: looking for one would wait
                if stored:
                    sparsifier.store_operands(torch.bfloat16)
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
                grad = torch.randn_like(model(x))
            found[label] = partial(_call, model, x, grad, stored, training)
        return found

    methods = timed_methods(options.methods, with_backward=True)
    ours, errors, wrong = calls(options.sparse_matmuls), dict[str, float](), []
    for label, emulated in calls("emulate").items() if options.sparse_matmuls != "emulate" else ():
        if label == DENSE:
            continue
        errors[label] = error = difference([*ours[label]()], [*emulated()])
        if not error <= harness.TOLERANCE:
            status = f"wrong: differs from emulated matmuls by {error:.3g}"
            wrong.append(Case(name=f"{name}, {label}", status=status))
            del ours[label]
    series = interleave(ours, rounds, device=device, warmup=1)
    dense = {DENSE: series[DENSE]}
    found = [
        timed(f"{name}, {label}", each, dense, max_err=errors.get(label))
        for label, each in series.items()
    ]
    return [*found, *wrong]


def _call(
    model: nn.Module, x: torch.Tensor, grad: torch.Tensor, stored: bool, training: bool
) -> Any:
    for layer in () if stored else model.modules():
        if isinstance(layer, SparseLayer):
            layer.operands.clear()
    with torch.set_grad_enabled(training), torch.autocast(x.device.type, torch.bfloat16):
        y = model(x)
    trained = [p for p in model.parameters() if p.requires_grad]  # learned masks freeze weights
    return torch.autograd.grad(y, [x, *trained], grad) if training else (y,)


if __name__ == "__main__":
    sys.exit(main("linear", works, methods=True))
