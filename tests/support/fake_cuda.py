"""A CUDA device without a GPU: its tensors say cuda:0, their data lie on the CPU.

To Python a :class:`Pretended` tensor is on cuda:0; to C++ it is a CPU tensor. Triton kernels run
interpreted, so the process needs ``TRITON_INTERPRET=1``; whatever else computes does so with the
CPU's operators. So numbers are real, and are those of a CPU run bit for bit. What a GPU would mind
is recorded: operands on different devices (which raise, too), waits of the host for the device, and
kernels that Triton would compile.

Not pretended: streams, captured graphs, cuBLAS, and the CUDA list of autocast (that of the CPU is
used).
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SHOWN = tuple(
    f"{Path(find_spec(name).origin).parent}/"  # whole: a checkout may be below such a name
    for name in ("sparsepretrain", "transformers", "timm", "torch.optim", "torch.nn.utils")
)
"""Directories of the frames that a record names."""

WAITS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "is_nonzero": "bool",
    "equal": "equal",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "repeat_interleave": "repeat_interleave",
    "bincount": "bincount",
}
"""Operators whose result, or its size, the host has to know."""

LIBRARY = ("compress_24", "matmul_24")
"""Operators of this package that call a library of NVIDIA's; their reference runs instead."""

INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


@dataclass
class Record:
    """Events on the device since the record was cleared. A wait is (kind, file:function)."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    mixups: list[str] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    variants: defaultdict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))

    def clear(self) -> None:
        """Forget all but the variants of kernels, which stay compiled."""
        for kept in (self.waits, self.mixups, self.operators):
            kept.clear()


RECORD = Record()


class Pretended(torch.Tensor):
    """A tensor that says it is on cuda:0; ``raw`` is the CPU tensor that shares its memory."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> Pretended:
        made = torch.Tensor._make_subclass(cls, raw, requires_grad)
        made.raw = raw
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, **_: Any) -> str:
        return f"pretended({self.raw})"

    def tolist(self) -> Any:
        _wait("tolist")
        return self.raw.tolist()

    def cpu(self, *args: Any, **options: Any) -> Tensor:
        _wait("cpu")
        return self.raw.detach().clone()

    def cuda(self, *args: Any, **options: Any) -> Tensor:
        return self

    def to(self, *args: Any, **options: Any) -> Tensor:
        copy = options.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, later, _ = torch._C._nn._parse_to(*args, **options)
        if device is not None and device.type == "cpu":
            if not later:  # else to pinned memory, which an event guards
                _wait("cpu")
            host = self.raw.detach().clone()
            return host if dtype is None else host.to(dtype)
        if device is not None and device.type == "meta":
            return self.raw.to(*args, **options)
        if dtype is None or dtype == self.dtype:
            return self.clone() if copy else self
        return torch.Tensor.to(self, dtype)

    def pin_memory(self, *args: Any) -> Tensor:
        raise RuntimeError("cannot pin 'cuda' tensors: only dense CPU tensors can be pinned")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = Pretended(self.raw.detach().clone(), self.requires_grad)
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k != "raw"})
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait("pickle")
        return self.raw.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class _Event:
    """A CUDA event; only waiting for it counts."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        _wait("event")


class _Mode(TorchDispatchMode):
    """Sees factories, which have no tensor among their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name.partition("::")[2]
    leaves = tree_leaves((args, kwargs))
    here = [x for x in leaves if isinstance(x, Pretended)]
    away = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Pretended)]
    asked = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
    if not here and not asked:
        return func(*args, **kwargs)
    if func.namespace == "sparsepretrain" and name not in LIBRARY:
        # its own body launches kernels on these tensors
        if away:
            _mixup(str(func))
        with _Mode():
            return _body(func)(*args, **kwargs)
    RECORD.operators[name] += 1
    later = kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
    unwaited = ", not waited for" if later else ""
    if name in WAITS:
        _wait(WAITS[name])
    if name in INDEXED:
        indices = [i for i in args[1] if isinstance(i, Tensor)]
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
            _wait("nonzero")
        if any(not isinstance(i, Pretended) for i in indices):
            _wait("copy of an index to the device")
    elif name == "copy_" and not isinstance(args[1], Pretended):
        _wait(f"pageable copy to the device{unwaited}")
    elif name == "copy_" and away:
        if not later:
            _wait("copy_ to the host")
    elif name == "_to_copy" and away:
        if not (later and getattr(args[0], "pinned", False)):
            gaps = "" if args[0].is_contiguous() else " with gaps"
            _wait(f"pageable copy{gaps} to the device{unwaited}")
    elif here and any(x.dim() for x in away):
        _mixup(str(func))
    plain_args, plain_kwargs = tree_map(_raw, args), tree_map(_raw, kwargs)
    if name == "mm" and func._overloadname == "dtype":  # which CPUs do not have
        left, right, dtype = plain_args
        result = left.to(dtype) @ right.to(dtype)
    else:
        result = func(*plain_args, **plain_kwargs)
    if name == "_to_copy" and away and result is args[0]:
        result = result.clone()
    if name in WAITS and not isinstance(result, Tensor):
        return result
    back = {id(x.raw): x for x in here}

    def pretended(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return back[id(x)] if id(x) in back else Pretended(x)

    return tree_map(pretended, result)


def _pinned(tensor: Tensor) -> Tensor:
    """A copy that a copy to the device need not wait for."""
    copy = tensor.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


def _body(func: Any) -> Callable[..., Any]:
    """The Python function behind an operator of this package."""
    from torch._library.custom_ops import OPDEFS

    if func.name() in OPDEFS:
        return OPDEFS[func.name()]._init_fn
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return lambda *args, **kwargs: func._op_dk(key, *args, **kwargs)


def _raw(x: Any) -> Any:
    if isinstance(x, Pretended):
        return x.raw
    return CPU if isinstance(x, torch.device) and x.type == "cuda" else x


def _frames() -> Iterator[tuple[str, str]]:
    """(file below its package, function), innermost first; of the packages that are ``SHOWN``."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        for root in SHOWN:
            if path.startswith(root):
                yield path.removeprefix(root), frame.f_code.co_name
                break
        frame = frame.f_back


def _where() -> str:
    """The innermost function that is not of this file."""
    return next((f"{file}:{function}" for file, function in _frames()), "elsewhere")


def _wait(kind: str) -> None:
    RECORD.waits[kind, _where()] += 1


def _mixup(what: str) -> None:
    stack = " < ".join(f"{file}:{function}" for file, function in list(_frames())[:5])
    RECORD.mixups.append(f"{what} at {stack}")
    raise RuntimeError(
        f"Expected all tensors to be on the same device, found cuda:0 and cpu: {RECORD.mixups[-1]}"
    )


@contextlib.contextmanager
def fake_cuda() -> Iterator[Record]:
    """Inside, there is one GPU, and ``module.to("cuda")`` moves to it; yields what is recorded."""
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer
    from torch.utils import _foreach_utils
    from triton.runtime.interpreter import InterpretedFunction

    RECORD.__init__()
    run, grouped = InterpretedFunction.run, _foreach_utils._group_tensors_by_device_and_dtype
    real_to, real_autocast = nn.Module.to, torch.autocast
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def group(lists: Any, with_indices: bool = False) -> Any:
        device = CUDA if any(isinstance(x, Pretended) for part in lists for x in part) else None
        return {(device or k[0], k[1]): v for k, v in grouped(lists, with_indices).items()}

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if any(not isinstance(x, Pretended) for x in tensors):
            _mixup(f"kernel {self.fn.__name__}")
        RECORD.variants[self.fn.__name__].add(_variant(self, args, options))
        with _disable_current_modes():
            plain, options = tree_map(_raw, args), tree_map(_raw, options)
            return run(self, *plain, grid=grid, warmup=warmup, **options)

    def to(self: nn.Module, *args: Any, **options: Any) -> nn.Module:
        device = torch._C._nn._parse_to(*args, **options)[0]
        if device is None or device.type != "cuda":
            return real_to(self, *args, **options)
        return _move(self)

    class autocast(real_autocast):
        def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **options)

    class Generator(torch.Generator):
        def __new__(cls, device: Any = None) -> Any:
            return super().__new__(cls)

    with contextlib.ExitStack() as stack:

        def put(place: Any, **values: Any) -> None:
            for name, value in values.items():
                stack.enter_context(patch.object(place, name, value))

        put(
            torch.cuda,
            is_available=lambda: True,
            is_initialized=lambda: False,
            is_current_stream_capturing=lambda: False,
            device_count=lambda: 1,
            current_device=lambda: 0,
            _lazy_init=lambda: None,
            _exchange_device=lambda index: 0,
            _maybe_exchange_device=lambda index: 0,
            get_device_name=lambda device=None: "a pretended GPU",
            get_device_capability=lambda device=None: (9, 0),
            manual_seed_all=lambda seed: None,
            synchronize=lambda device=None: _wait("synchronize"),
            Event=_Event,
        )
        put(torch.optim.Optimizer, _accelerator_graph_capture_health_check=lambda self: None)
        for module in (_foreach_utils, clip_grad, optimizer):
            put(module, _group_tensors_by_device_and_dtype=group)
        put(
            torch,
            autocast=autocast,
            Generator=Generator,
            is_autocast_enabled=lambda kind="cpu": enabled("cpu" if kind == "cuda" else kind),
            get_autocast_dtype=lambda kind="cpu": dtype_of("cpu" if kind == "cuda" else kind),
        )
        put(nn.Module, to=to)
        put(torch.Tensor, pin_memory=_pinned)
        put(InterpretedFunction, run=launch)
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(_Mode())
        yield RECORD


def _variant(kernel: Any, args: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton would compile a kernel for: types, alignment, and integers that are special."""
    fixed = kernel.kwargs.get("do_not_specialize") or ()
    found: list[Any] = []
    for name, value in zip(kernel.arg_names, args, strict=False):
        for x in tree_leaves(value):
            if isinstance(x, Tensor):
                found.append((name, x.dtype, x.data_ptr() % 16 == 0))
            elif isinstance(x, int) and not isinstance(x, bool):
                special = () if name in fixed else (x == 1, x % 16 == 0)
                found.append((name, abs(x) < 2**31, *special))
            else:
                found.append((name, type(x)))
    return tuple(map(str, [*found, *sorted(options.items())]))


def _move(model: nn.Module) -> nn.Module:
    """``model.to("cuda")``; what is tied stays tied."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, Pretended):
                if id(parameter) not in moved:
                    data = Pretended(parameter.detach().clone())
                    moved[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, Pretended):
                module._buffers[name] = Pretended(buffer.detach().clone())
    return model
