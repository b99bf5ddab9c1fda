"""Sparse layers: subclasses of the layers they replace, with products as a method says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.execution import EMULATE, Convolution, Geometry, Linear
from sparsepretrain.sparsity.products import SparseProducts
from sparsepretrain.sparsity.state import LayerState


class SparseLayer(nn.Module):
    """Mixin before a linear layer class: the same parameters, products as the method says."""

    replaces: ClassVar[type[nn.Module]]
    in_dim: ClassVar[int] = 1
    sparsity: LayerState
    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        """Y = X·A(W)ᵀ + b for X of shape (…, in_features)."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.weight.dtype
        state, training, weight = self.sparsity, self.training, self.weight
        model = state.model
        if not torch.compiler.is_compiling():
            model.sync()
            if training:  # without gradients too, for checkpoints that are recomputed
                model.layer_runs(weight)
        operands = state.operands(weight, dtype, training)
        if operands is None:
            y = self.replaces.forward(self, x)
        else:
            given, how = self._products(x.to(dtype) if autocast else x)
            sees = state if training and model.method.phase.training else None
            execution = model.execution if training else EMULATE
            rest = (*operands, model.now(), sees, how, execution)
            in_fp32 = autocast and execution is not EMULATE  # products of simulated fp8
            with torch.autocast(device, enabled=False) if in_fp32 else nullcontext():
                y = SparseProducts.apply(given, weight, self.bias, *rest)
        residual = model.method.residual(x, state)
        return y if residual is None else y + residual

    def _products(self, x: Tensor) -> tuple[Tensor, Geometry]:
        """How this layer multiplies, and X as that wants it."""
        return x, Linear(self.in_dim)

    @classmethod
    def widths(cls, layer: Any) -> dict[str, int]:
        """Sizes that groups run along, by the name a user knows: inputs first, outputs second."""
        shape = layer.weight.shape
        return {"in_features": shape[cls.in_dim], "out_features": shape[1 - cls.in_dim]}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.sparsity.rename_old_tensors(state_dict, prefix, self.weight)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.sparsity.forget()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # most sparse classes are made on the fly: what is pickled is the class they replace
        return _blank, (self.replaces,), self.__dict__

    def extra_repr(self) -> str:
        """The original representation and the method."""
        model = self.sparsity.model
        words = (super().extra_repr(), model.method.title, model.execution.label)
        return ", ".join(filter(None, words))


class SparseConvolution(SparseLayer):
    """Mixin before nn.Conv2d: groups of M run along the input channels of each kernel position."""

    def forward(self, x: Tensor) -> Tensor:
        """Y = X ∗ A(W) + b for X of shape (N, in_channels, H, W), or without N."""
        return super().forward(x) if x.dim() != 3 else super().forward(x[None])[0]

    def _products(self: Any, x: Tensor) -> tuple[Tensor, Geometry]:
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        elif isinstance(padding, str):
            # "same" of an even kernel needs one more zero on the right, which only F.pad can give
            left, right, top, bottom = self._reversed_padding_repeated_twice
            if (left, top) != (right, bottom):
                x = F.pad(x, (0, right - left, 0, bottom - top))
            padding = (top, left)
        return x, Convolution(self.stride, padding, self.dilation, self.groups)

    @classmethod
    def widths(cls, layer: Any) -> dict[str, int]:
        """Channels that one group of a grouped convolution reduces over."""
        outputs, inputs = layer.weight.shape[0] // layer.groups, layer.weight.shape[1]
        each = "" if layer.groups == 1 else " / groups"
        return {f"in_channels{each}": inputs, f"out_channels{each}": outputs}


class SparseLinear(SparseLayer, nn.Linear):
    """nn.Linear whose products see what a method decides; weight (out_features, in_features)."""

    replaces = nn.Linear


class SparseConv2d(SparseConvolution, nn.Conv2d):
    """nn.Conv2d whose products see what a method decides."""

    replaces = nn.Conv2d


_made: dict[type, type[SparseLayer]] = {nn.Linear: SparseLinear, nn.Conv2d: SparseConv2d}


def sparse_class(cls: type[nn.Module]) -> type[SparseLayer] | None:
    """The sparse version of a layer class, or None when there is none.

    nn.Linear, nn.Conv2d, transformers' Conv1D, and subclasses of them that keep the forward.
    """
    if cls not in _made:
        base = layer_family(cls)
        if base is None or issubclass(cls, SparseLayer) or _has_own_forward(cls, base):
            return None
        mixin = SparseConvolution if base is nn.Conv2d else SparseLayer
        axis = 0 if base.__name__ == "Conv1D" else 1
        space = {"replaces": cls, "in_dim": axis, "__module__": __name__, "__doc__": cls.__doc__}
        _made[cls] = type(f"Sparse{cls.__name__}", (mixin, cls), space)
    return _made[cls]


def layer_family(cls: type[nn.Module]) -> type[nn.Module] | None:
    """nn.Linear, nn.Conv2d or transformers' Conv1D if ``cls`` is one of them or below."""
    return next((c for c in cls.__mro__ if c in (nn.Linear, nn.Conv2d) or _is_conv1d(c)), None)


def refuse_sharded(layers: Mapping[str, nn.Module]) -> None:
    """Masks need whole weights: a ConfigError names a DTensor (FSDP2, tensor parallelism)."""
    distributed = sys.modules.get("torch.distributed.tensor")  # half a second to import
    if distributed is None:
        return
    names = [k for k, v in layers.items() if isinstance(v.weight, distributed.DTensor)]
    if names:
        more = f" and {len(names) - 1} more layers" if len(names) > 1 else ""
        raise ConfigError(
            f"the weight of {names[0]!r}{more} is sharded (DTensor): fully_shard and tensor "
            "parallelism are not supported yet; use DistributedDataParallel"
        )


def _has_own_forward(cls: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether the layer, or the attention that owns it, would bypass our forward."""
    names = ("forward", "_conv_forward")
    changed = any(getattr(cls, n, None) is not getattr(base, n, None) for n in names)
    return changed or cls.__name__ == "NonDynamicallyQuantizableLinear"


class _Living(WeakSet[SparseLayer]):
    """All sparse layers of the process, copies included."""

    made = 0  # how many there ever were

    def add(self, layer: SparseLayer) -> None:
        super().add(layer)
        self.made += 1


living = _Living()


def _blank(replaced: type[nn.Module]) -> SparseLayer:
    """An empty layer to unpickle and to copy into."""
    cls = sparse_class(replaced)
    assert cls is not None
    layer = cls.__new__(cls)
    living.add(layer)
    return layer


def _is_conv1d(cls: type) -> bool:
    # by name: importing transformers to compare classes would cost seconds
    return cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.")
