"""Base class of methods: options, a row of the operand table, and functions for its operands.

    fprop   Y  = Xf(X) · A(W)ᵀ
    dgrad   dX = P(G) · B(W)
    wgrad   dW = U(G)ᵀ · Xw(X),  then the optimizer receives J(dW, W)

A method is a subclass of :class:`Method` that overrides what differs from a dense layer. The file
must not import torch at the top level, so that configurations can be checked without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
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

FPROP, DGRAD, WGRAD = 0, 1, 2  # numbers of the matmuls in noise keys


class Operand(NamedTuple):
    """One operand of one matmul."""

    text: str  # formula
    pattern: tuple[int, int] | None = None  # (N, M) if N:M along the axis the matmul sums over
    axis: Literal["in", "out", "tokens"] | None = None  # that axis; set with a pattern

    def __str__(self) -> str:
        return f"{self.text} {':'.join(map(str, self.pattern))}" if self.pattern else self.text


W, X, G = Operand("W"), Operand("X"), Operand("G")  # unchanged
MVUE = Operand("MVUE(G)", (2, 4), "tokens")  # an unbiased estimate (arXiv:2203.10991)


class Row(NamedTuple):
    """One row of the table; the default is a dense layer."""

    A: Operand = W  # forward weight
    B: Operand = Operand("A")  # backward weight; the text `A` means that A serves both matmuls
    Xf: Operand = X  # input of fprop
    Xw: Operand = X  # input of wgrad
    P: Operand = G  # output gradient of dgrad
    U: Operand = G  # output gradient of wgrad
    J: Operand = Operand("dW")  # gradient that the optimizer receives

    @property
    def products(self) -> dict[str, tuple[Operand, ...]]:
        """Matmul -> its operands: weights (in wgrad G) always, X and other G if they change."""
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
        """The matmuls with an N:M operand, which sparse hardware could run."""
        return [k for k, operands in self.products.items() if any(o.pattern for o in operands)]


_HEADS = ("A(W)", "B(W)", "Xf(X)", "Xw(X)", "P(G)", "U(G)", "J(dW, W)")
COLUMNS = dict(zip(Row._fields, _HEADS, strict=True))  # field of a row -> head of its column


class Phase(NamedTuple):
    """Phase of the next step, for the whole model."""

    training: bool = True  # training matmuls see the row's operands, not W, X and G
    evaluation: bool = True  # evaluation, `densify` and proofs use A(W), not W
    why: str = ""  # reason for dense training: until or since which step, by which option


@dataclass(slots=True, kw_only=True)
class Window:
    """Part of the run in which the layers are sparse, as fractions."""

    start: float = 0.0
    """First sparse step = ⌊start·steps + ½⌋."""
    stop: float = 1.0
    """First dense step after it; 1: sparse to the end, and afterwards."""

    def problems(self) -> Problems:
        """Yield range errors as (key, message)."""
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
        """Yield range errors as (key, message)."""
        if self.m >= 1 and not 1 <= self.n <= self.m:
            yield "n", f"must satisfy 1 ≤ n ≤ m (m = {self.m}), got {self.n}"
        if not self.targets:
            yield "targets", "must name at least one layer pattern"

    def two_of_four(self, what: str) -> Problems:
        """Yield an error unless the pattern is 2:4, the only one that ``what`` supports."""
        if 1 <= self.n <= self.m and (self.n, self.m) != (2, 4):
            key = "m" if self.m != 4 else "n"
            yield key, f"does not fit {what}: 2:4 only, got {self.n}:{self.m}"


class Projection(NamedTuple):
    """Operands of one weight for one optimizer step."""

    forward: Tensor | None  # A(W), shape of W; None: the weight itself
    mask: Tensor | None
    """Positions in use, which masked decay spares and the flip rate compares: bool, shape of W, or
    packed (:func:`sparsepretrain.kernels.pack_rows`). None: :meth:`Method.mask`, computed on
    demand."""
    backward: Tensor | None = None  # B(W), shape of W; None: the same as `forward`
    wgrad_scale: Tensor | None = None  # 0-d factor of dW; None: 1


class Layer(Protocol):
    """A sparse layer as its method sees it; tensors of the method are attributes too."""

    dim: int
    """Axis of in_features, or of the input channels, in the stored weight."""

    @property
    def out(self) -> Tensor | None:
        """Memory into which ``project`` may write A(W), which it then returns; None: no memory.

        It has the shape of W and the dtype of the matmuls, and saves a cast and a copy per step.
        """

    @property
    def step(self) -> int | Tensor:
        """Completed optimizer steps: an integer, or a 0-d int64 tensor in compiled graphs."""

    def key(self, product: int) -> NoiseKey:
        """Return the noise stream of a matmul at this step."""

    def __getattr__(self, name: str) -> Any:
        """Return a tensor of :meth:`Method.initial_state`."""


class FineTuning(NamedTuple):
    """Fine-tuning of checkpoints of a method."""

    method: str | None = None
    """Method to fine-tune with; None: the same one."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Options that change when a checkpoint is fine-tuned with this method."""
    same: tuple[str, ...] = ()
    """Options that must not change if stored weights are to keep their meaning, besides pattern,
    targets and window."""


class Method:
    """Base class of methods; by itself a dense layer.

    ``summary``, ``paper``, ``phases`` and :attr:`sparse_row` fill the table that
    ``sparsepretrain methods`` prints.
    """

    Options: ClassVar[type] = MethodOptions
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    phases: ClassVar[str] = "always"  # part of the run that uses `sparse_row`, in a few words
    finetuning: ClassVar[FineTuning] = FineTuning()
    settles: ClassVar[str | None] = None  # option with the start of the last phase, a fraction
    layer_kinds: tuple[str, ...] = ("linear", "convolution", "grouped convolution")
    """Kinds of layers that the method supports."""
    differentiable: ClassVar[bool] = False
    """True if :meth:`project` runs under autograd in each training forward, for trained Parameters.
    A receives dA, and nothing passes straight through: use operations that have gradients."""
    packed_masks: bool = False  # ``adjust_*`` take masks that are packed by rows
    needs_whole: bool = False
    """True if ``project`` or ``update_`` read more than whole groups of rows (sums, draws by
    position). FSDP then gathers the weight for them."""
    scalars: ClassVar[dict[str, int]] = {}  # saved integers of the model, with initial values

    phase: Phase = Phase()  # of the next step
    row: Row = Row()  # operands of training matmuls in this phase
    changes: tuple[bool, ...] = (False,) * 4
    """True where Xf, Xw, P and U differ from X and G in this phase."""
    refresh: int = 1  # steps between two comparisons of masks, counted from the first sparse step

    def __init__(self, options: Any, total_steps: int | None = None) -> None:
        self.options = options
        self.total_steps = total_steps
        self.refresh = getattr(options, "refresh", self.refresh)
        self.step = 0  # completed optimizer steps; `project` reads the step of the layer
        cls = type(self)
        self.on_gradient = cls.adjust_gradient_ is not Method.adjust_gradient_
        self.on_weight = cls.adjust_weight_ is not Method.adjust_weight_
        self.state = dict(self.scalars)  # values of `scalars`, which `after_step` may change
        self.window = self.window_steps(options.window)
        if self.window[0] >= self.window[1]:
            span = "from {} to {} of {}".format(*self.window, total_steps)
            raise ConfigError([("window", f": no step is sparse ({span})")])
        part = getattr(options, self.settles) if self.settles else 0
        self.settled = max(self.steps_of(part, str(self.settles)), self.window[0])
        """First step of the last phase."""

    @classmethod
    def keeps_function(cls, options: Any, theirs: dict[str, Any]) -> bool:
        """Return True if stored weights compute the same function in a run with other options.

        If not, the new run starts from the weights that the finished run evaluates with.

        Args:
            options: of the new run.
            theirs: of the finished run, as plain values.
        """
        if cls.settles is not None and getattr(options, cls.settles) > 0:
            return False
        if options.window != Window() or theirs["window"] != {"start": 0.0, "stop": 1.0}:
            return False
        keys = ("name", "n", "m", "targets", *cls.finetuning.same)
        return all(key in theirs and getattr(options, key) == theirs[key] for key in keys)

    def steps_of(self, fraction: float, key: str) -> int:
        """Return ⌊fraction·total_steps + ½⌋; ConfigError with ``key`` if total_steps is None."""
        if not fraction:
            return 0
        if self.total_steps is None:
            raise ConfigError([(key, " is a fraction of the run: sparsify needs total_steps")])
        return math.floor(fraction * self.total_steps + 0.5)

    def window_steps(self, window: Window) -> tuple[int, float]:
        """Return the first sparse step and the first dense step after it; ∞: no end."""
        start = self.steps_of(window.start, "window.start")
        return start, math.inf if window.stop == 1 else self.steps_of(window.stop, "window.stop")

    def set_step(self, step: int) -> None:
        """Enter the phase after ``step`` completed steps, or after :attr:`state` changed."""
        self.step = step
        self.phase = self.phase_of(step)
        row = self.row = self.present_row if self.phase.training else Row()
        self.changes = row.Xf != X, row.Xw != X, row.P != G, row.U != G

    def phase_of(self, step: int) -> Phase:
        """Return the phase after ``step`` completed steps: dense outside the window."""
        start, stop = self.window
        if step < start:
            return Phase(False, False, f"until step {start} (window.start)")
        if step >= stop:
            return Phase(False, False, f"since step {stop} (window.stop)")
        return Phase()

    @property
    def compares(self) -> bool:
        """True if masks are compared after this step; between refreshes nothing can flip."""
        return (self.step - self.window[0]) % self.refresh == 0

    def may_be_sparse(self, step: int) -> bool:
        """Return True if training can be sparse after ``step`` steps, for some :attr:`scalars`."""
        self.set_step(step)
        undecided = bool(self.scalars) and self.window[0] <= step < self.window[1]
        return bool((self.sparse_row if undecided else self.row).sparse)

    @property
    def sparse_row(self) -> Row:
        """Operands of the last sparse phase."""
        return Row()

    @property
    def present_row(self) -> Row:
        """Operands of the present sparse phase."""
        return self.sparse_row

    def nm(self, text: str, axis: Literal["in", "out", "tokens"] = "in") -> Operand:
        """Return an operand with the pattern of the options."""
        return Operand(text, (self.options.n, self.options.m), axis)

    @property
    def pattern(self) -> tuple[int, int]:
        """(N, M) of present masks; some methods approach the pattern of their options."""
        return self.options.n, self.options.m

    @property
    def multiples(self) -> tuple[int, int]:
        """Required divisors of (out_features, in_features), or of the channels."""
        return 1, self.options.m

    def metrics(self) -> dict[str, float]:
        """Return the method's own numbers for the record: name -> value."""
        return {}

    def initial_state(self, weight: Tensor, layer: Layer) -> dict[str, Tensor]:
        """Return persistent tensors of one layer, made from its dense weight (fp32 or wider).

        The tensor under ``"beta"`` becomes ``layer.beta``. A ``torch.nn.Parameter`` is trained:
        build the optimizer after ``sparsify``.
        """
        return {}

    def update_(self, weight: Tensor, layer: Layer) -> None:
        """Update the layer's tensors in place, before the first forward and after every step.

        Only inside the window; ``weight`` is the master weight after the step, as stored.
        """

    def mask(self, weight: Tensor, dim: int) -> Tensor:
        """Return the mask that the method's rule chooses for ``weight``; bool, same shape."""
        return kernels.nm_mask(weight, *self.pattern, dim=dim)

    def project(self, weight: Tensor, layer: Layer) -> Projection:
        """Return A(W), B(W) and the mask of a master weight, as stored, fp32 or wider.

        Called once per optimizer step, in each forward, or in a graph. It must be a function of its
        arguments: state that changes over time is in the layer (:meth:`update_`).
        """
        return Projection(None, None)

    def fprop_input(self, x: Tensor) -> Tensor:
        """Return Xf(X), the input of fprop in training; (…, in_features). Called if Xf is not X."""
        return x

    def wgrad_input(self, x: Tensor) -> Tensor:
        """Return Xw(X), the input of wgrad; (tokens, in_features). Called if Xw is not X."""
        return x

    def dgrad_gradient(self, grad: Tensor, key: AnyKey) -> Tensor:
        """Return P(G), the output gradient of dgrad; (…, out_features). Called if P is not G."""
        return grad

    def wgrad_gradient(self, grad: Tensor, key: AnyKey, order: str | None = None) -> Tensor:
        """Return U(G), the output gradient of wgrad; (tokens, out_features), in fp32 or as given.

        Called if U is not G. By default :data:`MVUE` with the option ``estimator``. ``order`` is
        the memory order that the matmul reads; overrides may leave this parameter out.
        """
        estimator = getattr(self.options, "estimator", "approximate")
        return kernels.mvue(grad, dim=0, estimator=estimator, key=key, order=order)

    def residual(self, x: Tensor, layer: Layer) -> Tensor | None:
        """Return a linear function of X, (…, out_features), that is added to X·A(W)ᵀ, or None.

        Autograd differentiates it; ``densify`` folds it into the weight. By default it is
        X·(L·R)ᵀ of :meth:`low_rank`.
        """
        if (factors := self.low_rank(layer)) is None:
            return None
        from torch.nn.functional import linear

        return linear(linear(x, factors[1]), factors[0])

    def low_rank(self, layer: Layer) -> tuple[Tensor, Tensor] | None:
        """Return low-rank adapters L (out_features, rank) and R (rank, in_features), or None."""
        return None

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        """Apply J: change the accumulated, unscaled, clipped gradient in place before the step.

        ``scale``: loss scale still contained in ``grad`` (a 0-d tensor for fused optimizers).
        """

    def adjust_weight_(self, weight: Tensor, mask: Tensor, lr: float) -> None:
        """Change the weight in place after the optimizer's update (rarely needed)."""

    def build_optimizer(self, groups: list[dict[str, Any]], options: Any) -> Optimizer | None:
        """Return the optimizer that this method requires; ``options`` are those of ``optim``."""
        return None

    def attached(self, optimizer: Optimizer, weights: list[Tensor]) -> None:
        """Check an optimizer when it is attached; ``weights`` are the sparse ones."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Read phases that the optimizer decides, after each of its steps."""


def typical_row(name: str, method: type[Method]) -> Row:
    """Return the row of a method with default options, for tables of methods."""
    return method(method.Options(name=name), 1000).sparse_row


def title(method: Method) -> str:
    """Return name and pattern, such as ``sste 2:4``; only the name if no matmul is N:M."""
    name, n, m = method.options.name, method.options.n, method.options.m
    return f"{name} {n}:{m}" if method.sparse_row.sparse else name
