"""One sparse weight of a model, of a layer or of a bank: its state, and how both are loaded."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor, nn

from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.sparsity.engine.attachments import frames_to_the_caller
from sparsepretrain.sparsity.engine.model_state import ModelState
from sparsepretrain.sparsity.engine.operands import LayerOperands
from sparsepretrain.sparsity.layer_state import PREVIOUS_MASK, LayerState
from sparsepretrain.sparsity.method import Method, title


class SparseWeight(nn.Module):
    """Module that has one sparse weight: a :class:`SparseLayer` or a :class:`SparseBank`."""

    replaces: type[nn.Module]
    """Class of the module that reads the weight, before ``sparsify``."""
    in_dim: int = 1
    """Axis of in_features in the stored weight, as a matrix."""
    weight: Tensor
    bias: Tensor | None
    sparsity: LayerState
    """Tensors of the method, in the state dict."""
    operands: LayerOperands
    sparse_model: ModelState
    ran_in_training: bool = True
    """Mode of the last forward."""

    @property
    def sizes(self) -> tuple[int, int, tuple[int, ...]]:
        """in_features, out_features, and the kernel of a convolution or the slices of a bank."""
        shape = self.weight.shape
        return shape[self.in_dim], shape[1 - self.in_dim], tuple(shape[2:])

    @property
    def expected_shape(self) -> tuple[int, ...]:
        """Shape that the weight had when it was made sparse."""
        return self.sparsity.shape

    @property
    def parameter_name(self) -> str:
        """Name of the weight in the state dict of the model."""
        return f"{self.sparsity.layer_name}.weight"

    def has_own_weight(self) -> bool:
        """Return True if the weight is a Parameter of the module, as when it was made sparse."""
        return "weight" in self._parameters

    @property
    def module_name(self) -> str:
        """Name of this module in the model."""
        return self.sparsity.layer_name

    def weight_key(self, path: str) -> str:
        """Return the name of the weight in the state dict of a model with this module at a path."""
        return f"{path}.weight" if path else "weight"

    def replace_weight(self, weight: nn.Parameter) -> None:
        """Put another Parameter in the place of the weight."""
        self.weight = weight

    def become_dense(self) -> None:
        """Turn back into what was there before ``sparsify``; the weight keeps its values."""
        del self._modules["sparsity"], self.operands, self.sparse_model
        self.__dict__.pop("ran_in_training", None)

    def extra_repr(self) -> str:
        """Return the original representation and the method."""
        model = self.sparse_model
        words = (super().extra_repr(), title(self.operands.method), model.label)
        return ", ".join(filter(None, words))

    def follow_counters(self) -> None:
        """Follow counters that were loaded, or written while the mode changed."""
        if self.training is self.ran_in_training:
            self.sparse_model.sync()
        else:
            self.sparse_model.sync_in(training=self.training)
            self.ran_in_training = self.training

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.sparsity.previous_mask.is_meta
        super()._apply(fn, recurse)
        state = self.sparsity
        operands = self.operands
        operands.rows.follow(state)
        if was_meta and not state.previous_mask.is_meta:  # to_empty
            state.previous_mask.zero_()
            operands.initialized = not state.method_tensors
            self.sparse_model.left_meta = True
        operands.moved(state.previous_mask.device)
        return self

    def load(
        self, state_dict: Mapping[str, Any], weight_key: str, prefix: str
    ) -> Callable[[], None]:
        """Look at a state dict before the weight is loaded; return what is to do afterwards.

        Args:
            state_dict: of the whole model.
            weight_key: of the weight in it.
            prefix: of the tensors of the method.
        """
        state = self.sparsity
        operands = self.operands
        model = self.sparse_model
        values = {weight_key: self.weight}
        names = (*state.method_tensors, PREVIOUS_MASK)
        values |= {f"{prefix}{name}": getattr(state, name) for name in names}
        # broadcast_from_rank0 copies into the memory of a model that left the meta device
        unset = not operands.initialized
        brings_weight, *brings_own = (_brings(state_dict, *item, unset) for item in values.items())

        def loaded() -> None:
            operands.clear()
            model.attachment.forget()
            is_new = model.is_new
            # Before the first step the method's tensors follow from the weights. A layer without
            # values computes them, because torch may have added its own unwritten ones to a dense
            # state dict.
            if all(brings_own) and not (unset and is_new):
                operands.initialized = True
                operands.reset_due = False
                operands.note_source(self.weight)
            elif brings_weight and is_new and not self.weight.is_meta:
                # initial weights of a dense model
                if operands.rows.is_prepared:
                    operands.reset_due = True  # `attach` finds the own rows
                else:
                    operands.reset(self.weight)
                    model.baseline_due = True
            elif brings_weight and not all(brings_own) and _is_fixed(model.method):
                warnings.warn(
                    f"{model.method.options.name}: weights were loaded without their masks, and "
                    "those of the old weights never change: load a state dict of the sparse model, "
                    "or load the weights before sparsify",
                    SparsePretrainWarning,
                    stacklevel=frames_to_the_caller(),
                )

        return loaded


def _is_fixed(method: Method) -> bool:
    """Return True if the present masks are kept for good."""
    return method.fixed_from is not None and method.schedule.step >= method.fixed_from


def _brings(
    state_dict: Mapping[str, Tensor], key: str, present: Tensor, unset: bool = False
) -> bool:
    """Return True if ``state_dict`` has another tensor than ``present`` under ``key``.

    When torch loads whole tensors into shards, it adds tensors that the module already has.

    Args:
        unset: the module has no values of its own, so ``present`` itself was filled.
    """
    value = state_dict.get(key)
    if value is None:
        return False
    if unset or value.is_meta or present.is_meta or not value.numel():
        return True
    return _memory(value).data_ptr() != _memory(present).data_ptr()


def _memory(tensor: Any) -> Tensor:
    """Return the plain tensor of a DTensor or of a shard of a master weight."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    plain: Tensor = getattr(tensor, "_tensor", tensor)
    return plain


def is_dtensor(value: object) -> bool:
    """Return True if ``value`` is a DTensor, without importing it, which takes half a second."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)
