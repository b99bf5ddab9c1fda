"""Base class of methods: options, a row of the operand table, and functions for its operands.

    fprop   Y  = Xf(X) · A(W)ᵀ
    dgrad   dX = P(G) · B(W)
    wgrad   dW = U(G)ᵀ · Xw(X),  then the optimizer receives J(dW, W)

A method subclasses :class:`Method` and overrides the operands that differ from a dense layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from sparsepretrain import kernels
from sparsepretrain.errors import Problems
from sparsepretrain.kernels import AnyKey
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.operand_table import Operand, Row
from sparsepretrain.sparsity.patterns import pattern_in, pattern_text
from sparsepretrain.sparsity.schedule import Phase, Schedule, Window


@dataclass(slots=True, kw_only=True)
class MethodOptions:
    """Options that every method has; ``Options`` of a method extends them."""

    name: str
    n: int = 2
    """Elements kept of every m."""
    m: Annotated[int, "≥ 1"] = 4
    """Group size."""
    targets: str | list[str] = "ffn"
    """Layers: an alias of the recipe (ffn, ffn_out, attention, all) or globs of module names."""
    patterns: dict[str, str] = field(default_factory=dict)
    """Alias or glob -> N:M or dense, of layers that do not have n:m. The first match decides."""
    window: Window = field(default_factory=Window)

    def problems(self) -> Problems:
        """Yield range errors as (key, message)."""
        if self.m >= 1 and not 1 <= self.n <= self.m:
            yield "n", f"must satisfy 1 ≤ n ≤ m (m = {self.m}), got {self.n}"
        if not self.targets:
            yield "targets", "must name at least one layer pattern"
        if self.patterns:
            yield from self._problems_of_patterns()

    def _problems_of_patterns(self) -> Problems:
        """Yield what is wrong with ``patterns``, also that the method lacks one of them."""
        known = [*replace(self, patterns={}).problems()]
        for glob, text in self.patterns.items():
            key = f"patterns.{glob}"
            try:
                pattern = pattern_in(text)
            except ValueError as error:
                yield key, str(error)
                continue
            if pattern is None:
                continue
            alone = replace(self, n=pattern[0], m=pattern[1], patterns={})
            for option, message in alone.problems():
                if (option, message) not in known:
                    yield key, f"= {text}: {option} {message}"


class Projection(NamedTuple):
    """Operands A and B of one weight, and its mask. To project is to compute them from W."""

    forward: Tensor | None  # A(W), shape of W; None: the weight itself
    mask: Tensor | None
    """Kept positions: masked decay applies to the others, and the flip rate compares them. A bool
    tensor of the shape of W, or packed (:func:`sparsepretrain.kernels.pack_rows`). None:
    :meth:`Method.mask` is called when a mask is needed."""
    backward: Tensor | None = None  # B(W), shape of W; None: the same as `forward`
    wgrad_scale: Tensor | None = None  # 0-d factor of dW; None: 1


class FineTuning(NamedTuple):
    """Rules for fine-tuning checkpoints of a method."""

    method: str | None = None
    """Method to fine-tune with; None: the same one."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Options that change when a checkpoint is fine-tuned with this method."""
    same: tuple[str, ...] = ()
    """Options, in addition to pattern and targets, that change the function computed from stored
    weights."""
    zero: str | None = None
    """Option that must be 0 in the new run; dots separate nested options."""


class Method:
    """Base class of methods; without overrides it is a dense layer.

    ``sparsepretrain methods`` prints ``summary``, ``paper`` and :attr:`sparse_row`.
    """

    Options: ClassVar[type] = MethodOptions
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    finetuning: ClassVar[FineTuning] = FineTuning()
    mask_rule: ClassVar[Literal["magnitude", "transposable", "other"]] = "magnitude"
    """Rule of :meth:`mask`; reports compare flip rates of one rule only."""
    layer_kinds: tuple[str, ...] = (
        "linear",
        "convolution",
        "grouped convolution",
        "bank",
        "transposed bank",
    )
    """Kinds of layers that the method supports; the slices of a bank are (out, in), those of a
    transposed one (in, out)."""
    differentiable: ClassVar[bool] = False
    """True if :meth:`project` runs under autograd in each training forward, to train Parameters.
    A then receives dA without a straight-through estimator: use differentiable operations."""
    optimizer_class: ClassVar[type[Optimizer] | None] = None
    """Class of the optimizer that trains sparse weights, which :meth:`guide_optimizer` is given;
    None: any."""
    trains: ClassVar[Literal["model", "method", "weights"]] = "model"
    """Parameters that are trained. method: those of the method; weights: the sparse weights;
    ``sparsify`` freezes the others."""
    trains_another_weight: ClassVar[bool] = False
    """True if A of training is another one than that of evaluation: :meth:`project_in_training`."""
    follows_policy: ClassVar[bool] = False
    """True if the Parameters of the method learn from losses, without a backward:
    :meth:`policy_gradient`, :meth:`Sparsifier.policy_step`."""
    prunes_at_end: ClassVar[bool] = False
    """True if the weights get their pattern with the last step of the run."""
    dense_training: ClassVar[str] = ""
    """Reason for which no matmul of training has an N:M operand although the weights of evaluation
    are N:M at some time; "": some have."""
    follows_length: ClassVar[bool] = False
    """True if every step depends on ``total_steps``, so that a run of another length cannot go on
    from its checkpoints."""
    needs_whole: bool = False
    """True if ``project`` or ``update_`` depend on rows outside their group (sums over the weight,
    draws by position). FSDP then gathers the weight first."""
    reads_packed_masks: ClassVar[bool] = False
    """True if :meth:`adjust_gradient_` and :meth:`adjust_weight_` also take a mask that is packed
    by rows, as the engine stores it (:func:`sparsepretrain.kernels.pack_rows`). The engine then
    saves a launch per layer and 2 bytes per weight in every step."""
    scalars: Mapping[str, int] = MappingProxyType({})
    """Integers per model that checkpoints store: initial values in the class, current values in the
    instance. :meth:`read_optimizer` may change them."""
    phase: Phase = Phase()
    """Phase of the next step (:meth:`set_step`)."""
    without_residual: bool = False
    """True while the N:M weights are measured alone."""
    uses_first_mask: bool = False
    """True while :meth:`project_in_training` applies ``state.mask``, with which training began."""

    def __init__(self, options: MethodOptions, total_steps: int | None = None) -> None:
        self.options = options
        self.schedule = Schedule(options.window, total_steps, self.refresh)
        self.scalars = dict(self.scalars)
        self._remarks: dict[str, list[str]] = {}

    def set_step(self, step: int) -> None:
        """Enter the phase after ``step`` completed steps, or after :attr:`scalars` changed."""
        self.schedule.step = step
        self.phase = self.phase_of(step)

    def phase_of(self, step: int) -> Phase:
        """Return the phase after ``step`` completed steps; dense outside the window.

        The result may depend on ``step`` and :attr:`scalars` only.
        """
        if why := self.schedule.dense_reason(step):
            return Phase(False, False, why)
        return Phase(row=self.sparse_row)

    def remark(self, text: str, layer: str) -> None:
        """Note something about the weight of a layer, of which the engine warns once."""
        self._remarks.setdefault(text, []).append(layer)

    def take_remarks(self) -> dict[str, list[str]]:
        """Return the new remarks, text -> layers; called after all layers were updated.

        Overrides may read here, in one wait, what :meth:`update_` counted on the device.
        """
        remarks, self._remarks = self._remarks, {}
        return remarks

    @property
    def update_needs_whole(self) -> bool:
        """True if :meth:`update_` needs the whole weight at this step, as :attr:`needs_whole`."""
        return self.needs_whole

    @property
    def reads_initial_weights(self) -> bool:
        """True if the tensors of a layer are computed from its initial weight."""
        return type(self).update_ is not Method.update_

    @property
    def fixed_from(self) -> int | None:
        """Completed steps after which masks never change; None: they keep following weights."""
        return None

    @property
    def keeps_zeros(self) -> bool:
        """True if zeros of the initial weights stay zeros: the first mask is the last one."""
        return self.fixed_from == 0 and self.reads_initial_weights

    @property
    def takes_masks(self) -> bool:
        """True if masks can be given (:meth:`Sparsifier.keep_masks`), to keep or to begin from."""
        return self.keeps_zeros

    @property
    def refresh(self) -> int:
        """Optimizer steps between two updates of the masks, which flips are counted over."""
        return 1

    @property
    def decay(self) -> float:
        """λ of the masked decay that the next step applies; 0: the method has none."""
        return 0.0

    def pull(self, step: int) -> float:
        """Return the share α of the step's update that moves masked weights to zero.

        Called of methods with :attr:`prunes_at_end`.
        """
        return 0.0

    @property
    def estimator(self) -> str:
        """Estimator of :func:`sparsepretrain.kernels.mvue` for U(G) with the pattern 2:4."""
        return "approximate"

    def scale(self, state: LayerState) -> Tensor | None:
        """Return the factor β of A(W) = β·S(W), 0-d, for probes; None: there is none."""
        return None

    @property
    def sparse_row(self) -> Row:
        """Operands of the final sparse phase of the schedule."""
        return Row()

    def nm(self, text: str, axis: Literal["in", "out", "tokens"] = "in") -> Operand:
        """Return an operand with the pattern of the options."""
        return Operand(text, (self.options.n, self.options.m), axis)

    @property
    def final_pattern(self) -> tuple[int, int]:
        """(N, M) of the options."""
        return self.options.n, self.options.m

    @property
    def pattern(self) -> tuple[int, int]:
        """(N, M) of the current masks; some methods approach the pattern of their options."""
        return self.final_pattern

    @property
    def multiples(self) -> tuple[int, int]:
        """Required divisors of (out_features, in_features), or of the channels."""
        return 1, self.options.m

    def metrics(self) -> dict[str, float]:
        """Return metrics of the method for the record: name -> value."""
        return {}

    def initial_state(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        """Return the persistent tensors of one layer, given its initial weight (fp32 or wider).

        The tensor under ``"mask"`` becomes ``state.mask``. A ``torch.nn.Parameter`` is trained:
        build the optimizer after ``sparsify``.
        """
        return {}

    def update_(self, weight: Tensor, state: LayerState) -> None:
        """Update the layer's tensors in place, before the first forward and after every step.

        Called inside the window only. ``weight`` is the master weight after the step (fp32 or
        wider).
        """

    def mask(self, weight: Tensor, dim: int) -> Tensor:
        """Return the mask that the method chooses for ``weight``; bool, same shape."""
        return kernels.nm_mask(weight, *self.pattern, dim=dim)

    def kept_mask(self, state: LayerState) -> Tensor | None:
        """Return the mask that a layer keeps, bool or packed, where A(W) is not needed for it.

        None: the mask is that of :meth:`project`.
        """
        return None

    def project(self, weight: Tensor, state: LayerState) -> Projection:
        """Return A(W), B(W) and the mask of a stored master weight (fp32 or wider).

        Called in each forward, or once per optimizer step if operands are stored, and in compiled
        graphs: the result depends on the arguments, options and :attr:`phase` only. Other state is
        in the layer (`update_`).
        """
        return Projection(None, None)

    def project_in_training(self, weight: Tensor, state: LayerState) -> Projection:
        """Return A(W) of a training forward, as :meth:`project`.

        Called if :attr:`trains_another_weight` or :attr:`differentiable`.
        """
        return self.project(weight, state)

    def begin_from_mask_(self, state: LayerState) -> None:
        """Follow ``state.mask``, which was given after :meth:`initial_state`."""

    def policy_gradient(
        self, logits: Tensor, state: LayerState, difference: Tensor
    ) -> Tensor | None:
        """Return the gradient of ``state.logits`` from the loss of the mask that was drawn.

        Called once per step, before it, if :attr:`follows_policy`.

        Args:
            logits: ``state.logits``, whole; shape of the weight.
            state: of the layer.
            difference: loss with the drawn masks minus loss with the first ones, of the global
                batch; 0-d, fp64.
        """
        return None

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
        """Return U(G), the output gradient of wgrad; (tokens, out_features), in the dtype of G.

        Called if U is not G. By default MVUE (arXiv:2203.10991) with :attr:`estimator` and the
        pattern of U in the row. ``order`` is the memory order that the matmul reads; overrides may
        leave this parameter out.
        """
        n, m = self.phase.row.U.pattern or self.pattern
        return kernels.mvue(grad, n=n, m=m, dim=0, estimator=self.estimator, key=key, order=order)

    def residual(self, x: Tensor, state: LayerState) -> Tensor | None:
        """Return a linear function of X, (…, out_features), that is added to X·A(W)ᵀ, or None.

        Autograd differentiates it; ``densify`` folds it into the weight. Not called while
        :attr:`without_residual` is true.
        """
        return None

    @property
    def has_residual(self) -> bool:
        """True if :meth:`residual` adds something in the present phase."""
        return False

    def adjust_gradient_(self, grad: Tensor, weight: Tensor, mask: Tensor, scale: Any) -> None:
        """Apply J: change the accumulated, unscaled, clipped gradient in place before the step.

        Called in phases whose row has a J other than dW.

        Args:
            grad: gradient of the weight, same shape.
            weight: the stored master weight.
            mask: kept positions: bool of the shape of the weight, or with
                :attr:`reads_packed_masks` packed by rows where the engine stores it so.
                :func:`sparsepretrain.kernels.apply_mask` and
                :func:`sparsepretrain.kernels.masked_decay_` read both.
            scale: loss scale still contained in ``grad`` (a 0-d tensor for fused optimizers);
                negative if the optimizer maximizes.
        """

    def adjust_weight_(self, weight: Tensor, mask: Tensor, lr: float) -> None:
        """Change the weight in place after the optimizer's update; few methods need this.

        Called in phases whose J is dW, with the mask from before the update, as in
        :meth:`adjust_gradient_`.
        """

    def build_optimizer(self, groups: list[dict[str, Any]], options: Any) -> Optimizer | None:
        """Return the optimizer that this method requires; ``options`` are those of ``optim``."""
        return None

    def guide_optimizer(self, optimizer: Any, masks: Mapping[Tensor, Tensor]) -> None:
        """Give the optimizer what its next step needs; called inside the window.

        Args:
            optimizer: of :attr:`optimizer_class`.
            masks: Parameter with a gradient -> mask of its rows on this rank, as in
                :meth:`adjust_gradient_`.
        """

    @property
    def has_penalty(self) -> bool:
        """True if :meth:`penalty_gradients` adds something: by default if a method overrides it.

        Each call gathers what FSDP shards, so methods whose penalty can be 0 say so here.
        """
        return type(self).penalty_gradients is not Method.penalty_gradients

    def penalty_gradients(self, weight: Tensor, state: LayerState) -> dict[str, Tensor]:
        """Return gradients of a penalty: name of a Parameter of the method -> its whole gradient.

        ``"weight"`` is the weight itself. Called before each step inside the window, if
        :attr:`has_penalty`. They are added to those of the loss, after clipping, as J is applied.
        """
        return {}

    def proximal_step(self, weight: Tensor, state: LayerState) -> Tensor:
        """Return the weight that a step ends with, given the one that the optimizer left.

        Called after each step inside the window, if overridden. ``weight`` is in fp32 or wider, and
        not written.
        """
        return weight

    def read_optimizer(self, optimizer: Any) -> None:
        """Read the optimizer state on which the phase depends; called on attach and after steps.

        Raises:
            ConfigError: the method needs another kind of optimizer.
        """


def typical_row(name: str, method: type[Method]) -> Row:
    """Return the row of a method with default options, for tables of methods."""
    return method(method.Options(name=name), 1000).sparse_row


def title(*methods: Method) -> str:
    """Return name and pattern, such as ``sste 2:4``; only the name if no matmul is N:M.

    ``methods`` differ in their patterns only; several are named as in ``sste 1:4+2:4``.
    """
    name = methods[0].options.name
    patterns = [method.final_pattern for method in methods]
    return f"{name} {pattern_text(*patterns)}" if methods[0].sparse_row.sparse else name


def identity(*methods: Method) -> str:
    """Return what must be equal where a run goes on: :func:`title`, and its length if it counts."""
    steps = methods[0].schedule.total_steps
    return title(*methods) + (f" over {steps} steps" if methods[0].follows_length else "")
