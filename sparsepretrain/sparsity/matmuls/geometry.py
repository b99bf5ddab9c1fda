"""The three dense matmuls of a linear layer and of a convolution."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight


class Linear(NamedTuple):
    """Y = X·Wᵀ + b for X (…, in_features) and W (out_features, in_features)."""

    dim: int  # axis of in_features in the stored weight: dW is laid out like the weight

    def out_features(self, weight: Tensor) -> int:
        """Return out_features of a stored weight."""
        return weight.shape[1 - self.dim]

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return Y, shape (…, out_features)."""
        return F.linear(x, weight, bias)

    def dgrad(self, grad: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return G·W with ``shape``, the shape of X."""
        return grad.matmul(weight)

    def wgrad(self, grad: Tensor, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return Gᵀ·X with ``shape``, the shape of the stored weight."""
        rows = rows_of(grad)
        tokens = rows_of(x)
        return rows.t() @ tokens if self.dim == 1 else tokens.t() @ rows

    def bgrad(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of G over tokens, accumulated in ``dtype``."""
        return rows_of(grad).sum(0, dtype=dtype)

    def tokens(self, grad: Tensor) -> Tensor:
        """Return G as (…, tokens of one sample, out_features)."""
        return grad

    def from_tokens(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        """Invert :meth:`tokens` for G of ``shape``."""
        return tokens


class Convolution(NamedTuple):
    """Y = X ∗ W + b for X (N, C, H, W) and W (out_channels, in_channels / groups, kh, kw).

    The tokens are the output positions in the order (N, H, W): wgrad sums over them, and
    :meth:`tokens` returns (N, H'·W', out_channels). dgrad sums over output channels and fprop over
    input channels, both at every kernel position.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def out_features(self, weight: Tensor) -> int:
        return weight.shape[0]

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, *self)

    def dgrad(self, grad: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        dx: Tensor = conv2d_input(torch.Size(shape), weight, grad, *self)
        return dx

    def wgrad(self, grad: Tensor, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        dw: Tensor = conv2d_weight(x, torch.Size(shape), grad, *self)
        return dw

    def bgrad(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        return grad.sum((0, 2, 3), dtype=dtype)

    def tokens(self, grad: Tensor) -> Tensor:
        return grad.flatten(2).transpose(1, 2)

    def from_tokens(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        return tokens.transpose(1, 2).reshape(shape)


Geometry = Linear | Convolution


def rows_of(x: Tensor) -> Tensor:
    """View x as a matrix (tokens, features)."""
    return x.reshape(-1, x.shape[-1])


class LayerSize(NamedTuple):
    """The stored weight of a layer, as far as the choice of matmuls depends on it."""

    shape: tuple[int, ...]
    dim: int  # axis of in_features
    device: torch.device  # the meta device: not known where the layer will train

    def features(self) -> tuple[int, int]:
        """Return out_features and in_features."""
        return self.shape[1 - self.dim], self.shape[self.dim]

    def no_matrix(self) -> str:
        """Return why the weight is not a matrix, which sparse and fp8 matmuls need, or ""."""
        if len(self.shape) == 3:
            return "a bank of slices"
        return "" if len(self.shape) == 2 else "a convolution"

    def indivisible(self, multiple: int) -> str:
        """Return the reason for which the features are not multiples of this number, or ""."""
        if why := self.no_matrix():
            return why
        sizes = zip(("out", "in"), self.features(), strict=True)
        odd = [f"{k}_features = {n}, no multiple of {multiple}" for k, n in sizes if n % multiple]
        return ", ".join(odd)
