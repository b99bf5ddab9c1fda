"""The matmuls of one layer: dense, in fp8 or sparse, chosen for its size, device and inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from sparsepretrain.sparsity.matmuls.fp8 import FP8Precision, unpacked_matmuls
from sparsepretrain.sparsity.matmuls.geometry import LayerSize
from sparsepretrain.sparsity.matmuls.policy import Case, SparseMatmulPolicy, objection
from sparsepretrain.sparsity.matmuls.sparse24 import cannot_pack, packing, padding
from sparsepretrain.sparsity.matmuls.three import DENSE, MATMUL_OF, Matmuls
from sparsepretrain.sparsity.method import Method


class LayerMatmuls:
    """The matmuls of one layer, chosen for its size, device and first inputs.

    Args:
        method: reads the present row; see :class:`~sparsepretrain.sparsity.method.Method`.
        precision: None: matmuls follow autocast.
        policy: None: no operand is packed.
        size: of the stored weight.
        sharded: the weight is prepared for FSDP, whose operands are not packed.
    """

    def __init__(
        self,
        method: Method,
        precision: FP8Precision | None,
        policy: SparseMatmulPolicy | None,
        size: LayerSize,
        *,
        sharded: bool = False,
    ) -> None:
        self.method = method
        self.precision = precision
        self.policy = policy
        self.size = size
        self.base, self.simulated = unpacked_matmuls(precision, size)
        self.reasons: dict[str, str] = {}
        """N:M operand -> the reason for which it is not packed; "": it is."""
        self.packs: str
        """Operands that are packed while their row is 2:4."""
        self._pack("")
        self.is_final = False
        """True once the matmuls were tried with inputs of the layer."""
        if policy is None:
            return
        self.reasons = policy.reasons(method.sparse_row, size, self.base)
        if dense := method.dense_training:
            self.reasons = {name: why or dense for name, why in self.reasons.items()}
        if sharded:
            self.reasons = {k: why or "its weight is sharded" for k, why in self.reasons.items()}
        if policy.name != "auto":
            self._pack(self._possible)

    def on(self, device: torch.device, *, sharded: bool) -> LayerMatmuls:
        """Return the matmuls of the same layer on ``device``, not tried yet."""
        size = self.size._replace(device=device)
        return LayerMatmuls(self.method, self.precision, self.policy, size, sharded=sharded)

    @property
    def _possible(self) -> str:
        return "".join(name for name, why in self.reasons.items() if not why)

    def padding(self) -> dict[str, str]:
        """Return operand -> the zero padding of its sparse matmul, where that has any."""
        words = {name: padding(self.base, name, *self.size.features()) for name in self._possible}
        return {name: text for name, text in words.items() if text}

    def now(self, dtype: torch.dtype, training: bool) -> Matmuls:
        """Return the matmuls of the present phase."""
        if not training:
            return DENSE
        if not self.packs:
            return self.base
        row = self.method.phase.row
        packs = [name for name in self.packs if getattr(row, name).pattern == (2, 4)]
        packs = [
            name for name in packs if not cannot_pack(getattr(self.base, MATMUL_OF[name]), dtype)
        ]
        return self._packed["".join(packs)]

    def _pack(self, operands: str) -> None:
        """Let ``operands`` be packed while their row is 2:4.

        Their matmuls are built here, in every combination that phases may need: a compiled layer
        only looks them up, because dynamo cannot trace how they are built.
        """
        self.packs = operands
        self._packed = {"": self.base}
        for count in range(len(operands)):
            for chosen in map("".join, combinations(operands, count + 1)):
                self._packed[chosen] = packing(self.base, chosen)

    def try_inputs(
        self, weight: Tensor, inputs: Sequence[int], dtype: torch.dtype, *, bias: bool
    ) -> bool:
        """Try the possible matmuls with inputs of one shape; return True if packing changed.

        Args:
            weight: of the layer, as stored.
            inputs: (…, tokens of a sample, in_features).
            dtype: of the layer's matmuls.
            bias: True if the layer has one.
        """
        if self.is_final or weight.is_meta:
            return False
        policy = self.policy
        before = self.packs
        device = weight.device
        if self.precision is not None:
            self.precision.require_here(device)
        if policy is not None:
            policy.require_here(device, dtype, self.precision)
        self.is_final = True
        if policy is None:
            return False
        shape = self.size.shape
        dim = self.size.dim
        tokens = torch.Size(inputs[:-1])
        for name in self._possible:
            case = Case(name, shape[1 - dim], shape[dim], tokens.numel(), dtype, dim, bias)
            why = objection(name, tokens, dtype, self.base)
            if not why and case not in policy.trials:
                policy.trials[case] = policy.attempt(case, device, self.base)
            self.reasons[name] = why or policy.trials[case].objection
        self._pack(self._possible)
        return self.packs != before
