"""Operands on their way through FSDP: 2:4 values and their positions instead of all entries.

Apart from sharding.py, since dry runs and reports ask it too and torch's DTensor is slow to import.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from sparsepretrain.kernels import compact_24, expand_24
from sparsepretrain.sparsity.method import Method


class Packing:
    """Which operands of a layer are gathered as 2:4 values and their positions, and how.

    FSDP allocates what it gathers into once, so that this holds for the whole run.

    Args:
        reasons: of :func:`not_packed`.
        shape: of the stored weight.
        dim: of in_features in it.
        shards: processes that have rows of it.
    """

    def __init__(
        self, reasons: Mapping[str, str], shape: tuple[int, ...], dim: int, shards: int
    ) -> None:
        self.shape, self.dims = shape, {"A": dim, "B": 1 - dim}
        self.reasons = {k: why or self._unfit(self.dims[k], shards) for k, why in reasons.items()}
        """Place -> why its operand is gathered as it is; "": it is packed."""

    @property
    def packed(self) -> list[str]:
        """Places of packed operands."""
        return [place for place, why in self.reasons.items() if not why]

    def _unfit(self, dim: int, shards: int) -> str:
        rows, entries = self.shape[0], torch.Size(self.shape).numel()
        if shards == 1:
            return "one process has all rows"
        if rows % shards:
            return f"{rows} rows are not shared out evenly over {shards} processes"
        if dim == 0 and rows // shards % 4:
            return f"{rows // shards} rows of a process are no whole groups of 4"
        if entries // shards % 8:
            return f"{entries // shards} entries of a process, no multiple of 8"
        return ""

    def bytes_per_entry(self, width: int) -> float:
        """What is gathered of one entry of the weight, whose products have ``width`` bytes."""
        return sum(width if why else width / 2 + 1 / 8 for why in self.reasons.values())

    def pack(self, place: str, rows: Tensor) -> tuple[Tensor, ...]:
        """What is gathered of the rows that this process has of an operand."""
        if self.reasons[place]:
            return (rows,)
        return compact_24(_groups_last(rows, self.dims[place]).contiguous())

    def unpack(
        self, gathered: Iterable[Tensor], into: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """All rows of the operands, by place.

        Args:
            gathered: what :meth:`pack` returned for each, of all processes.
            into: place -> where a packed one was unpacked before; None: nowhere.
        """
        parts, found = iter(gathered), {}
        for place, why in self.reasons.items():
            values, out = next(parts), into[place]
            if why:
                found[place] = values
                continue
            if out is None:
                with torch.inference_mode(False):  # a training forward may use it next
                    out = values.new_empty(self.shape)
            # autograd knows it from the forward, and sees the same values again
            kept = torch.autograd._unsafe_preserve_version_counter(out)
            with nullcontext() if out.is_inference() else kept:
                groups = _groups_last(out.detach(), self.dims[place])
                if groups.is_contiguous():
                    expand_24(values, next(parts), groups)
                else:
                    groups.copy_(expand_24(values, next(parts), values.new_empty(groups.shape)))
            found[place] = out
        return found


def _groups_last(x: Tensor, dim: int) -> Tensor:
    """A view of rows with groups along ``dim`` in its last axis, which can be cut by rows too."""
    return x.movedim(dim, -1) if dim else x.unflatten(0, (-1, 4)).movedim(1, -1)


def not_packed(method: Method) -> dict[str, str]:
    """Place of an operand -> why a method's cannot be gathered packed; "": it is always 2:4.

    Looks at a thousand steps, the first and the last among them; dense phases last longer.
    """
    total = method.total_steps or 0
    look, reasons = copy.copy(method), dict.fromkeys("AB" if method.two_operands else "A", "")
    for step in (*range(0, total, -(-total // 1000) or 1), total):
        look.set_step(step)
        for place, why in reasons.items():
            operand = getattr(look.row, place)
            if look.phase.why:
                reasons[place] = why or f"dense {look.phase.why}"
            elif operand.pattern != (2, 4):
                reasons[place] = why or f"{operand} is not 2:4" + f" at step {step}" * bool(step)
        if all(reasons.values()):
            break
    return reasons


def gathering(packings: Iterable[Packing]) -> str:
    """In a line, how many operands are gathered packed, and why others are not."""
    found = Counter(item for packing in packings for item in packing.reasons.items())
    packed = [f"{place} of {n} layers" for (place, why), n in found.items() if not why]
    whole = [f"{place} of {n} layers ({why})" for (place, why), n in found.items() if why]
    text = f"packed 2:4: {', '.join(packed) or 'nothing'}"
    return f"{text}; as they are: {', '.join(whole)}" if whole else text
