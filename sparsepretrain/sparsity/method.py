"""What a method is: options, a row of the operand table, and the functions behind its operands.

    fprop   Y  = Xf(X) · A(W)ᵀ
    dgrad   dX = P(G) · B(W)
    wgrad   dW = U(G)ᵀ · Xw(X),  then the optimiser receives J(dW, W)

A method is a subclass of :class:`Method` that overrides what differs from a dense layer. The file
must not import torch at the top level, so that configurations are checked without it.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError
from sparsepretrain.limits import Problems

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from sparsepretrain.kernels import AnyKey, NoiseKey
else:  # for annotations only
    AnyKey = NoiseKey = Optimizer = Tensor = Any

FPROP, DGRAD, WGRAD = 0, 1, 2  # numbers of the products in noise keys


class Operand(NamedTuple):
    """What one product sees in one place."""

    text: str  # for people
    pattern: tuple[int, int] | None = None  # (N, M) if N:M along the axis its product reduces over
    axis: Literal["in", "out", "tokens"] | None = None  # of fprop, dgrad, wgrad; with a pattern

    def __str__(self) -> str:
        return f"{self.text} {':'.join(map(str, self.pattern))}" if self.pattern else self.text


W, X, G = Operand("W"), Operand("X"), Operand("G")  # as they are
MVUE = Operand("MVUE(G)", (2, 4), "tokens")  # an unbiased estimate (arXiv:2203.10991)


class Row(NamedTuple):
    """One row of the table; the default is a dense layer."""

    A: Operand = W  # forward weight
    B: Operand = Operand("A")  # backward weight; with the text `A` the forward weight serves both
    Xf: Operand = X  # input of fprop
    Xw: Operand = X  # input of wgrad
    P: Operand = G  # output gradient of dgrad
    U: Operand = G  # output gradient of wgrad
    J: Operand = Operand("dW")  # what the optimiser receives

    @property
    def products(self) -> dict[str, tuple[Operand, ...]]:
        """Product -> its operands: weights (in wgrad G) always, X and other G where changed."""
        backward = Operand(self.A.text, *self.B[1:]) if self.B.text == "A" else self.B
        return {
            "fprop": (self.A, *[self.Xf] * (self.Xf != X)),
            "dgrad": (backward, *[self.P] * (self.P != G)),
            "wgrad": (self.U, *[self.Xw] * (self.Xw != X)),
        }

    @property
    def has_two_weights(self) -> bool:
        """True if B is not A; FSDP then gathers both."""
        return self.B.text != "A"

    @property
    def sparse(self) -> list[str]:
        """The products with an N:M operand, which sparse hardware could run."""
        return [k for k, operands in self.products.items() if any(o.pattern for o in operands)]


_HEADS = ("A(W)", "B(W)", "Xf(X)", "Xw(X)", "P(G)", "U(G)", "J(dW, W)")
COLUMNS = dict(zip(Row._fields, _HEADS, strict=True))  # field of a row -> head of its column


class Phase(NamedTuple):
    """What the next step does; one value per step for the whole model."""

    training: bool = True  # training products see the row's operands; else W, X and G
    evaluation: bool = True  # whether evaluation, `densify` and proofs use A(W)
    why: str = ""  # of dense training: until or since when, and the option that decides it


@dataclass(slots=True, kw_only=True)
class Window:
    """When the layers are sparse, as fractions of the run; dense outside."""

    start: float = 0.0
    """First sparse step = ⌊start·steps + ½⌋."""
    stop: float = 1.0
    """First dense step after it; 1: sparse to the end, and afterwards."""

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        if not 0 <= self.start < self.stop <= 1:
            yield "start", f"and stop need 0 ≤ start < stop ≤ 1, got {self.start} and {self.stop}"


@dataclass(slots=True, kw_only=True)
class MethodOptions:
    """Options that every method has; a method's ``Options`` adds its own."""

    name: str
    n: int = 2
    """Elements kept of every m."""
    m: Annotated[int, "≥ 1"] = 4
    """Group size."""
    targets: str | list[str] = "ffn"
    """Layers: an alias of the recipe (ffn, ffn_out, attention, all) or globs of module names."""
    window: Window = field(default_factory=Window)

    def problems(self) -> Problems:
        """Range errors as (key, message)."""
        if self.m >= 1 and not 1 <= self.n <= self.m:
            yield "n", f"must satisfy 1 ≤ n ≤ m (m = {self.m}), got {self.n}"
        if not self.targets:
            yield "targets", "must name at least one layer pattern"

    def two_of_four(self, what: str) -> Problems:
        """A possible pattern must be 2:4, because ``what`` exists for no other."""
        if 1 <= self.n <= self.m and (self.n, self.m) != (2, 4):
            key = "m" if self.m != 4 else "n"
            yield key, f"does not fit {what}: 2:4 only, got {self.n}:{self.m}"


class Projection(NamedTuple):
    """What the weight of one layer looks like for one optimiser step."""

    forward: Tensor | None  # A(W), shape of W; None: the weight itself
    mask: Tensor | None
    """The positions in use, which masked decay spares and flip rate compares: bool, shape of W, or
    packed (:func:`sparsepretrain.kernels.pack_rows`). None: what :meth:`Method.mask` chooses,
    computed when it is asked for."""
    backward: Tensor | None = None  # B(W), shape of W; None: the same as `forward`
    wgrad_scale: Tensor | None = None  # 0-d factor of dW; None: 1


class Layer(Protocol):
    """What a method sees of a sparse layer, beside the tensors that it gave it."""

    dim: int
    """Axis of in_features, or of the input channels, in the stored weight."""

    @property
    def out(self) -> Tensor | None:
        """Memory into which ``project`` may write A(W), which it then returns; None: no memory.

        It has the shape of W and the dtype of the matmuls, and saves a cast and a copy per step.
        """

    @property
    def step(self) -> Any:
        """Completed optimiser steps: an integer, or a 0-d int64 tensor in compiled graphs."""

    def key(self, product: int) -> NoiseKey:
        """Noise stream of a product at this step."""

    def __getattr__(self, name: str) -> Any:
        """A tensor of :meth:`Method.initial_state`."""


class Method:
    """A dense layer, and the base of every method.

    ``summary``, ``paper``, ``phases`` and :attr:`sparse_row` fill the table that
    ``sparsepretrain methods`` prints.
    """

    Options: ClassVar[type] = MethodOptions
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    phases: ClassVar[str] = "always"  # when the operands are those of `sparse_row`, in a few words
    flip_rule: ClassVar[str | None] = "magnitude"
    """``flip_rule`` of a dense run whose flips are comparable; None: no dense run has this rule."""
    function_options: ClassVar[tuple[str, ...]] = ()
    """Options that decide, beside pattern, targets and window, what stored weights stand for."""
    finetunes_as: ClassVar[str | None] = None  # method to fine-tune with; None: this one
    finetune_options: ClassVar[dict[str, Any]] = {}  # what fine-tuning with this method changes
    settles: ClassVar[str | None] = None  # option: fraction of the run where the last phase begins
    timed: ClassVar[dict[str, dict[str, Any]]] = {"": {}}  # variants worth timing: label -> options
    searches: ClassVar[str | None] = None  # option: steps between two searches, rare and long
    mixes_outputs: ClassVar[bool] = False  # one group may hold channels of all groups of a layer
    linear_only: bool = False  # whether convolutions are refused
    packed_masks: bool = False  # whether ``adjust_*`` take masks that are packed by rows
    needs_whole: bool = False
    """Whether more than (groups of) rows of the stored weight matter: sums, draws by position.
    Under FSDP a process gives a method the rows that it has; all of them where this is true."""
    scalars: ClassVar[dict[str, int]] = {}  # integers of the model, with initial values; saved

    phase: Phase = Phase()  # of the next step
    row: Row = Row()  # what training products see in the present phase
    changes: tuple[bool, ...] = (False,) * 4
    """Whether sparse products see another X in fprop and wgrad, another G in dgrad and wgrad."""
    ends_by: str = "window.stop"  # option that ends the sparse steps
    refresh: int = 1  # steps between two comparisons of masks, counted from the first sparse step

    def __init__(self, options: Any, total_steps: int | None = None) -> None:
        self.options = options
        self.total_steps = total_steps
        self.refresh = getattr(options, "refresh", self.refresh)
        self.step = 0  # completed optimiser steps; not for `project`
        cls = type(self)  # whether J changes gradients, and weights after the update
        self.on_gradient = cls.adjust_gradient_ is not Method.adjust_gradient_
        self.on_weight = cls.adjust_weight_ is not Method.adjust_weight_
        self.updates = cls.update_ is not Method.update_
        self.takes_order = "order" in inspect.signature(cls.wgrad_gradient).parameters
        self.state = dict(self.scalars)  # the integers of `scalars`; `after_step` may change them
        self.window = self.window_steps(options.window)
        if self.window[0] >= self.window[1]:
            span = "from {} to {} of {}".format(*self.window, total_steps)
            raise ConfigError([("window", f": no step is sparse ({span})")])
        part = getattr(options, self.settles) if self.settles else 0
        self.settled = max(self.steps_of(part, str(self.settles)), self.window[0])
        """First step of the last phase."""

    @classmethod
    def typical_row(cls, name: str) -> Row:
        """The row with default options, for tables of methods."""
        return cls(cls.Options(name=name), 1000).sparse_row

    @classmethod
    def keeps_function(cls, options: Any, theirs: dict[str, Any]) -> bool:
        """Whether stored weights mean the same to a new run as to the finished one they are of.

        If not, a new run with ``options`` starts from the weights that the other one, of the plain
        values ``theirs``, evaluates with.
        """
        if cls.settles is not None and getattr(options, cls.settles) > 0:
            return False
        if options.window != Window() or theirs["window"] != {"start": 0.0, "stop": 1.0}:
            return False
        keys = ("name", "n", "m", "targets", *cls.function_options)
        return all(key in theirs and getattr(options, key) == theirs[key] for key in keys)

    def steps_of(self, fraction: float, key: str) -> int:
        """⌊fraction·total_steps + ½⌋; a ConfigError names ``key`` if the length is not known."""
        if not fraction:
            return 0
        if self.total_steps is None:
            raise ConfigError([(key, " is a fraction of the run: sparsify needs total_steps")])
        return math.floor(fraction * self.total_steps + 0.5)

    def window_steps(self, window: Window) -> tuple[int, float]:
        """(first sparse step, first dense step after it); sparse to the end is for ever."""
        start = self.steps_of(window.start, "window.start")
        return start, math.inf if window.stop == 1 else self.steps_of(window.stop, "window.stop")

    def set_step(self, step: int) -> None:
        """Called with the completed steps when they or :attr:`state` changed; sets the phase."""
        self.step = step
        self.phase = self.phase_of(step)
        row = self.row = self.present_row if self.phase.training else Row()
        self.changes = row.Xf != X, row.Xw != X, row.P != G, row.U != G

    def phase_of(self, step: int) -> Phase:
        """The phase after ``step`` completed steps: dense outside the window."""
        start, stop = self.window
        if step < start:
            return Phase(False, False, f"until step {start} (window.start)")
        if step >= stop:
            return Phase(False, False, f"since step {stop} ({self.ends_by})")
        return Phase()

    @property
    def compares(self) -> bool:
        """Whether masks are compared after this step; between refreshes nothing can flip."""
        return (self.step - self.window[0]) % self.refresh == 0

    def may_be_sparse(self, step: int) -> bool:
        """Whether training can be sparse after ``step`` steps; what :attr:`scalars` decide may."""
        self.set_step(step)
        undecided = bool(self.scalars) and self.window[0] <= step < self.window[1]
        return bool((self.sparse_row if undecided else self.row).sparse)

    @property
    def sparse_row(self) -> Row:
        """What the products see once the layers are sparse; in the last phase if they differ."""
        return Row()

    @property
    def present_row(self) -> Row:
        """What training products see now that the layers are sparse."""
        return self.sparse_row

    def nm(self, text: str, axis: Literal["in", "out", "tokens"] = "in") -> Operand:
        """An operand with the pattern of the options."""
        return Operand(text, (self.options.n, self.options.m), axis)

    @property
    def pattern(self) -> tuple[int, int]:
        """(N, M) of masks for now; a method may approach the one of its options."""
        return self.options.n, self.options.m

    @property
    def title(self) -> str:
        """Name and pattern for people, ``sste 2:4``; only the name where no product is N:M."""
        name, n, m = self.options.name, self.options.n, self.options.m
        return f"{name} {n}:{m}" if self.sparse_row.sparse else name

    @property
    def multiples(self) -> tuple[int, int]:
        """What (out_features, in_features) of a layer must be multiples of; or its channels."""
        return 1, self.options.m

    def metrics(self) -> dict[str, float]:
        """Numbers of the method's own for the record; name -> value."""
        return {}

    def initial_state(self, weight: Tensor, layer: Layer) -> dict[str, Tensor]:
        """Persistent tensors of one layer, made once from its dense weight (fp32 or wider).

        What is called ``beta`` here is ``layer.beta`` from then on. A ``torch.nn.Parameter`` among
        them is trained: build the optimiser after ``sparsify``.
        """
        return {}

    def update_(self, weight: Tensor, layer: Layer) -> None:
        """Bring the layer's tensors up to date, before the first forward and after every step.

        In place, inside the window; ``weight`` is the master weight after the update, as stored.
        """

    def mask(self, weight: Tensor, dim: int) -> Tensor:
        """The mask that the method's rule chooses for ``weight``; bool, same shape."""
        return kernels.nm_mask(weight, *self.pattern, dim=dim)

    def project(self, weight: Tensor, layer: Layer) -> Projection:
        """A(W), B(W) and the mask of a master weight, as stored, fp32 or wider.

        Called once per optimiser step, per forward, or in a graph. A function of its arguments:
        what changes over time is in the layer (:meth:`update_`).
        """
        return Projection(None, None)

    def fprop_input(self, x: Tensor) -> Tensor:
        """Xf(X): the input that fprop sees in training; (…, in_features). Called for a row's Xf."""
        return x

    def wgrad_input(self, x: Tensor) -> Tensor:
        """Xw(X): the input that wgrad sees; (tokens, in_features). Called for a row's Xw."""
        return x

    def dgrad_gradient(self, grad: Tensor, key: AnyKey) -> Tensor:
        """P(G): what dgrad sees; (…, out_features or out_channels). Called for a row's P."""
        return grad

    def wgrad_gradient(self, grad: Tensor, key: AnyKey, order: str | None = None) -> Tensor:
        """U(G): what wgrad sees; (tokens, out_features), fp32 or as given. Called for a row's U.

        Here :data:`MVUE`, by the option ``estimator`` if there is one, in the memory ``order`` that
        is asked for; methods of your own may leave that parameter out.
        """
        estimator = getattr(self.options, "estimator", "approximate")
        return kernels.mvue(grad, dim=0, estimator=estimator, key=key, order=order)

    def residual(self, x: Tensor, layer: Layer) -> Tensor | None:
        """What is added to X·A(W)ᵀ by ordinary autograd; (…, out_features). None: nothing."""
        return None

    def low_rank(self, layer: Layer) -> tuple[Tensor, Tensor] | None:
        """The residual as L (out_features, rank) and R (rank, in_features): X·(L·R)ᵀ."""
        return None

    def fold(self, layer: Layer) -> Tensor | None:
        """The residual as a matrix (shape of the stored weight) that ``densify`` adds."""
        if (factors := self.low_rank(layer)) is None:
            return None
        product = factors[0] @ factors[1]
        return product if layer.dim == 1 else product.t()

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        """J: change the accumulated, unscaled, clipped gradient in place before the update.

        ``scale``: still contained in ``grad`` (1, or a 0-d tensor for fused optimisers).
        """

    def adjust_weight_(self, weight: Tensor, mask: Tensor, lr: float) -> None:
        """Change the weight in place after the optimiser's own update (rarely needed)."""

    def build_optimizer(self, groups: list[dict[str, Any]], options: Any) -> Optimizer | None:
        """The optimiser that this method brings along; ``options`` are those of ``optim``."""
        return None

    def attached(self, optimizer: Optimizer, weights: list[Tensor]) -> None:
        """The sparsifier rides on ``optimizer`` from now on; ``weights`` are the sparse ones."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimiser step is complete; phases that it decides are read here."""
