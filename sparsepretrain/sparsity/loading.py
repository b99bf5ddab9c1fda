"""State dicts of sparse layers: what loading a weight or the method's tensors changes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import attachments
from sparsepretrain.sparsity.layer_state import PREVIOUS_MASK, LayerState


class LoadableLayer(nn.Module):
    """Base of sparse layers: loads initial weights of a dense model, and shards of FSDP2."""

    replaces: ClassVar[type[nn.Module]]
    sparsity: LayerState
    weight: Tensor

    def register_parameter(self, name: str, param: Any) -> None:
        """Refuse a weight that tensor parallelism shards; ``fully_shard`` does not call this."""
        if is_dtensor(param) and not is_dtensor(self._parameters.get(name)):
            raise ConfigError(
                f"{name} of a sparse {self.replaces.__name__} was sharded by something other than "
                "fully_shard: tensor parallelism of sparse layers is not supported"
            )
        super().register_parameter(name, param)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.sparsity.rows.is_sharded and not keep_vars:
            # writers of files need memory, which the wrapper that FSDP gathers does not have
            from sparsepretrain.sparsity.sharding import unwrapped

            destination[f"{prefix}weight"] = unwrapped(destination[f"{prefix}weight"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        own = self.sparsity
        values = {f"{prefix}weight": self.weight}
        names = (*own.own_tensors, PREVIOUS_MASK)
        values |= {f"{prefix}sparsity.{name}": getattr(own, name) for name in names}
        # broadcast_from_rank0 copies into the memory of a model that left the meta device
        unset = not own.initialized
        brings_weight, *brings_own = (_brings(state_dict, *item, unset) for item in values.items())
        super()._load_from_state_dict(state_dict, prefix, *rest)
        own.cache.clear()
        attachments.frozen_values.pop(self, None)  # a loaded weight may differ
        is_new = own.model.is_new
        # Before the first step the method's tensors follow from the weights. A layer without values
        # computes them, because torch may have added its own unwritten ones to a dense state dict.
        if all(brings_own) and not (unset and is_new):
            own.initialized, own.reset_due = True, False
        elif brings_weight and is_new and not self.weight.is_meta:
            # initial weights of a dense model
            if own.rows.is_prepared:
                own.reset_due = True  # `attach` finds the own rows
            else:
                own.reset(self.weight)


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
