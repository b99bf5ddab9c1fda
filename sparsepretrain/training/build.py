"""From a checked configuration to the objects of a run; the same steps for real and dry runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from sparsepretrain import registry
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError
from sparsepretrain.optim import build_optimizer
from sparsepretrain.sparsity import MethodOptions, Sparsifier, sparsify_with
from sparsepretrain.tasks import Task
from sparsepretrain.training.precision import compute_dtype, fp8_recipe


def build_model(run: Run, task: Task, device: torch.device) -> nn.Module:
    """The model on ``device`` with the initial weights of ``run.seed``.

    Weights are drawn on the CPU, so that they do not depend on the device.
    """
    torch.manual_seed(run.seed)
    if device.type == "meta":
        with device:
            return task.build_model()
    return task.build_model().to(device)


def sparsify_model(run: Run, task: Task, model: nn.Module) -> Sparsifier:
    """Apply the group ``sparsity``; errors name the configuration's keys."""
    options: MethodOptions = run.sparsity
    try:
        return sparsify_with(
            model,
            options,
            targets=resolve_targets(options.targets, task.roles),
            seed=run.seed,
            total_steps=run.steps,
            precision=fp8_recipe(run.precision),
        )
    except ConfigError as error:
        raise error.under("sparsity") from error


def attach_optimizer(run: Run, model: nn.Module, sparsifier: Sparsifier) -> Optimizer:
    """The optimiser of a run, with the method riding on it, and operands stored for it."""
    optimizer = build_optimizer(model, run.optim, sparsifier.method.build_optimizer)
    sparsifier.attach(optimizer)
    sparsifier.store_operands(compute_dtype(run.precision))
    return optimizer


def resolve_targets(targets: str | list[str], roles: dict[str, list[str]]) -> list[str]:
    """Replace the aliases among ``targets`` by the recipe's globs.

    Raises:
        ConfigError: a word that is neither an alias nor a pattern with ``*`` or a dot.
    """
    patterns: list[str] = []
    for target in [targets] if isinstance(targets, str) else targets:
        if target in roles:
            patterns += roles[target]
        elif any(c in target for c in "*?[.!"):
            patterns.append(target)
        else:
            near = registry.suggestion(target, roles)
            raise ConfigError([("targets", f": {target!r} is neither an alias nor a glob{near}")])
    return list(dict.fromkeys(patterns))


def pick_device(run: Run) -> torch.device:
    """The device of ``parallel.device``.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if run.parallel.device == "cuda" and not available:
        raise ConfigError("parallel.device=cuda, but torch sees no GPU: use auto or cpu")
    use_gpu = available and run.parallel.device != "cpu"
    return torch.device("cuda" if use_gpu else "cpu")
