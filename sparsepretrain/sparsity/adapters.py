"""Adapters of peft on sparse layers, masked so that they merge to N:M.

A merged LoRA gives W + ΔW with ΔW = s·L·R, which is dense, and projecting it again gives another
function. Here ΔW is masked like the layer, in the forward too: Y = X·(M∘W)ᵀ + X·(M∘ΔW)ᵀ. Merging
then gives M∘(W + ΔW), which is N:M and computes the same (SparsePEFT of SQFT, arXiv:2410.03750).
Each forward of an adapter computes L·R, projects the weight once more for its mask, and has one
dense matmul of the layer's size.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.kernels import unpacked
from sparsepretrain.sparsity.engine.layers import SparseLayer
from sparsepretrain.sparsity.operand_table import W

LORA = ("peft.tuners.lora.layer", "Linear")
"""Module and name of the class of LoRA on nn.Linear and Conv1D."""


class MaskedAdapter:
    """Mixin before a layer of peft whose ``base_layer`` is sparse."""

    merge_mask: Tensor | None = None
    """Mask from a merge until it is undone: the merged weight may suggest another one."""

    base_layer: Any
    merged_adapters: list[str]

    def current_mask(self) -> Tensor | None:
        """Return the mask of the base layer, of the shape of its weight; None: it is dense now."""
        if self.merge_mask is not None:
            return self.merge_mask
        base = self.base_layer
        if not isinstance(base, SparseLayer):  # densify was called: zeros stay zeros
            kept: Tensor = base.weight.detach() != 0
            return kept
        forward, mask, *_ = base.operands.project(base.weight, base.training)
        if forward is None:
            return None
        mask = base.operands.mask(base.weight) if mask is None else mask
        return unpacked(mask, forward.shape)

    def get_delta_weight(self, *args: Any, **options: Any) -> Tensor:
        """Return ΔW of an adapter under the mask; peft merges it, and undoes that."""
        delta: Tensor = super().get_delta_weight(*args, **options)  # type: ignore[misc]
        mask = self.current_mask()
        return delta if mask is None else delta * mask.to(delta.device)

    def merge(self, *args: Any, **options: Any) -> None:
        """Merge adapters; masks that follow the weight keep what they keep now."""
        base = self.base_layer
        before = self.merge_mask
        count = len(self.merged_adapters)
        self.merge_mask = self.current_mask()
        try:
            super().merge(*args, **options)  # type: ignore[misc]
        finally:
            if len(self.merged_adapters) == count:  # nothing was merged
                self.merge_mask = before
        if self.merge_mask is None or not isinstance(base, SparseLayer):
            return
        if base.operands.method.fixed_from is None:
            # dropped weights might become the largest of their group
            base.weight.data.mul_(self.merge_mask)
        base.operands.refresh(base.weight)

    def unmerge(self) -> None:
        """Undo a merge."""
        super().unmerge()  # type: ignore[misc]
        self.merge_mask = None
        if isinstance(self.base_layer, SparseLayer):
            self.base_layer.operands.refresh(self.base_layer.weight)


class MaskedLoRA(MaskedAdapter):
    """Mixin before LoRA on nn.Linear and Conv1D, whose forward multiplies by R and L in turn."""

    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return X·A(W)ᵀ + b + Σ over active adapters of X·(M∘ΔW)ᵀ."""
        if options.get("adapter_names") is not None:
            raise ConfigError(
                "adapters of several names in one batch (adapter_names) have no masks: use one "
                "adapter per batch, or attach(optimizer, mask_adapters=False)"
            )
        if self.disable_adapters or self.merged:
            result: Tensor = super().forward(x, *args, **options)  # type: ignore[misc]
            return result
        result = self.base_layer(x, *args, **options)
        dtype = result.dtype
        for adapter in self.active_adapters:
            if adapter not in self.lora_A:
                continue
            if adapter in self.lora_variant:
                raise ConfigError(
                    f"the adapter {adapter!r} is a variant of LoRA (DoRA, aLoRA, …), which has no "
                    "mask: use LoRA on sparse layers, or attach(optimizer, mask_adapters=False)"
                )
            delta = self.get_delta_weight(adapter)
            inputs = self.lora_dropout[adapter](self._cast_input_dtype(x, delta.dtype))
            result = result + F.linear(inputs, delta.t() if self.fan_in_fan_out else delta)
            if self.lora_bias[adapter]:
                result = result + self.lora_B[adapter].bias * self.scaling[adapter]
        return result.to(dtype)


HARD = ("M∘W", "Mt∘W", "Mf∘W")
"""Forward weights that keep some weights and drop the others."""

_made: dict[type, type] = {}


def mask_adapters(model: nn.Module) -> int:
    """Mask the adapters on sparse layers like these layers, in place; :meth:`attach` does it too.

    LoRA on linear layers, LoHa and LoKr of peft, on methods whose forward weight is M∘W (``asp``,
    ``slope``, ``ste``, ``srste``, ``step``, …). A warning names others, whose merged weights would
    compute another function: call ``densify`` before merging them.

    Args:
        model: contains sparse layers with adapters, in any order of ``sparsify`` and
            ``get_peft_model``.

    Returns:
        number of masked adapters; those masked before count.
    """
    count = 0
    left: list[str] = []
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if isinstance(module, MaskedAdapter):
            count += 1
        elif isinstance(base, SparseLayer) and hasattr(module, "merged_adapters"):
            if base.operands.method.sparse_row.A == W:
                continue  # gradients or inputs are sparse: merging changes nothing
            mixin = _mixin_of(module)
            if mixin is None or not _drops_only(base):
                left.append(name)
                continue
            module.__class__ = _masked_class(mixin, type(module))
            count += 1
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        warnings.warn(
            f"the adapter {left[0]!r}{more} of a sparse layer is not masked: merging it changes "
            "the outputs; call densify(model) before merging",
            SparsePretrainWarning,
            stacklevel=3,
        )
    return count


def _mixin_of(module: nn.Module) -> type[MaskedAdapter] | None:
    """Return the mixin for a class of adapters, or None."""
    cls = type(module)
    if (cls.__module__, cls.__name__) == LORA:
        # variants (DoRA, …) have forwards of their own
        return None if getattr(module, "lora_variant", None) else MaskedLoRA
    # LoHa, LoKr: their forward multiplies by get_delta_weight
    return MaskedAdapter if hasattr(module, "_get_delta_activations") else None


def _drops_only(layer: SparseLayer) -> bool:
    """Return True if the forward weight of a sparse phase is M∘W, with a hard mask."""
    method = layer.operands.method
    return method.sparse_row.A.text in HARD and not layer.operands.rows.is_sharded


def _masked_class(mixin: type[MaskedAdapter], cls: type) -> type:
    """Return the masked version of a class of adapters."""
    if cls not in _made:
        space = {"__module__": __name__, "__doc__": cls.__doc__, "__reduce_ex__": _reduced}
        _made[cls] = type(f"Masked{cls.__name__}", (mixin, cls), space)
    return _made[cls]


def _reduced(module: Any, protocol: Any) -> Any:
    # masked classes are created at run time, so the class of peft is pickled
    mixin, cls = type(module).__bases__
    return _blank, (mixin, cls), module.__dict__


def _blank(mixin: type[MaskedAdapter], cls: type) -> Any:
    """Return an empty module to unpickle or copy into."""
    made: Any = _masked_class(mixin, cls)
    return made.__new__(made)
