"""Bias and variance of the gradients that a method estimates, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register
from sparsepretrain.sparsity.clock import ClockReading
from sparsepretrain.sparsity.engine.layers import SparseLayer, SparseMatmul
from sparsepretrain.sparsity.operand_table import G, X
from sparsepretrain.training.observer import Probe, ProbeOptions
from sparsepretrain.training.session import Session
from sparsepretrain.training.step import Step


@dataclass(slots=True, kw_only=True)
class EstimatorOptions(ProbeOptions):
    """Options of the probe of estimators."""

    draws: Annotated[int, "≥ 2"] = 8
    """Estimates of one gradient; the first is the one that the step uses."""


@register("probe", "estimator")
class Estimator(Probe["Session"]):
    """Estimated dW and dX of one layer in the first micro-batch against the exact ones.

    The layers take turns. With the mean ĝ of R estimates of g and their variance s² (summed over
    the entries), ``<matmul>_variance`` is s²/‖g‖², and ``<matmul>_bias`` is (‖ĝ - g‖² - s²/R)/‖g‖²,
    whose expectation is the squared relative bias: the mean of R estimates is off by s²/R even
    without one. The exact gradient is computed from X and G. A method that changes neither has no
    lines.
    """

    name = "estimator"
    Options = EstimatorOptions

    def __init__(self, options: EstimatorOptions, session: Session) -> None:
        super().__init__(options, session)
        compiled = session.setup.compiled
        if compiled != "none":
            raise ConfigError(
                f"compile: expected none with probe.estimator, got {compiled}. A compiled graph "
                "runs no hooks of layers: set compile=none or leave out the probe"
            )
        self._hook: Any = None
        self._name = ""
        self._seen: tuple[Tensor, Tensor] | None = None
        self._line: dict[str, Any] = {}

    def before_step(self, session: Session) -> None:
        """Watch input and output gradient of the layer whose turn it is."""
        self._line = {}
        self._seen = None
        if self.due(session):
            layers = self._layers(session)
            if not layers:
                return
            self._name = list(layers)[session.step // self.options.every % len(layers)]
            self._hook = layers[self._name].register_forward_hook(self._forward)

    def _layers(self, session: Session) -> dict[str, SparseLayer]:
        """Return the sparse layers; the modules of banks multiply by themselves."""
        layers = session.sparsifier.layers
        return {k: layer for k, layer in layers.items() if isinstance(layer, SparseLayer)}

    def _forward(self, layer: Any, args: Any, output: Tensor) -> None:
        def backward(grad: Tensor) -> None:
            self._seen = args[0].detach(), grad.detach().clone()

        self._hook.remove()  # the first micro-batch is enough
        if output.requires_grad:
            # A backward hook of the module would forbid in-place operations on its output.
            output.register_hook(backward)

    def after_backward(self, session: Session) -> None:
        """Draw the estimates of the step again, and further ones."""
        if self._seen is None:
            return
        wide = torch.promote_types(self._seen[0].dtype, torch.float32)
        x, grad = (value.to(wide) for value in self._seen)
        self._seen = None
        layer = self._layers(session)[self._name]
        exact = gradients(layer, x, grad, (session.step, 0), exact=True)
        if exact is None:
            return
        estimates = [
            gradients(layer, x, grad, (session.step, draw)) for draw in range(self.options.draws)
        ]
        row = session.sparsifier.method.phase.row
        pruned = {"dgrad": row.P != G, "wgrad": (row.Xw, row.U) != (X, G)}
        for index, (matmul, estimated) in enumerate(pruned.items()):
            if estimated:
                drawn = torch.stack([e[index] for e in estimates if e is not None]).double()
                self._line |= health(matmul, exact[index].double(), drawn)

    def after_step(self, session: Session, step: Step) -> None:
        """Write the line: the number of the step now includes it."""
        if self._line:
            self.write(session, {"layer": self._name, **self._line})


def gradients(
    layer: SparseLayer, x: Tensor, grad: Tensor, reading: ClockReading, *, exact: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Return dX and dW of training, or None if the method uses X and G unchanged.

    Args:
        layer: sparse layer in training mode.
        x: input of the layer.
        grad: gradient of its output, of the same dtype.
        reading: (completed steps, micro-batch), which key the draws.
        exact: use X and G instead of Xf(X), Xw(X), P(G) and U(G).
    """
    _, operands = layer.operands.get(layer.weight, x.dtype, True)
    row = layer.operands.method.phase.row
    if operands is None or (row.Xw, row.P, row.U) == (X, G, G):
        return None
    inputs, geometry = layer.geometry(x)
    matmuls = layer.operands.matmuls.now(x.dtype, True)
    source = inputs.detach().requires_grad_()
    # Its values are not read; its dtype is that of the gradient, which is not rounded again.
    target = torch.empty_like(layer.weight, dtype=x.dtype).requires_grad_()
    drawing = None if exact else layer.operands
    with torch.enable_grad():
        y = SparseMatmul.apply(
            source, target, None, operands, drawing, geometry, matmuls, reading, 0, None
        )
    dx, dw = torch.autograd.grad(y, (source, target), grad)
    return dx, dw


def health(matmul: str, exact: Tensor, drawn: Tensor) -> dict[str, float]:
    """Return relative variance and squared bias of R estimates, (R, …); empty if ``exact`` is 0."""
    size = float(exact.square().sum())
    if not size:
        return {}
    mean = drawn.mean(0)
    count = len(drawn)
    variance = float((drawn - mean).square().sum()) / (count - 1)
    off = float((mean - exact).square().sum())
    return {
        f"{matmul}_variance": variance / size,
        f"{matmul}_bias": (off - variance / count) / size,
    }
