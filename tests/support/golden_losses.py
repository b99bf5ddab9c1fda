"""Losses of 50 steps of every method on one small problem, kept in tests/golden/losses.json.

``make golden`` runs this file: it computes them anew, says what changed, and writes the file. A
change of a line is a change of what a method computes, and is explained where it is made.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import sparsepretrain as sp
from sparsepretrain import registry
from sparsepretrain.optim import AdamS, ASTAdamW, StepAdamW
from support import TESTS

FILE = TESTS / "golden" / "losses.json"
STEPS = 50

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dense": [{}],
    "ste": [{}, {"n": 1, "m": 8}, {"window": {"start": 0.2, "stop": 0.6}}],
    "srste": [
        {"decay": 0.02},
        {"decay": 0.02, "n": 1},
        {"decay": 0.02, "decay_ramp": 0.5},
        {"decay": 2.0, "decay_on": "weight"},
        {"decay": 0.02, "experts": 2},
    ],
    "step": [{}],
    "sste": [
        {},
        {"gamma": 0.3},
        {"mvue": "none"},
        {"mvue": "weight"},
        {"estimator": "exact"},
        {"beta": "l1", "beta_update": "step"},
        {"experts": 2},
    ],
    "tsrste": [{"decay": 0.02, "refresh": 5}, {"decay": 0.02, "refresh": 5, "mvue": "none"}],
    "sdgp": [{"epsilon": 1e-4}, {"variant": "magnitude"}, {"variant": "random"}],
    "asp": [{"at": 0.4}],
    "bimask": [{"decay": 0.02, "every": 10, "candidates": 5}],
    "mdgf": [{}, {"shape": "exponential"}],
    "sdgf": [{"n": 1, "m": 8}],
    "slope": [
        {},
        {"mask": "random"},
        {"adapters": {"rank": 8, "start": 0.5}},
        {"experts": 2},
    ],
    "ast": [{"decay": 0.02, "refresh": 5}, {"decay": 0.02, "slorb": 8}],
    "cast": [{"decay": 0.02}],
    "ternary": [{}, {"experts": 2}],
    "maskpro": [{"logit": 1.0}, {"logit": 1.0, "n": 3, "m": 8}],
    "maskllm": [{"penalty": 0.01}, {"n": 1, "prior": 0.0}],
    "proxsparse": [{}],
}
"""Options that 50 losses tell apart from the others; AdamW hides ``ste_scale``, a factor of dW.

``experts``: not an option, but the experts of the first layer, in one bank. A method that is not
listed is there with its defaults."""


class Experts(nn.Module):
    """Linear layers in one bank, each of which sees its share of the tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.empty(count, 32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self.bank), dim=1)
        return torch.cat([F.linear(part, self.bank[i]) for i, part in enumerate(parts)], dim=1)


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> method and options."""
    others = [name for name in registry.built_in("method") if name not in VARIANTS]
    return {
        " ".join([method, *(f"{k}={v}" for k, v in options.items())]): (method, options)
        for method in [*VARIANTS, *others]
        for options in VARIANTS.get(method, [{}])
    }


def tolerance(method: str, options: dict[str, Any]) -> list[float]:
    """Relative error to allow for, step by step, on another machine.

    Rounding does not grow here: initial weights changed by 1e-7 leave all losses within 2e-6, so
    1e-4 has room for any order of summation. Only where a sampled number lies on the border of two
    outcomes does rounding become visible; one such draw was seen to change a loss by 1e-2.
    """
    sampled = method in ("sste", "tsrste") and options.get("mvue") != "none"
    return [1e-4 if not sampled else 2e-3 if step < 10 else 5e-2 for step in range(STEPS)]


def losses(method: str, options: dict[str, Any], *, nudge: float = 0.0) -> list[float]:
    """50 steps of AdamW, two micro-batches each, in fp32 on one thread.

    Args:
        method: a name of the registry.
        options: its options, and ``experts``.
        nudge: relative change of the initial weights, to see how far rounding carries.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        experts = options.get("experts")
        first = Experts(experts) if experts else nn.Linear(16, 32)
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 4))
        teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        with torch.no_grad():
            for parameter in [*model.parameters(), *teacher.parameters()]:
                parameter.copy_(draw(*parameter.shape) * parameter.shape[-1] ** -0.5)
            for parameter in model.parameters():
                parameter.mul_(1 + nudge * torch.sign(parameter))
        targets = ["0.bank" if experts else "0", "2"]
        given = {key: value for key, value in options.items() if key != "experts"}
        sparsifier = sp.sparsify(model, method, targets=targets, total_steps=STEPS, seed=1, **given)
        optimizer = _optimizer(method, model)
        sparsifier.attach(optimizer)
        result = []
        for _ in range(STEPS):
            total = 0.0
            batches = [draw(4, 8, 16) for _ in range(2)]
            own = functools.partial(_losses, model, teacher, batches)
            if sparsifier.method.follows_policy:
                total = float(sparsifier.policy_step(lambda own=own: sum(own())))
            else:
                for loss in own():
                    loss.backward()
                    total += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            result.append(total)
        return result
    finally:
        torch.set_num_threads(threads)


def _losses(
    model: nn.Module, teacher: nn.Module, batches: list[torch.Tensor]
) -> Iterator[torch.Tensor]:
    for x in batches:
        yield (model(x) - teacher(x)).square().mean() / len(batches)


def _optimizer(method: str, model: nn.Module) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.01}
    if method in ("ast", "cast"):
        return {"ast": ASTAdamW, "cast": AdamS}[method](model.parameters(), **settings)
    if method != "step":
        return torch.optim.AdamW(model.parameters(), **settings)
    return StepAdamW(model.parameters(), clipping=(5, 20), frozen_bias_correction=True, **settings)


def compute() -> dict[str, list[float]]:
    """All cases, rounded to what fp32 holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: [float(f"{value:.7g}") for value in losses(*case)]
            for name, case in cases().items()
        }


def stored() -> dict[str, list[float]]:
    """The file's content; empty when there is none."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def deviation(old: list[float], new: list[float]) -> list[float]:
    """Relative difference, step by step."""
    return [abs(a - b) / abs(a) for a, b in zip(old, new, strict=True)]


def main() -> None:
    """Print what changed and write the file."""
    old, new = stored(), compute()
    for name in {**old, **new}:
        if name not in new or name not in old:
            print(f"{name}: {'removed' if name in old else 'new'}")
            continue
        errors = deviation(old[name], new[name])
        if any(errors):
            first = next(i for i, error in enumerate(errors) if error)
            worst = max(range(STEPS), key=errors.__getitem__)
            print(
                f"{name}: max deviation {errors[worst]:.1e} at step {worst + 1} "
                f"({old[name][worst]} → {new[name][worst]}), first at step {first + 1}"
            )
    same = sum(old.get(name) == values for name, values in new.items())
    print(f"{same} of {len(new)} unchanged")
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in new.items())
    FILE.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    sys.exit(main())
