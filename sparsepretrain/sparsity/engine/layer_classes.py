"""Classes of sparse layers, made for the classes that they replace."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.sparsity.engine.layers import SparseLayer
from sparsepretrain.sparsity.layer_state import LayerState
from sparsepretrain.sparsity.matmuls.geometry import Convolution, Geometry


class SparseConvolution(SparseLayer):
    """Mixin before nn.Conv2d: groups of M run along the input channels of each kernel position."""

    def forward(self, x: Tensor) -> Tensor:
        """Return Y = X ∗ A(W) + b for X of shape (N, in_channels, H, W), or without N."""
        return super().forward(x) if x.dim() != 3 else super().forward(x[None])[0]

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


_made: dict[type, type[SparseLayer]] = {}


def sparse_class(cls: type[nn.Module]) -> type[SparseLayer] | None:
    """Return the sparse version of a layer class, or None.

    Supported: nn.Linear, nn.Conv2d, transformers' Conv1D, and their subclasses. The sparse version
    of a class with a forward of its own casts the weight to the dtype of the input:
    :func:`forward_objection` says for a layer whether its forward does that, and nothing else.
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
        space |= {"casts_weight": _has_own_forward(cls, base)}
        space |= {"__module__": __name__, "__reduce_ex__": _reduced}
        _made[cls] = type(f"Sparse{cls.__name__}", (mixin, cls), space)
    return _made[cls]


def _has_own_forward(cls: type[nn.Module], base: type[nn.Module]) -> bool:
    names = ("forward", "_conv_forward")
    return any(getattr(cls, name, None) is not getattr(base, name, None) for name in names)


def forward_objection(layer: nn.Module) -> str:
    """Return the reason for which the forward of a layer cannot be replaced, or "".

    A forward of its own must be the base class's with weight and bias cast to the dtype of the
    input, as in nanochat and modded-nanogpt. It is compared on random inputs, in training and in
    evaluation: outputs and gradients have to be equal bit by bit.
    """
    base = layer_family(type(layer))
    if base is None or not _has_own_forward(type(layer), base):
        return ""
    others = {*layer._parameters, *layer._buffers, *layer._modules} - {"weight", "bias"}
    if others:
        return f"a forward of its own and further tensors ({', '.join(sorted(others))})"
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),  # the forward may draw
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        fp32 = _computes_base(layer, base, torch.float32, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            fp32 = fp32 and _computes_base(layer, base, torch.float32, torch.float32)
        equal = fp32 and _computes_base(layer, base, torch.bfloat16, torch.float32)
        if fp32 and not equal and _raises(layer, base):  # it casts nothing
            equal = _computes_base(layer, base, torch.bfloat16, torch.bfloat16)
    return "" if equal else "a forward that is not F.linear(x, weight.to(x.dtype), bias)"


def _computes_base(
    layer: nn.Module, base: type[nn.Module], dtype: torch.dtype, weight_dtype: torch.dtype
) -> bool:
    """Return True if small copies of ``layer`` and of the base class compute the same."""
    attributes, shape, inputs = _small(layer)
    weights = _small_weights(layer, base, shape, weight_dtype)

    def run(cls: type[nn.Module], x: Tensor, training: bool) -> list[Tensor]:
        state = {**attributes, "training": training}
        return _output_and_gradients(layer, cls, state, weights, x.to(dtype))

    try:
        return all(
            torch.equal(own, expected) and own.dtype == expected.dtype
            for x in inputs
            for training in (True, False)
            for own, expected in zip(
                run(type(layer), x, training), run(base, x, training), strict=True
            )
        )
    except Exception:  # of code that is not ours: its forward is no plain matmul
        return False


def _raises(layer: nn.Module, base: type[nn.Module]) -> bool:
    """Return True if the forward of a layer with an fp32 weight refuses an input in bf16."""
    attributes, shape, (x, *_) = _small(layer)
    weights = _small_weights(layer, base, shape, torch.float32)
    try:
        _output_and_gradients(layer, type(layer), attributes, weights, x.bfloat16())
    except RuntimeError:
        return True
    return False


def _small_weights(
    layer: nn.Module, base: type[nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Tensor]:
    weights = {"weight": _random(shape).to(dtype)}
    if layer._parameters.get("bias") is not None:
        outputs = shape[1] if base.__name__ == "Conv1D" else shape[0]
        weights["bias"] = _random((outputs,)).to(dtype)
    return weights


def _output_and_gradients(
    layer: nn.Module,
    cls: Any,
    attributes: dict[str, Any],
    weights: dict[str, Tensor],
    x: Tensor,
) -> list[Tensor]:
    """Run the forward of ``cls`` on a copy of ``layer`` with other weights, and its backward.

    If ``cls`` is the base class, the weights are cast to the dtype of ``x``.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    x = x.clone().requires_grad_()
    parameters: dict[str, Tensor | None] = dict.fromkeys(layer._parameters)
    parameters |= leaves
    if cls is not type(layer):
        parameters |= {name: leaf.to(x.dtype) for name, leaf in leaves.items()}
    probe = copy.copy(layer)
    probe.__dict__ = {**layer.__dict__, **attributes, "_parameters": parameters}
    probe.__class__ = cls  # the base class must not call overridden parts of the forward
    y = cls.forward(probe, x)
    y.backward(torch.linspace(-1, 1, y.numel(), device="cpu").view(y.shape).to(y.dtype))
    gradients = [leaf.grad for leaf in (x, *leaves.values())]
    return [y.detach(), *(torch.zeros(()) if grad is None else grad for grad in gradients)]


def _small(layer: Any) -> tuple[dict[str, Any], tuple[int, ...], list[Tensor]]:
    """Return attributes of a small copy of a layer, the shape of its weight, and inputs."""
    if isinstance(layer, nn.Conv2d):
        groups = layer.groups
        height, width = (2 + d * k for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
        attributes = {"in_channels": 4 * groups, "out_channels": 8 * groups}
        shape = (8 * groups, 4, *layer.kernel_size)
        return attributes, shape, [_random((2, 4 * groups, height, width))]
    inputs = [_random((3, 16)), _random((2, 5, 16))]
    if layer_family(type(layer)) is nn.Linear:
        return {"in_features": 16, "out_features": 8}, (8, 16), inputs
    return {"nx": 16, "nf": 8}, (16, 8), inputs


def _random(shape: tuple[int, ...]) -> Tensor:
    # explicit: sparsify may run under torch.device("meta") and another default dtype
    generator = torch.Generator("cpu").manual_seed(sum(shape))  # those of the user go on as before
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def replacement_of(layer: nn.Module) -> type[SparseLayer]:
    """Return the sparse version of the class of a layer that has one."""
    cls = sparse_class(type(layer))
    assert cls is not None
    return cls


def layer_family(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return nn.Linear, nn.Conv2d or transformers' Conv1D if ``cls`` is a subclass, or None."""
    for c in cls.__mro__:
        # by name: importing transformers to compare classes would cost seconds
        conv1d = c.__name__ == "Conv1D" and c.__module__.startswith("transformers.")
        if conv1d or c in (nn.Linear, nn.Conv2d):
            return c
    return None


def dense_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return matrices among the own Parameters of ``module``, which no sparse layer can replace.

    Embeddings, normalization, and tensors with a batch axis of size 1 (class tokens, learned
    positions) are excluded.
    """
    if isinstance(module, SparseLayer | LayerState | nn.Embedding | nn.EmbeddingBag | nn.LayerNorm):
        return {}
    return {
        key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None
        and parameter.is_floating_point()
        and not torch.nn.parameter.is_lazy(parameter)
        and parameter.dim() >= 2
        and parameter.shape[0] > 1
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
