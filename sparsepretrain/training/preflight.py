"""What is known about a run before it starts: when it cannot do what it says, and what to note."""

from __future__ import annotations

from sparsepretrain import registry
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.policy import Method
from sparsepretrain.training.schedules import learning_rate, warmup_steps

PHASES = ("at", "until", "clipping", "dense_tail", "window")
"""Options of methods that say when a run trains sparse, as fractions of it."""


def require_a_sparse_step(run: Run) -> None:
    """Refuse a sparse method whose phases leave no step of the run in which it is sparse.

    Raises:
        ConfigError: names the options that decide.
    """
    implementation: type[Method] = registry.get("method", run.sparsity.name)
    try:
        method = implementation(run.sparsity, run.steps)
    except ConfigError as error:
        raise ConfigError([f"sparsity.{message}" for message in error.messages]) from error
    if not any(":" in operand for operand in method.operands().values()):
        return  # a dense baseline
    last = int(min(run.steps, method.window[1])) - 1
    # most phases, once entered, last to the end of the window: then the first look is enough
    if any(map(method.may_be_sparse, (last, *range(method.window[0], last)))):
        return
    keys = [key for key in PHASES if hasattr(run.sparsity, key)]
    raise ConfigError(
        f"sparsity={run.sparsity.name}: none of the {run.steps} steps would train sparse: change "
        f"{' or '.join(f'sparsity.{key}' for key in keys)}, or give more steps"
    )


def notes(run: Run) -> list[str]:
    """What a run does that its length makes unlikely to be meant, one line each."""
    found = []
    warmup = warmup_steps(run.schedule, run.steps)
    if warmup >= run.steps:
        share = learning_rate(run.schedule, 1.0, run.steps - 1, run.steps)
        found.append(
            f"the warm-up ({warmup:,} steps) is not over when the run ends ({run.steps:,} steps): "
            f"the learning rate reaches {share:.0%} of optim.lr; lower schedule.warmup"
        )
    if run.eval.batches != 0 and not run.eval.every:
        found.append("one evaluation only, at the end: eval.every=0")
    return found
