"""Forwards of subclasses: does one compute what the class that we know computes?

Sparse layers replace the forward. That of a subclass must be the base class's with weight and bias
cast to the dtype of the input, as in nanochat and modded-nanogpt. It is run on random inputs beside
that of the base class: outputs and gradients have to be equal bit by bit, and it may call nothing
but the product, casts and changes of shape. What it reads beside its tensors must not change later.
"""

from __future__ import annotations

import copy
import dis
import inspect
import warnings
from collections.abc import Hashable, Iterator
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LARGE = 1e4
"""Factor that brings inputs beyond the limits of a clamp."""
WIDEST = 2**18
"""Most outputs that are tried; vocabularies are padded to less."""
HARMLESS = {
    *("linear", "conv2d", "addmm", "mm", "matmul", "__matmul__"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous"),
    *("t", "T", "mT", "transpose", "view", "reshape", "flatten", "unflatten"),
    *("dtype", "shape", "size", "dim", "ndim", "numel"),
}
"""Functions and properties of tensors that do not depend on values or devices."""


def layer_family(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return nn.Linear, nn.Conv2d or transformers' Conv1D if ``cls`` is a subclass, or None."""
    for c in cls.__mro__:
        # by name: importing transformers to compare classes would cost seconds
        conv1d = c.__name__ == "Conv1D" and c.__module__.startswith("transformers.")
        if conv1d or c in (nn.Linear, nn.Conv2d):
            return c
    return None


def has_own_forward(cls: type[nn.Module], base: type[nn.Module]) -> bool:
    """Return True if ``cls`` computes its output itself."""
    names = ("forward", "_conv_forward")
    return any(getattr(cls, name, None) is not getattr(base, name, None) for name in names)


def forward_objection(layer: nn.Module) -> str:
    """Return the reason for which the forward of a layer cannot be replaced, or ""."""
    base = layer_family(type(layer))
    if base is None or not has_own_forward(type(layer), base):
        return ""
    others = {*layer._parameters, *layer._buffers, *layer._modules} - {"weight", "bias"}
    if others:
        return f"a forward of its own and further tensors ({', '.join(sorted(others))})"
    _, *parameters = inspect.signature(type(layer).forward).parameters
    if len(parameters) > 1:
        return f"a forward with further arguments ({', '.join(parameters[1:])})"
    names = _changeable_globals(type(layer), base)
    if "autocast" in names:  # of other devices than that of the comparison, perhaps
        return "a forward that switches autocast"
    if names:
        return f"a forward that reads {', '.join(names)}, which may change"
    equal, reads, writes, calls = _compared(layer)
    if writes:
        return f"a forward that sets {', '.join(writes)}"
    own = vars(layer)
    if mutable := [n for n in reads if n not in own or not _is_constant(own[n])]:
        return f"a forward that reads {', '.join(mutable)}, which may change"
    plain = "a forward that is not F.linear(x, weight.to(x.dtype), bias)"
    if calls:
        return f"{plain}: it calls {', '.join(calls)}"
    return "" if equal else plain


def _is_constant(value: Any) -> bool:
    """Return True for values that nothing can change but setting the attribute."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    plain = bool | int | float | complex | str | bytes | torch.dtype | torch.device | Enum
    return value is None or isinstance(value, plain)


def _changeable_globals(cls: type[nn.Module], base: type[nn.Module]) -> list[str]:
    """Return what the methods of ``cls`` behind its forward read besides arguments and ``self``.

    Functions, classes, modules and constants are no objection. A truth value is one, because a
    switch that is off shows in no comparison. So is the class as an object, whose attributes
    anybody may set.
    """
    found: list[str] = []
    waiting, seen = ["forward", "_conv_forward"], set[str]()
    while waiting:
        name = waiting.pop()
        function = inspect.unwrap(getattr(cls, name, lambda: None))
        if name in seen or function is getattr(base, name, None):
            continue
        seen.add(name)
        if not isinstance(function, FunctionType):
            continue
        waiting += [n for n in function.__code__.co_names if hasattr(cls, n)]
        closed = inspect.getclosurevars(function)
        for text, value in _read_globals(function, {**closed.globals, **closed.nonlocals}):
            harmless = callable(value) or isinstance(value, ModuleType) or _is_constant(value)
            if isinstance(value, type) and issubclass(value, torch.autocast):
                found.append("autocast")
            elif text in ("type", "__class__") or isinstance(value, bool) or not harmless:
                found.append(text)
    return list(dict.fromkeys(found))


def _read_globals(function: FunctionType, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names that a function reads, with attributes of modules and classes, and values.

    From its bytecode: classes that were typed into a console have no source.
    """
    value: Any = None
    text = ""
    for step in dis.get_instructions(function):
        is_attribute = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        of_known = text and isinstance(value, ModuleType | type)
        if is_attribute and of_known and hasattr(value, step.argval):
            value, text = getattr(value, step.argval), f"{text}.{step.argval}"
            continue
        if text:
            yield text, value
        text = ""
        if is_attribute and step.argval == "__class__":
            yield "__class__", None
        if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME") and step.argval in values:
            value, text = values[step.argval], step.argval
        elif step.opname == "LOAD_GLOBAL" and step.argval == "type":
            yield "type", type


def read_attributes(layer: nn.Module) -> frozenset[str]:
    """Return the attributes that an accepted forward reads and the base class does not have."""
    base = layer_family(type(layer))
    if base is None or not has_own_forward(type(layer), base):
        return frozenset()
    return frozenset(_compared(layer)[1])


def attributes_of(layer: nn.Module) -> dict[str, Any]:
    """Return the attributes of a layer without those of nn.Module."""
    internal = vars(nn.Module())
    return {k: v for k, v in vars(layer).items() if k not in internal or k == "training"}


Compared = tuple[bool, tuple[str, ...], tuple[str, ...], tuple[str, ...]]
_known: dict[Hashable, Compared] = {}
"""Class, attributes and shapes -> result: models have many layers that are alike."""


def _compared(layer: nn.Module) -> Compared:
    """Return if the forwards are equal, attributes that the layer's reads and sets, and calls."""
    attributes = attributes_of(layer).items()
    simple = [(k, v) for k, v in attributes if isinstance(v, Hashable) and k != "training"]
    shapes = tuple(None if p is None else p.shape for p in layer._parameters.values())
    key = (type(layer), tuple(sorted(simple, key=lambda item: item[0])), shapes)
    if len(simple) + 1 < len(attributes):  # lists and the like may differ
        return _compare(layer)
    if key not in _known:
        _known[key] = _compare(layer)
    return _known[key]


def _compare(layer: nn.Module) -> Compared:
    base = layer_family(type(layer))
    assert base is not None
    reads: set[str] = set()
    writes: set[str] = set()
    calls = _Calls()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),  # the forward may draw
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        trials = [*_trials(layer, base)]
        own = _recording(type(layer), base, reads, writes, calls)
        full, half = torch.float32, torch.bfloat16
        equal = all(trial.equal(own, full, full) for trial in trials)
        with torch.autocast("cpu", half):
            equal = equal and trials[0].equal(own, full, full)
        casts = equal and not trials[0].raises(own)  # a forward that casts nothing refuses bf16
        weights = full if casts else half
        equal = equal and all(trial.equal(own, half, weights) for trial in trials)
        for other in (torch.float16, torch.float64):
            equal = equal and trials[0].equal(own, other, other)
    return equal, tuple(sorted(reads)), tuple(sorted(writes)), tuple(sorted(calls.others))


class _Calls(TorchFunctionMode):
    """Notes the functions of tensors that a forward calls besides :data:`HARMLESS` ones."""

    def __init__(self) -> None:
        super().__init__()
        self.others: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):  # of a property
            name = func.__self__.__name__
        if name not in HARMLESS:
            self.others.add(name)
        return func(*args, **(kwargs or {}))


def _recording(
    cls: type[nn.Module],
    base: type[nn.Module],
    reads: set[str],
    writes: set[str],
    calls: _Calls,
) -> type[nn.Module]:
    """Return a subclass whose objects note what their forward reads, sets and calls."""
    known = {*vars(nn.Module()), *_attributes_of_base(base), *dir(base)}

    class Recording(cls):  # type: ignore[valid-type, misc]
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            of_class = getattr(cls, name, None)  # methods and properties read what is noted
            is_code = callable(of_class) or isinstance(of_class, property)
            if name not in known and not name.startswith("__") and not is_code:
                reads.add(name)
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            writes.add(name)
            super().__setattr__(name, value)

        def forward(self, x: Tensor) -> Any:
            with calls:
                return super().forward(x)

    return Recording


def _attributes_of_base(base: type[nn.Module]) -> set[str]:
    if base is nn.Linear:
        return set(vars(nn.Linear(1, 1, device="meta")))
    if base is nn.Conv2d:
        return set(vars(nn.Conv2d(1, 1, 1, device="meta")))
    return {"nf", "nx"}


class _Trial:
    """Random weights and an input for both forwards."""

    def __init__(
        self, layer: nn.Module, attributes: dict[str, Any], weights: dict[str, Tensor], x: Tensor
    ) -> None:
        self.layer = layer
        self.attributes = attributes
        self.weights = weights
        self.x = x

    def equal(self, cls: type[nn.Module], dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
        """Return True if ``cls`` and the base class compute the same, in all modes."""
        base: Any = layer_family(type(self.layer))
        try:
            return all(
                _same(own, expected)
                for mode in ({"training": True}, {"training": False}, {"gradients": False})
                for own, expected in zip(
                    self._run(cls, dtype, weight_dtype, **mode),
                    self._run(base, dtype, weight_dtype, **mode),
                    strict=True,
                )
            )
        except Exception:  # of code that is not ours: its forward is no plain matmul
            return False

    def raises(self, cls: type[nn.Module]) -> bool:
        """Return True if the forward with an fp32 weight refuses an input in bf16."""
        try:
            self._run(cls, torch.bfloat16, torch.float32)
        except RuntimeError:
            return True
        return False

    def _run(
        self,
        cls: Any,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        training: bool = False,
        gradients: bool = True,
    ) -> list[Tensor]:
        """Return output and gradients; weights are cast to the dtype of x for the base class."""
        x = self.x.to(dtype, copy=True).requires_grad_()
        leaves = {
            name: value.to(weight_dtype, copy=True).requires_grad_()
            for name, value in self.weights.items()
        }
        parameters: dict[str, Tensor | None] = dict.fromkeys(self.layer._parameters)
        parameters |= leaves
        base = layer_family(type(self.layer))
        if cls is base:
            parameters |= {name: leaf.to(dtype) for name, leaf in leaves.items()}
        probe = copy.copy(self.layer)
        state = {**self.attributes, "training": training, "_parameters": parameters}
        probe.__dict__ = {**self.layer.__dict__, **state}
        probe.__class__ = cls  # the base class must not call overridden parts of the forward
        with torch.set_grad_enabled(gradients):
            y = cls.forward(probe, x)
        if not gradients:
            return [y]
        tangent = torch.linspace(-1, 1, y.numel(), device="cpu", dtype=torch.float32)
        tangent = tangent.view(y.shape)
        inputs = [x, *leaves.values()]
        found = [y.detach()]
        # a backward of its own may limit gradients, or clean them
        for extreme in (tangent, *_extreme(tangent)):
            found += torch.autograd.grad(
                y, inputs, extreme.to(y.dtype), retain_graph=True, materialize_grads=True
            )
        return found


def _same(own: Tensor, expected: Tensor) -> bool:
    """Return True for equal dtypes, shapes and values; NaN equals NaN."""
    if own.dtype != expected.dtype or own.shape != expected.shape:
        return False
    return bool(((own == expected) | (own.isnan() & expected.isnan())).all())


def _trials(layer: Any, base: type[nn.Module]) -> Iterator[_Trial]:
    """Yield trials with few weights: all outputs of the layer, all its inputs, any image size."""
    if base is nn.Conv2d:
        groups = layer.groups
        attributes = {"in_channels": 4 * groups, "out_channels": 8 * groups}
        weights = _weights(layer, (8 * groups, 4, *layer.kernel_size), 8 * groups)
        reach = [2 + d * k for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        images = [_random((2, 4 * groups, *(size + more for size in reach))) for more in range(4)]
        for x in (*images, *_extreme(images[0]), images[0][0]):
            yield _Trial(layer, attributes, weights, x)
        return
    is_linear = base is nn.Linear
    inputs, outputs = layer.weight.shape[::-1] if is_linear else layer.weight.shape
    for width, height in ((16, min(outputs, WIDEST)), (inputs, 8)):
        names = ("in_features", "out_features") if is_linear else ("nx", "nf")
        attributes = dict(zip(names, (width, height), strict=True))
        shape = (height, width) if is_linear else (width, height)
        weights = _weights(layer, shape, height)
        rows = _random((3, width))
        for x in (
            rows,
            rows[0],
            _random((2, 5, width)),
            _random((2, 2, 3, width)),
            *_extreme(rows),
        ):
            yield _Trial(layer, attributes, weights, x)
        yield _Trial(layer, attributes, {k: v * LARGE for k, v in weights.items()}, rows)


def _extreme(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return large values, and values that are not finite."""
    strange = x.clone().flatten()
    strange[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return x * LARGE, strange.view(x.shape)


def _weights(layer: nn.Module, shape: tuple[int, ...], outputs: int) -> dict[str, Tensor]:
    weights = {"weight": _random(shape)}
    if layer._parameters.get("bias") is not None:
        weights["bias"] = _random((outputs,))
    return weights


def _random(shape: tuple[int, ...]) -> Tensor:
    # explicit: sparsify may run under torch.device("meta") and another default dtype
    generator = torch.Generator("cpu").manual_seed(sum(shape))  # those of the user go on as before
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
