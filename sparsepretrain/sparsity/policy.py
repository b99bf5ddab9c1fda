"""The operand table: a method says what each of the three products of a linear layer sees.

    fprop   Y  = X · A(W)ᵀ
    dgrad   dX = P(G) · B(W)
    wgrad   dW = U(G)ᵀ · X,  then the optimiser receives J(dW, W)

A method is a subclass of :class:`Method` that overrides what differs from a dense layer. The file
must not import torch at the top level, so that configurations are checked without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from sparsepretrain.kernels import NoiseKey

FPROP, DGRAD, WGRAD = 0, 1, 2
"""Numbers of the products in noise keys."""


@dataclass(slots=True, kw_only=True)
class Window:
    """When the layers are sparse, as fractions of the run; dense outside."""

    start: float = 0.0
    """First sparse step = ⌊start·steps + ½⌋."""
    stop: float = 1.0
    """First dense step after it; 1: sparse to the end, and afterwards."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        if not 0 <= self.start < self.stop <= 1:
            yield "start", f"and stop need 0 ≤ start < stop ≤ 1, got {self.start} and {self.stop}"


@dataclass(slots=True, kw_only=True)
class MethodOptions:
    """Options that every method has; a method's ``Options`` adds its own."""

    name: str
    n: int = 2
    """Elements kept of every m."""
    m: int = 4
    """Group size."""
    targets: str | list[str] = "ffn"
    """Layers: an alias of the recipe (ffn, ffn_out, attention, all) or globs of module names."""
    window: Window = field(default_factory=Window)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        if self.m < 1:
            yield "m", f"must be ≥ 1, got {self.m}"
        elif not 1 <= self.n <= self.m:
            yield "n", f"must satisfy 1 ≤ n ≤ m (m = {self.m}), got {self.n}"
        if not self.targets:
            yield "targets", "must name at least one layer pattern"


class Projection(NamedTuple):
    """What the weight of one layer looks like for one optimiser step."""

    forward: Tensor | None
    """A(W), shape of W; None: the weight itself."""
    mask: Tensor | None
    """Bool, shape of W: the positions in use; what masked decay spares and flip rate compares.
    None: what :meth:`Method.mask` chooses, computed when it is asked for."""
    backward: Tensor | None = None
    """B(W), shape of W; None: the same as ``forward``."""
    wgrad_scale: Tensor | None = None
    """0-d factor of dW; None: 1."""


class Products(NamedTuple):
    """One row of the operand table, in words."""

    A: str = "W"
    """Forward weight."""
    B: str = "A"
    """Backward weight."""
    P: str = "G"
    """Output gradient of dgrad."""
    U: str = "G"
    """Output gradient of wgrad."""
    J: str = "dW"
    """What the optimiser receives."""


class Method:
    """A dense layer, and the base of every method.

    ``summary``, ``paper`` and ``products`` fill the table that ``sparsepretrain methods`` prints.
    """

    Options: ClassVar[type] = MethodOptions
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    products: ClassVar[Products] = Products()

    step: int = 0
    """Completed optimiser steps, kept up to date by the sparsifier; not for :meth:`project`."""

    def __init__(self, options: Any, total_steps: int | None = None) -> None:
        self.options = options
        self.total_steps = total_steps
        self.window = self.window_steps(options.window)
        if self.window[0] >= self.window[1]:
            first, stop = self.window
            raise ConfigError(
                f"window: no step is sparse (from {first} to {stop} of {total_steps})"
            )

    def steps_of(self, fraction: float, key: str) -> int:
        """⌊fraction·total_steps + ½⌋.

        Raises:
            ConfigError: the length of the run is not known; names ``key``.
        """
        if self.total_steps is None:
            raise ConfigError(f"{key} is a fraction of the run: sparsify needs total_steps")
        return math.floor(fraction * self.total_steps + 0.5)

    def window_steps(self, window: Window) -> tuple[int, float]:
        """(first sparse step, first dense step after it); sparse to the end is for ever."""
        start = self.steps_of(window.start, "window.start") if window.start else 0
        return start, math.inf if window.stop == 1 else self.steps_of(window.stop, "window.stop")

    def set_step(self, step: int) -> None:
        """Called with the completed steps; sets the phases, as booleans, that project reads."""
        self.step = step

    refresh: int = 1
    """Steps between two comparisons of masks, counted from the first sparse step."""

    @property
    def compares(self) -> bool:
        """Whether masks are compared after this step; between refreshes nothing can flip."""
        return (self.step - self.window[0]) % self.refresh == 0

    @property
    def sparse(self) -> bool:
        """Whether training products see the sparse operands, the window aside.

        Recorded as ``sparse``: the console and the plots show every change of it.
        """
        return not self.trains_dense

    def may_be_sparse(self, step: int) -> bool:
        """Whether training can be sparse after ``step`` completed steps, as the options say."""
        self.set_step(step)
        return self.window[0] <= step < self.window[1] and self.sparse

    def metrics(self) -> dict[str, float]:
        """Numbers of the method's own for the record; name -> value."""
        return {}

    @property
    def multiples(self) -> tuple[int, int]:
        """What (out_features, in_features) of a layer must be multiples of; or its channels."""
        return 1, self.options.m

    @property
    def pattern(self) -> tuple[int, int]:
        """(N, M) of the operand for now; a method may approach the one of its options."""
        return self.options.n, self.options.m

    @property
    def title(self) -> str:
        """Name and pattern for people, ``sste 2:4``; only the name where no product is N:M."""
        name, n, m = self.options.name, self.options.n, self.options.m
        return f"{name} {n}:{m}" if any(":" in x for x in self.operands().values()) else name

    @property
    def why_dense(self) -> str:
        """The phase outside the window that training is in, with its option; inside: empty."""
        start, stop = self.window
        if self.step < start:
            return f"until step {start} (window.start)"
        return f"since step {stop} ({self.ended_by})" if self.step >= stop else ""

    ended_by: str = "window.stop"
    """The option that ends sparse training."""

    mixes_outputs: ClassVar[bool] = False
    """Whether one group may hold any output channels; a grouped convolution keeps them apart."""

    def initial_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        """Persistent tensors of one layer, made once from its initial weight.

        Args:
            weight: the dense weight as stored.
            dim: axis of ``weight`` that holds in_features: groups run along it. Out_features are
                axis ``1 - dim``; a convolution's weight has two more axes, its kernel positions.
        """
        return {}

    def update_(
        self,
        weight: Tensor,
        dim: int,
        state: dict[str, Tensor],
        key: Callable[[int], NoiseKey],
    ) -> None:
        """Bring the persistent tensors up to date, in place; runs after every optimiser step.

        Args:
            weight: the master weight after the update, as stored.
            dim: axis of ``weight`` that holds in_features.
            state: the tensors of :meth:`initial_state`.
            key: noise stream of a product at this step.
        """

    def mask(self, weight: Tensor, dim: int) -> Tensor:
        """The mask that the method's rule chooses for ``weight``; bool, same shape."""
        return kernels.nm_mask(weight, *self.pattern, dim=dim)

    def project(
        self,
        weight: Tensor,
        dim: int,
        state: dict[str, Tensor],
        key: Callable[[int], NoiseKey],
    ) -> Projection:
        """A(W), B(W) and the mask; called once per optimiser step, or inside a compiled graph.

        A function of its arguments: what changes over time is in ``state`` (:meth:`update_`).

        Args:
            weight: the master weight as stored, fp32 (or wider).
            dim: axis of ``weight`` that holds in_features.
            state: the tensors of :meth:`initial_state`.
            key: noise stream of a product (FPROP, DGRAD, WGRAD) at this step.
        """
        return Projection(None, None)

    trains_dense: bool = False
    """Training products are dense for now, evaluation uses the projection (STEP's first phase)."""

    def build_optimizer(self, groups: list[dict[str, Any]], options: Any) -> Optimizer | None:
        """The optimiser that this method brings along; None: the configured one.

        Args:
            groups: parameter groups.
            options: of the group ``optim``.
        """
        return None

    def attached(self, optimizer: Optimizer, weights: list[Tensor]) -> None:
        """The sparsifier rides on ``optimizer`` from now on; ``weights`` are the sparse ones."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimiser step is complete; phases that it decides are read here."""

    prunes_dgrad: bool = False
    """Whether :meth:`dgrad_gradient` does anything."""
    samples_wgrad: bool = False
    """Whether :meth:`wgrad_gradient` does anything."""

    def dgrad_gradient(self, grad: Tensor, key: NoiseKey) -> Tensor:
        """P(G): the output gradient that dgrad sees; (…, out_features).

        Of a convolution: (samples, positions, out_channels).
        """
        return grad

    def wgrad_gradient(self, grad: Tensor, key: NoiseKey) -> Tensor:
        """U(G): the output gradient that wgrad sees; (tokens, out_features), fp32 or as given."""
        return grad

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        """J: change the accumulated, unscaled, clipped gradient in place before the update.

        Args:
            grad, weight, mask: of one layer, as stored.
            scale: loss scale still contained in ``grad`` (1, or a 0-d tensor for fused optimisers).
        """

    def adjust_weight_(self, weight: Tensor, mask: Tensor, lr: float) -> None:
        """Change the weight in place after the optimiser's own update (rarely needed)."""

    def operands(self) -> dict[str, str]:
        """What each product sees with these options: keys fprop, dgrad, wgrad.

        ``N:M`` stands where an operand has the pattern along the axis that the product reduces
        over, which is what sparse hardware needs.
        """
        n, m = self.pattern
        row = self.products
        dgrad = row.A if row.B == "A" else f"{row.B} {n}:{m}"
        gradient = f", {row.P} {n}:{m}" if self.prunes_dgrad else ""
        return {
            "fprop": "W" if row.A == "W" else f"{row.A} {n}:{m}",
            "dgrad": dgrad + gradient,
            "wgrad": f"{row.U} 2:4" if self.samples_wgrad else "G",
        }
