"""Classes of sparse layers, made for the classes that they replace."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.engine.banks import banks_of, is_transposed
from sparsepretrain.sparsity.engine.layers import SparseLayer
from sparsepretrain.sparsity.engine.own_forwards import has_own_forward, layer_family
from sparsepretrain.sparsity.engine.weights import SparseWeight
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.matmuls.geometry import Convolution, Geometry


class SparseConvolution(SparseLayer):
    """Mixin before nn.Conv2d: groups of M run along the input channels of each kernel position."""

    def forward(self, input: Tensor) -> Tensor:
        """Return Y = X ∗ A(W) + b for X of shape (N, in_channels, H, W), or without N."""
        return super().forward(input) if input.dim() != 3 else super().forward(input[None])[0]

    def geometry(self: Any, x: Tensor) -> tuple[Tensor, Geometry]:
        """Return X, padded unless the padding is zeros, and the convolution."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        elif isinstance(padding, str):
            # "same" padding of an even kernel has one more zero on the right: F.pad adds it
            left, right, top, bottom = self._reversed_padding_repeated_twice
            if (left, top) != (right, bottom):
                x = F.pad(x, (0, right - left, 0, bottom - top))
            padding = (top, left)
        return x, Convolution(self.stride, padding, self.dilation, self.groups)


OWN_NAMES = frozenset(
    name
    for cls in (SparseWeight, SparseLayer, SparseConvolution)
    for name in (*vars(cls), *cls.__annotations__)
) - {"weight", "bias"}
"""Names that sparse layers define or declare, except those of the layers that they replace."""

_made: dict[type, type[SparseLayer]] = {}


def sparse_class(cls: type[nn.Module]) -> type[SparseLayer] | None:
    """Return the sparse version of a layer class, or None.

    Supported: nn.Linear, nn.Conv2d, transformers' Conv1D, and their subclasses. The sparse version
    of a class with a forward of its own casts the weight to the dtype of the input: see
    :mod:`~sparsepretrain.sparsity.engine.own_forwards`.
    """
    if cls not in _made:
        base = layer_family(cls)
        if base is None:
            return None
        if cls.__name__ == "NonDynamicallyQuantizableLinear":  # its attention bypasses the forward
            return None
        mixin = SparseConvolution if base is nn.Conv2d else SparseLayer
        axis = 0 if base.__name__ == "Conv1D" else 1
        space = {"replaces": cls, "in_dim": axis, "__doc__": cls.__doc__}
        if has_own_forward(cls, base):
            space |= {"casts_weight": True, "__setattr__": _set_attribute}
        space |= {"__module__": __name__, "__reduce_ex__": _reduced}
        _made[cls] = type(f"Sparse{cls.__name__}", (mixin, cls), space)
    return _made[cls]


def replacement_of(layer: nn.Module) -> type[SparseLayer]:
    """Return the sparse version of the class of a layer that has one."""
    cls = sparse_class(type(layer))
    assert cls is not None
    return cls


def require_free_names(name: str, layer: nn.Module) -> None:
    """Refuse a layer with an attribute of its own class that sparse layers use for themselves.

    Raises:
        ConfigError: the attribute of the layer, or ours, would be lost.
    """
    base = layer_family(type(layer))
    if taken := {key for key in OWN_NAMES if hasattr(layer, key) and not hasattr(base, key)}:
        kind = type(layer).__name__
        raise ConfigError(
            f"layer {name!r} ({kind}) has an attribute {min(taken)!r}, which sparse layers use for "
            "themselves: rename it, or exclude the layer"
        )


def _set_attribute(layer: SparseLayer, name: str, value: Any) -> None:
    """Refuse another value of an attribute that the replaced forward reads, and ours does not."""
    if name in layer.fixed_attributes and value != layer.__dict__.get(name):
        raise ConfigError(
            f"{name} of a sparse {layer.replaces.__name__} is read by the forward of that class, "
            "which no longer runs: set it before sparsify, or exclude the layer"
        )
    nn.Module.__setattr__(layer, name, value)


def dense_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return matrices among the own Parameters of ``module``, which no sparse layer can replace.

    Embeddings, normalization, and tensors with a batch axis of size 1 (class tokens, learned
    positions) are excluded.
    """
    if isinstance(
        module, SparseWeight | LayerState | nn.Embedding | nn.EmbeddingBag | nn.LayerNorm
    ):
        return {}
    banks = banks_of(module)
    return {
        key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None
        and key not in banks
        and not key.endswith("bias")  # of experts, one row each
        and parameter.is_floating_point()
        and not torch.nn.parameter.is_lazy(parameter)
        and parameter.dim() >= 2
        and (parameter.shape[0] > 1 or (parameter.dim() > 2 and is_transposed(module) is not None))
    }


def _blank(replaced: type[nn.Module]) -> SparseLayer:
    """Return an empty layer to unpickle or copy into."""
    cls = sparse_class(replaced)
    assert cls is not None
    layer: SparseLayer = cls.__new__(cls)
    return layer


def _reduced(layer: SparseLayer, protocol: Any) -> Any:
    # sparse classes are created at run time, so the replaced class is pickled
    return _blank, (layer.replaces,), layer.__dict__
