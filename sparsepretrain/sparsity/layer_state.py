"""State of a sparse layer: a child module of the layer.

As buffers and Parameters of a module, the state is part of the model's state dict, so code that
saves, copies or averages models needs to know nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import AnyKey, ClockKey, NoiseKey, noise_key, pack_rows
from sparsepretrain.sparsity.clock import Clock, ClockReading

ROOM_OF_SLICES = 2**16
"""Draws, one per token or per four, that each slice of a bank has at least in a micro-batch."""
PREVIOUS_MASK = "previous_mask"
"""Buffer: packed mask of the last comparison, (rows, bytes)."""


class LayerState(nn.Module):
    """Tensors of the method in one sparse layer, the last mask, and the keys of random draws.

    Args:
        clock: of the model.
        name: of the layer.
        index: position among the sparse layers of the model, part of the keys.
        weight: initial weight, as stored.
        dim: axis of in_features, or of the input channels, in the stored weight.
        slice_rows: rows of each slice of a bank, which is one tall matrix; None: of a layer.
    """

    previous_mask: Tensor
    out: Tensor | None = None
    """Memory into which ``project`` may write A(W), returning it; None: there is none.

    It has the shape of W and the dtype of the matmuls; using it saves a cast and a copy."""

    if TYPE_CHECKING:  # the method's tensors

        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(
        self,
        clock: Clock,
        name: str,
        index: int,
        weight: Tensor,
        dim: int,
        slice_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.clock = clock
        self.layer_name = name
        self._index = index
        self.dim = dim
        self.slice_rows = slice_rows
        self.shape = tuple(weight.shape)
        self.register_buffer(PREVIOUS_MASK, pack_rows(torch.zeros_like(weight, dtype=torch.bool)))
        self.place_index(weight.device)
        # The fused path of nn.TransformerEncoderLayer reads stored weights and would bypass the
        # projection. It is disabled if any child module has a hook.
        self.register_forward_pre_hook(_never_called)

    def add_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Register the tensors of ``Method.initial_state`` as buffers, or Parameters if trained.

        Raises:
            ConfigError: the name of a tensor is in use.
        """
        for key, value in tensors.items():
            if hasattr(self, key) or "." in key:
                raise ConfigError(f"initial_state: {key!r} cannot be the name of a tensor")
            if isinstance(value, nn.Parameter):
                self.register_parameter(key, value)
            else:
                self.register_buffer(key, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayerState:
        # .to(bfloat16) converts the weight, but scales and masks keep their dtype
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for key, old in before.items():
            new = self._buffers[key]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[key] = old.to(new.device)
        return self

    def place_index(self, device: torch.device) -> None:
        """Move :attr:`index` of compiled graphs to the device of the layer."""
        with torch.inference_mode(False):  # compiled training reads it later
            self._index_tensor = torch.tensor(self._index, device=device)

    @property
    def slices(self) -> int:
        """Slices of a bank; 1 for a layer."""
        return 1 if self.slice_rows is None else self.shape[0] // self.slice_rows

    @property
    def method_tensors(self) -> list[str]:
        """Names of the method's tensors in the state dict."""
        return [key for key in (*self._buffers, *self._parameters) if key != PREVIOUS_MASK]

    @property
    def index(self) -> int | Tensor:
        """Position among the sparse layers: an integer, or a 0-d int64 tensor in compiled graphs.

        An integer would be a constant of the graph, and every block would be compiled separately.
        """
        return self._index_tensor if torch.compiler.is_compiling() else self._index

    @property
    def step(self) -> int | Tensor:
        """Completed optimizer steps: an integer, or a 0-d int64 tensor in compiled graphs."""
        return self.clock.tensor[0] if torch.compiler.is_compiling() else self.clock.step

    def key(self, matmul: int) -> NoiseKey:
        """Return the noise stream of a matmul at this step."""
        return noise_key(self.clock.seed, self.step, self.index, matmul)

    def key_at(
        self, reading: ClockReading, matmul: int, counters: int, per: int = 1, call: int = 0
    ) -> AnyKey:
        """Return the noise stream of a matmul for one call of the layer in a micro-batch.

        Micro-batches share no draws if all have equally many tokens, or ``capacity`` bounds them.

        Args:
            reading: (completed steps, micro-batch).
            matmul: number of the matmul.
            counters: draws of this micro-batch.
            per: tokens that share a counter.
            call: number of the call of this layer within the micro-batch, below 2²⁴.
        """
        matmul |= call << 8
        seed = self.clock.seed
        room = max(counters, -(-self.clock.capacity // per))
        if self.slice_rows is not None:  # micro-batches send different numbers of tokens there
            room = max(room, ROOM_OF_SLICES)
        if isinstance(reading, Tensor):
            return ClockKey(reading, seed, self.index, matmul, room)
        step, micro = reading
        return noise_key(seed, step, self.index, matmul, micro * room)


def _never_called(module: nn.Module, args: tuple[object, ...]) -> None:
    """Layer states have no forward."""
