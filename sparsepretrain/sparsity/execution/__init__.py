"""How a layer multiplies: what the operands become, and the three products of them.

What the operands are belongs to the method (:class:`~sparsepretrain.sparsity.method.Row`); the
autograd function calls an execution and knows neither precision nor method.
"""

from __future__ import annotations

from typing import Any

from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.execution.base import (
    EMULATE,
    Convolution,
    Execution,
    Geometry,
    Linear,
    Operands,
)
from sparsepretrain.sparsity.execution.fp8 import FP8, SIMULATED, SimulatedFP8
from sparsepretrain.sparsity.execution.semi_structured import Backend

__all__ = [
    "EMULATE",
    "FP8",
    "SIMULATED",
    "Backend",
    "Convolution",
    "Execution",
    "Geometry",
    "Linear",
    "Operands",
    "SimulatedFP8",
    "backend_of",
    "execution_of",
]


def execution_of(precision: Any) -> Execution:
    """The execution of ``sparsify(precision=…)``, without sparse products.

    Raises:
        ConfigError: what does not exist, naming the argument.
    """
    if precision is None:
        return EMULATE
    if isinstance(precision, Execution):
        return precision
    given = {"name": precision} if isinstance(precision, str) else precision
    name = given.get("name", "fp8_sim") if isinstance(given, dict) else None
    if name in ("fp8", "fp8_sim"):
        return build(FP8 if name == "fp8" else SimulatedFP8, given, "precision")
    raise ConfigError(
        "precision must be None (follow autocast), 'fp8', 'fp8_sim' or a dict with its name and "
        f"recipe, got {precision!r}"
    )


def backend_of(backend: Any) -> Backend | None:
    """What chooses sparse products for ``sparsify(backend=…)``; None: all are emulated.

    Raises:
        ConfigError: what does not exist, naming the argument.
    """
    if isinstance(backend, Backend):
        return backend
    if backend == "emulate":
        return None
    if backend in ("semi_structured", "auto"):
        return Backend(backend)
    if backend in ("reference", "triton", "cpu", "cusparselt"):
        raise ConfigError(
            f"backend {backend!r} is one of single kernels (sparsepretrain.kernels); layers have "
            f"'emulate', 'semi_structured' and 'auto'"
        )
    raise ConfigError(
        "backend must be 'emulate' (dense products of sparse operands), 'semi_structured' (sparse "
        f"ones) or 'auto' (what is faster), got {backend!r}"
    )
