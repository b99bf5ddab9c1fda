"""Banks: Parameters whose slices are weights, such as ``gate_up_proj`` of the experts of Mixtral.

A bank of shape (…, out, in) is projected as one tall matrix (slices·out, in), or (slices·in, out)
where its module stores (…, in, out): groups along in_features never span two slices, so that
masks, flips and J are those of a layer. While its module runs, the module reads A(W) in the place
of W, whichever way it multiplies: slice by slice, in batches or with grouped matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.clock import is_recomputing
from sparsepretrain.sparsity.engine.equations import product_of
from sparsepretrain.sparsity.engine.layers import SparseMatmul
from sparsepretrain.sparsity.engine.operands import LayerOperands
from sparsepretrain.sparsity.engine.weights import SparseWeight
from sparsepretrain.sparsity.matmuls.geometry import Linear
from sparsepretrain.sparsity.matmuls.three import DENSE, Operands, Prepared

BANKS = "sparse_banks"
"""Child of a module with sparse banks: the name of each Parameter -> its :class:`SparseBank`."""


class StraightThrough(torch.autograd.Function):
    """Return A(W); its gradient is that of W, times the factor of dW."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, projected: Tensor, wgrad_scale: Tensor | None) -> Tensor:
        """Return ``projected``, of the shape of ``weight`` in the dtype of the matmuls.

        ``wgrad_scale`` has one factor, or one per slice.
        """
        ctx.save_for_backward(wgrad_scale)
        ctx.dtype = weight.dtype
        return projected.view_as(projected)

    # Masks are constants here, so second derivatives would be silently wrong.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return dW."""
        (scale,) = ctx.saved_tensors
        grad = grad.to(ctx.dtype)
        if scale is not None:
            grad = grad * (scale.view(*grad.shape[:-2], 1, 1) if scale.dim() else scale)
        return grad, None, None


class SparseBank(SparseWeight):
    """One Parameter of a module, as a sparse weight; a child of that module.

    Args:
        owner: has the Parameter, and reads it in its forward.
        key: name of the Parameter in ``owner``.
        in_dim: axis of in_features in a slice: 1 for (out, in), 0 for (in, out).
    """

    bias = None

    def __init__(self, owner: nn.Module, key: str, in_dim: int) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple: it is no child of its child
        self.key = key
        self.in_dim = in_dim
        self.is_known = is_transposed(owner) is not None
        """True if the class of the owner says how it stores its slices."""
        self._shape = tuple(self.weight.shape)
        self.replaces = owner.replaces if isinstance(owner, BankOwner) else type(owner)

    @property
    def owner(self) -> nn.Module:
        """Module that has the Parameter."""
        return self._owner[0]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The Parameter, of shape (…, out, in), or (…, in, out) if ``in_dim`` is 0."""
        weight = self._owner[0]._parameters.get(self.key)
        if weight is None:
            raise ConfigError(
                f"the bank {self.sparsity.layer_name!r} is computed from another tensor since "
                "sparsify (a parametrization, or peft's target_parameters): remove that, or do it "
                "first and exclude the bank"
            )
        return weight

    @property
    def sizes(self) -> tuple[int, int, tuple[int, ...]]:
        *slices, rows, columns = self.weight.shape
        features = (columns, rows) if self.in_dim == 1 else (rows, columns)
        return *features, tuple(slices)

    @property
    def expected_shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def parameter_name(self) -> str:
        return self.sparsity.layer_name

    def has_own_weight(self) -> bool:
        return self._owner[0]._parameters.get(self.key) is not None

    @property
    def module_name(self) -> str:
        return f"{self.sparsity.layer_name.removesuffix(self.key)}{BANKS}.{self.key}"

    def weight_key(self, path: str) -> str:
        return f"{path.removesuffix(f'{BANKS}.{self.key}')}{self.key}"

    def install(self) -> None:
        """Let the owner read this bank in its forward; its class changes."""
        owner = self._owner[0]
        if BANKS not in owner._modules:
            owner.add_module(BANKS, nn.Module())
        banks: Any = owner._modules[BANKS]
        banks.add_module(self.key, self)
        owner.__class__ = _owner_class(self.replaces, tuple(banks._modules))

    def become_dense(self) -> None:
        owner = self._owner[0]
        banks = owner._modules[BANKS]
        assert banks is not None
        del banks._modules[self.key]
        if not banks._modules:
            del owner._modules[BANKS]
            owner.__dict__.pop("reads_banks", None)
            owner.__class__ = self.replaces

    def replace_weight(self, weight: nn.Parameter) -> None:
        self._owner[0]._parameters[self.key] = weight

    def forward(self) -> None:
        """Refuse: the owner multiplies."""
        raise RuntimeError(f"the bank {self.sparsity.layer_name!r} has no forward of its own")

    def read(self) -> Tensor:
        """Return what the module multiplies by, of the shape of the weight: A(W), or W itself."""
        if torch.compiler.is_compiling():
            return self._read()
        # Several parts of a forward share one read. Activation checkpointing of a part counts the
        # tensors that its hooks see saved: the part that reads first would have more than the
        # others, but each of them reads again when it is recomputed. Under hooks of its own, no
        # tensor of the read is counted.
        with torch.autograd.graph.saved_tensors_hooks(_with_version, _of_version):
            return self._read()

    def _read(self) -> Tensor:
        weight = self.weight
        operands = self.operands
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.follow_counters()
            if self.training:
                operands.has_run = True
                self.sparse_model.micro_batches.layer_runs()
            elif torch.is_grad_enabled():
                operands.ran_in_evaluation = True
        device = weight.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        matrix = weight.view(-1, weight.shape[-1])
        target, prepared = operands.get(matrix, dtype, self.training)
        if target is matrix and not compiling and self.sparse_model.watches_reads:
            weight = operands.watch(weight)
        if prepared is None:  # a dense phase; the axis is checked all the same
            is_checked = self.is_known or compiling
            return weight if is_checked else BankRead.of(weight, Source(self, weight, None, False))
        backward = None if prepared.B is None else self._stored(prepared.B.data)
        if target is matrix:
            forward = self._stored(prepared.A.data)
            whole: Tensor = StraightThrough.apply(weight, forward, prepared.wgrad_scale)
        else:  # of a differentiable method: A with its graph
            whole = target.view(weight.shape).to(dtype)
        draws = self.training and not operands.method.phase.row.keeps_inputs()
        if compiling:
            if draws or backward is not None or not self.is_known:
                raise ConfigError(
                    f"the bank {self.sparsity.layer_name!r} has to see its matmuls, which a "
                    "compiled forward does not show: compile other modules only"
                )
            return whole
        return BankRead.of(whole, Source(self, whole, backward, draws))

    def _stored(self, prepared: Tensor) -> Tensor:
        """Return A or B, (out, in) as matmuls read them, in the shape of the weight."""
        matrix = prepared if self.in_dim == 1 else prepared.t()
        return matrix.view(self.weight.shape)


def _with_version(tensor: Tensor) -> tuple[Tensor, int]:
    """Keep a saved tensor, as autograd does without hooks."""
    kept = tensor.detach()  # the tensor itself may keep its own graph alive
    return kept, kept._version


def _of_version(kept: tuple[Tensor, int]) -> Tensor:
    tensor, version = kept
    if tensor._version != version:  # hooks switch torch's own check off
        raise RuntimeError(
            "a bank was read by a forward, and modified by an in-place operation, such as the step "
            "of an optimizer, before the backward: call backward before the step"
        )
    return tensor


class Source(NamedTuple):
    """A bank as one forward of its module reads it."""

    bank: SparseBank
    forward: Tensor  # A(W), in the graph of autograd, of the shape of the weight
    backward: Tensor | None  # B(W); None: A(W)
    draws: bool  # the method changes X or G of each matmul


TURNS = ("transpose", "swapaxes", "swapdims", "t", "adjoint", "T", "mT")
"""Functions, and attributes, that exchange both axes of slices."""
KEEPS = ("to", "type_as", "contiguous", "float", "double", "half", "bfloat16")
"""Functions that keep the shape."""
PICKS = {
    "unbind": 1, "select": 1, "narrow": 1, "index_select": 1,
    "split": 2, "split_with_sizes": 2, "chunk": 2, "tensor_split": 2,
}  # fmt: skip
"""Functions that take slices along one axis, and the place of that axis among their arguments.

Iterating over a tensor calls ``unbind``."""
MATMULS = ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm")
GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
"""Grouped matmuls: names in two versions of torch, and in transformers."""


class BankRead(Tensor):
    """A(W) of a bank, or of some of its slices, which computes its own matmuls.

    Every matmul is checked: it has to reduce over in_features. If the method changes X or G, it is
    computed slice by slice, with the tokens of that slice; else torch computes it.
    """

    source: Source
    slices: Tensor
    """Numbers of the slices, of the shape of all axes but the last two; int64."""
    turned: bool
    """True if the last two axes were exchanged."""

    @classmethod
    def of(
        cls, plain: Tensor, source: Source, slices: Tensor | None = None, turned: bool = False
    ) -> BankRead:
        """Return ``plain`` as a part of the bank."""
        read = plain.as_subclass(cls)
        read.source = source
        if slices is None:
            shape = plain.shape[:-2]
            slices = torch.arange(shape.numel(), device=plain.device).view(shape)
        read.slices = slices
        read.turned = turned
        return read

    @property
    def reduces_last(self) -> bool:
        """True if in_features are the last axis of each slice."""
        return (self.source.bank.in_dim == 1) != self.turned

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = _name_of(func)
            read = next(each for each in _leaves((args, kwargs)) if isinstance(each, cls))
            if name in MATMULS:
                return _matmul(read, name, func, args, kwargs)
            if name in GROUPED:
                return _grouped(read, func, args, kwargs)
            if name == "einsum":
                return _einsum(read, func, args)
            result = _call(func, args, kwargs)
            if not args or args[0] is not read:
                return _unless_drawn(read, name, result)
            if name in PICKS and (axis := _axis(name, args, kwargs)) < read.slices.dim():
                return read._picked(func, name, axis, args, kwargs, result)
            if not isinstance(result, Tensor):
                return _unless_drawn(read, name, result)
            if name == "__getitem__" and _picks_slices(args[1], read.slices.dim()):
                return cls.of(result, read.source, read.slices[args[1]], read.turned)
            if name in TURNS and result.shape == _swapped(read.shape):
                return cls.of(result, read.source, read.slices, not read.turned)
            if name in KEEPS:
                return cls.of(result, read.source, read.slices, read.turned)
            return _unless_drawn(read, name, result)

    def _picked(
        self,
        func: Any,
        name: str,
        axis: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> Any:
        """Return what a function of :data:`PICKS` took, as parts of the bank."""
        place = PICKS[name]
        if len(args) > place:
            args = [*args[:place], axis, *args[place + 1 :]]
        else:
            kwargs = {**kwargs, "dim": axis}
        numbers = func(self.slices, *args[1:], **kwargs)
        if isinstance(result, Tensor):
            return self.of(result, self.source, numbers, self.turned)
        parts = zip(result, numbers, strict=True)
        return tuple(self.of(part, self.source, of_part, self.turned) for part, of_part in parts)


def _axis(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the axis along which a function of :data:`PICKS` takes parts, counted from 0."""
    place = PICKS[name]
    axis: int = args[place] if len(args) > place else kwargs.get("dim", 0)
    return axis if axis >= 0 else axis + args[0].dim()


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what is in nested arguments, such as the tensors of ``torch.stack``."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _name_of(func: Any) -> str:
    """Return the name of a function, a method, an operator or an attribute of tensors."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__
    return name


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch with plain tensors in the place of parts of a bank."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if type(value) is tuple:
            return tuple(plain(each) for each in value)
        return value.as_subclass(Tensor) if isinstance(value, BankRead) else value

    return func(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})


def _swapped(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _picks_slices(index: Any, axes: int) -> bool:
    """Return True if an index leaves the last two axes as they are."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        is_mask = isinstance(part, bool) or (isinstance(part, Tensor) and part.dtype == torch.bool)
        if part is None or part is Ellipsis or is_mask:  # adds axes, or takes several at once
            return False
    return len(parts) <= axes


def _unless_drawn(read: BankRead, name: str, result: Any) -> Any:
    """Return a result that is no matmul, unless the method had to see the matmul in it."""
    hides = _needs_slices(read) or not read.source.bank.is_known
    tensors = (each for each in _leaves(result) if isinstance(each, Tensor))
    if hides and any(tensor.is_floating_point() for tensor in tensors):
        raise _unreadable(read, name)
    return result


def _unreadable(read: BankRead, name: str) -> ConfigError:
    bank = read.source.bank
    return ConfigError(
        f"the bank {bank.sparsity.layer_name!r} {tuple(bank.weight.shape)} of "
        f"{bank.replaces.__name__} is read by {name}: slices may be indexed, iterated over, "
        "transposed, cast, and multiplied by F.linear, @, mm, bmm, grouped_mm or an einsum of two "
        "tensors; exclude it"
    )


def _needs_slices(read: BankRead) -> bool:
    source = read.source
    return source.draws or source.backward is not None


def _operand(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int, names: Sequence[str]
) -> Any:
    """Return an argument that was passed by its place or by one of its names."""
    if len(args) > place:
        return args[place]
    return next(kwargs[name] for name in names if name in kwargs)


def _matmul(
    read: BankRead, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Multiply by slices of a bank, on the left or on the right."""
    left = _operand(args, kwargs, 0, ("input", "self", "mat1"))
    right = _operand(args, kwargs, 1, ("weight", "other", "mat2"))
    if name == "__rmatmul__":
        left, right = right, left
    is_right = right is read
    last = name == "linear" or not is_right  # the axis of the bank that is summed over
    _require_axis(read, last, name)
    if not _needs_slices(read):
        product: Tensor = _call(func, args, kwargs)
        return product
    if min(left.dim(), right.dim()) < 2:
        raise _unreadable(read, "a product with a vector")
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    x = left if is_right else right.transpose(-2, -1)
    slices = read.slices
    if slices.dim() == 0:
        y = _slice_matmul(read.source, int(slices), x, bias)
    elif name == "linear":  # torch refuses it too; no other matmul has a bias
        raise _unreadable(read, "linear with several slices")
    else:
        # leading axes broadcast as torch.matmul does: all tokens may go to each slice
        batch = torch.broadcast_shapes(x.shape[:-2], slices.shape)
        x = x.expand(*batch, *x.shape[-2:])
        numbers = slices.expand(batch).reshape(-1).repeat_interleave(x.shape[-2])
        order = numbers.argsort(stable=True)
        rows = x.reshape(-1, x.shape[-1])[order]
        counts = numbers.bincount(minlength=read.source.bank.sparsity.slices)
        y = _by_slices(read.source, rows, counts.cumsum(0).tolist())
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        y = y[inverse].view(*x.shape[:-1], y.shape[-1])
    return y if is_right else y.transpose(-2, -1)


def _grouped(read: BankRead, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Multiply rows that are sorted by slice; ``offs`` has the end of each slice's rows."""
    _require_axis(read, False, "grouped_mm")
    if not _needs_slices(read):
        product: Tensor = _call(func, args, kwargs)
        return product
    offs = kwargs.get("offs", args[2] if len(args) > 2 else None)
    x = _operand(args, kwargs, 0, ("mat_a", "self", "input"))
    if offs is None:  # one matrix for each slice
        return _matmul(read, "bmm", torch.bmm, (x, read), {})
    ends = offs.tolist()
    y = _by_slices(read.source, x, ends, read.slices.tolist())
    missing = x.shape[0] - ends[-1]  # rows behind the last end belong to no slice
    return torch.cat([y, y.new_zeros(missing, y.shape[1])]) if missing else y


def _einsum(read: BankRead, func: Any, args: Sequence[Any]) -> Any:
    """Multiply by slices of a bank as an equation of two tensors says."""
    text, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = [*operands[0]]
    name = f"einsum {text!r}"
    place = 0 if operands[0] is read else 1
    product = None
    if sum(isinstance(each, BankRead) for each in operands) == 1:
        product = product_of(text, [each.dim() for each in operands], place)
    if product is None:
        return _unless_drawn(read, name, _call(func, args, {}))
    _require_axis(read, product.sums_last, name)
    if not _needs_slices(read):
        return _call(func, args, {})
    slices, tokens = product.slices, product.tokens
    x = operands[1 - place]
    sizes = [x.shape[product.x.index(label)] for label in tokens]
    order = [label for label in slices if label in product.x]
    x = x.permute([product.x.index(label) for label in (*order, *tokens, product.summed)])
    for axis, label in enumerate(slices):
        if label not in order:  # all tokens go to each of these slices
            x = x.unsqueeze(axis)
    x = x.reshape(*x.shape[: len(slices)], math.prod(sizes), x.shape[-1])
    if product.sums_last:
        turned = read.as_subclass(Tensor).transpose(-2, -1)
        read = BankRead.of(turned, read.source, read.slices, not read.turned)
    y = _matmul(read, "matmul", torch.matmul, (x, read), {})
    y = y.reshape(*y.shape[: len(slices)], *sizes, y.shape[-1])
    labels = [*slices, *tokens, product.kept]
    if gone := [axis for axis, label in enumerate(labels) if label not in product.result]:
        y = y.sum(gone)
        labels = [label for label in labels if label in product.result]
    return y.permute([labels.index(label) for label in product.result])


def _require_axis(read: BankRead, last: bool, name: str) -> None:
    """Refuse a matmul that sums over out_features: the pattern would be along the wrong axis."""
    if read.reduces_last is last:
        return
    bank = read.source.bank
    cls = bank.replaces.__name__
    slices, do = "(in, out)", "exclude it"
    if bank.in_dim == 1:
        slices = "(out, in)"
        do += f", or give {cls} is_transposed = True and has_gate = False if they are (in, out)"
    raise ConfigError(
        f"the bank {bank.sparsity.layer_name!r} {tuple(bank.weight.shape)} of {cls} was taken for "
        f"slices {slices}, and {name} sums over the other axis: {do}"
    )


def _by_slices(
    source: Source, x: Tensor, ends: list[int], numbers: list[int] | None = None
) -> Tensor:
    """Multiply consecutive rows of X by one slice each; slices without rows take no part."""
    parts = []
    start = 0
    for place, end in enumerate(ends):
        if end > start:
            number = place if numbers is None else numbers[place]
            parts.append(_slice_matmul(source, number, x[start:end], None))
        start = end
    return torch.cat(parts) if parts else x.new_zeros(0, source.bank.sizes[1])


def _slice_matmul(source: Source, index: int, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return X·A(W)ᵀ + b of one slice, with the operands of the method."""
    bank = source.bank
    operands = bank.operands
    model = bank.sparse_model
    shape = source.forward.shape
    target = source.forward.view(-1, *shape[-2:])[index]
    x = x.to(target.dtype)

    def oriented(matrix: Tensor) -> Prepared:
        return Prepared("dense", matrix if bank.in_dim == 1 else matrix.t())

    b = None
    if source.backward is not None:
        b = oriented(source.backward.view(-1, *shape[-2:])[index])
    y: Tensor = SparseMatmul.apply(
        x,
        target,
        None if bias is None else bias.to(target.dtype),
        Operands(oriented(target.detach()), b, None),
        operands if bank.training else None,
        Linear(bank.in_dim),
        DENSE,
        model.clock.read(),
        operands.number_call(index) if bank.training else 0,
        model.micro_batches if bank.training else None,
    )
    return y


class BankOwner(nn.Module):
    """Mixin before the class of a module with sparse banks: reads A(W) in its forward."""

    replaces: ClassVar[type[nn.Module]]
    reads_banks: dict[Any, Tensor] | None = None
    """Banks that the running forward has read; None: no forward is running."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        with self._reading():
            return super().forward(*args, **kwargs)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        before, self.reads_banks = self.reads_banks, {}
        try:
            yield
        finally:
            self.reads_banks = before

    def _get_name(self) -> str:
        return f"Sparse{self.replaces.__name__}"

    def _replicate_for_data_parallel(self) -> Any:
        raise ConfigError(
            f"{self.replaces.__name__} has banks, whose replicas nn.DataParallel cannot make: use "
            "DistributedDataParallel"
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        after = [
            bank.load(state_dict, f"{prefix}{key}", f"{prefix}{BANKS}.{key}.sparsity.")
            for key, bank in banks_of(self).items()
        ]
        super()._load_from_state_dict(state_dict, prefix, *rest)
        for loaded in after:
            loaded()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, bank in banks_of(self).items():
            if bank.operands.rows.is_sharded and not keep_vars:
                # writers of files need memory, which the wrapper that FSDP gathers does not have
                from sparsepretrain.sparsity.fsdp.sharding import unwrapped

                destination[f"{prefix}{key}"] = unwrapped(destination[f"{prefix}{key}"])

    def operands_of(self, shard: Tensor) -> LayerOperands:
        """Return the operands of the bank whose shard on this rank has this memory."""
        every = [bank.operands for bank in banks_of(self).values()]
        return next(e for e in every if e.rows.local(shard).data_ptr() == shard.data_ptr())


def banks_of(module: nn.Module) -> dict[str, SparseBank]:
    """Return the sparse banks among the own Parameters of a module, by name."""
    banks: Any = module._modules.get(BANKS)
    return {} if banks is None else dict(banks._modules.items())


def _reader(key: str) -> property:
    def read(owner: BankOwner) -> Any:
        bank: Any = owner._modules[BANKS]._modules.get(key)  # type: ignore[union-attr]
        if bank is None:
            return owner._parameters[key]
        if owner.reads_banks is None:
            # activation checkpointing runs parts of the forward again, in the backward
            return bank.read() if is_recomputing() else bank.weight
        if torch.compiler.is_compiling():
            return bank.read()
        device = bank.weight.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        # blocks of a forward may run without gradients, or in another dtype
        kind = key, torch.is_grad_enabled(), autocast
        if kind not in owner.reads_banks:
            owner.reads_banks[kind] = bank.read()
        return owner.reads_banks[kind]

    return property(read)


_made: dict[tuple[type, tuple[str, ...]], type[nn.Module]] = {}


def _owner_class(cls: type[nn.Module], keys: tuple[str, ...]) -> type[nn.Module]:
    """Return the class of a module with these sparse banks."""
    if (cls, keys) in _made:
        return _made[cls, keys]
    space: dict[str, Any] = {key: _reader(key) for key in keys}
    space |= {"replaces": cls, "bank_keys": keys, "__doc__": cls.__doc__, "__module__": __name__}
    space |= {"__reduce_ex__": _reduced}
    # of the same name, which hosts write into files (`architectures` of transformers)
    _made[cls, keys] = type(cls.__name__, (BankOwner, cls), space)
    return _made[cls, keys]


def _blank(cls: type[nn.Module], keys: tuple[str, ...]) -> nn.Module:
    """Return an empty module to unpickle or copy into."""
    made = _owner_class(cls, keys)
    module: nn.Module = made.__new__(made)
    return module


def _reduced(module: Any, protocol: Any) -> Any:
    # these classes are created at run time, so the replaced class is pickled
    return _blank, (module.replaces, module.bank_keys), module.__dict__


TRANSPOSED = ("Llama4TextExperts",)
"""Classes of transformers that store (experts, in, out) and do not say so."""


def is_transposed(module: nn.Module) -> bool | None:
    """Return True if the experts of a module are stored as (experts, in, out); None: not known.

    Transformers gives these classes an attribute of this name, with one that says if there is a
    gate (``use_experts_implementation``).
    """
    cls = module.replaces if isinstance(module, BankOwner) else type(module)
    if cls.__name__ in TRANSPOSED:
        return True
    transposed = getattr(module, "is_transposed", None)
    return transposed if isinstance(transposed, bool) and hasattr(module, "has_gate") else None
