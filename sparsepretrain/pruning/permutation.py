"""Order of input channels that lets N:M keep larger scores, folded into the layers before.

Zhang et al. (ICLR 2024). Reordering the inputs of a layer costs nothing if the layers
that compute them are reordered alike: the inner axis of an FFN, and the channels of a head between
value and output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from sparsepretrain.pruning.layers import matrix_of

GAINS_AT_ONCE = 1 << 24
"""Maximum entries of a tensor of gains (rows, candidates, groups)."""
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "Wo", "o")
"""Last parts of the names of output projections of attention."""
VALUES = ("v_proj", "v", "value", "v_lin")
FUSED = ("c_attn", "qkv_proj", "Wqkv", "query_key_value", "qkv")
"""Query, key and value in one layer."""


def retained(score: Tensor, n: int, m: int) -> float:
    """Return the sum of the scores (rows, channels) that N:M keeps along the channels."""
    return float(score.unflatten(1, (-1, m)).topk(n, dim=-1).values.sum(dtype=torch.float64))


def best_order(score: Tensor, n: int, m: int) -> Tensor:
    """Return an order of the channels that keeps at least as much of the score as the present one.

    Channels are dealt to the groups by their total, back and forth. Then the channels at one
    position of all groups are assigned anew, the others fixed, which is a linear assignment; once
    for each position.

    Args:
        score: (rows, channels), ≥ 0; the number of channels is a multiple of ``m``.
        n: elements kept of every m.
        m: group size.

    Returns:
        (channels,) int64: channel ``order[j]`` goes to position j.
    """
    present = torch.arange(score.shape[1], device=score.device)
    groups = score.shape[1] // m
    if groups < 2 or n >= m:
        return present
    dealt = score.sum(0).argsort(descending=True, stable=True).view(m, groups)
    lanes = [lane.flip(0) if i % 2 else lane for i, lane in enumerate(dealt)]
    for i in range(m):
        others = torch.stack([lane for j, lane in enumerate(lanes) if j != i])
        # with a candidate c a group keeps max(0, c - its nth score without it) more
        nth = score[:, others].topk(n, dim=1).values[:, -1]
        gains = _gains(score[:, lanes[i]], nth)
        candidates, chosen = linear_sum_assignment(gains.cpu().numpy(), maximize=True)
        lane = torch.empty_like(lanes[i])
        lane[torch.as_tensor(chosen, device=lane.device)] = lanes[i][
            torch.as_tensor(candidates, device=lane.device)
        ]
        lanes[i] = lane
    order = torch.stack(lanes, dim=1).flatten()
    return order if retained(score[:, order], n, m) > retained(score, n, m) else present


def _gains(candidates: Tensor, nth: Tensor) -> Tensor:
    """Return Σ over rows of max(0, candidate - nth score of a group), (candidates, groups)."""
    rows, groups = nth.shape
    size = max(1, GAINS_AT_ONCE // groups**2)
    total = torch.zeros(groups, groups, dtype=torch.float64, device=nth.device)
    for first in range(0, rows, size):
        part = candidates[first : first + size, :, None] - nth[first : first + size, None, :]
        total += part.clamp_(min=0).sum(0, dtype=torch.float64)
    return total


@dataclass(frozen=True)
class Producer:
    """Rows of a layer that compute the inputs of another one."""

    name: str
    first: int = 0
    """Row of channel 0 of part 0."""
    stride: int = 0
    """Rows from one part to the next."""


@dataclass(frozen=True)
class Fold:
    """Inputs of a layer that may be reordered, and the layers that compute them.

    The inputs are ``parts`` · ``copies`` · ``size`` channels. Each part has an order of its own;
    copies within a part, heads that share keys and values, have the same one.
    """

    consumer: str
    producers: tuple[Producer, ...]
    parts: int
    copies: int
    size: int

    @property
    def is_ffn(self) -> bool:
        """True for the inner axis of an FFN, False for channels of heads."""
        return self.parts == 1 and self.copies == 1 and not self.producers[0].stride

    def orders(self, score: Tensor, n: int, m: int) -> Tensor:
        """Return the best order of each part, (parts, size).

        Args:
            score: (out_features, in_features) of the consumer.
            n: elements kept of every m.
            m: group size.
        """
        parts = score.unflatten(1, (self.parts, self.copies, self.size))
        return torch.stack([best_order(parts[:, p].flatten(0, 1), n, m) for p in range(self.parts)])

    def apply(self, layers: Mapping[str, nn.Module], orders: Tensor) -> Tensor:
        """Reorder producers and consumer in place.

        Returns:
            order of all inputs of the consumer.
        """
        part = torch.arange(self.parts, device=orders.device)[:, None]
        for producer in self.producers:
            layer = layers[producer.name]
            start = producer.first + part * producer.stride
            rows = (start + torch.arange(self.size, device=orders.device)).flatten()
            source = (start + orders).flatten()
            matrix = matrix_of(layer)
            matrix[rows] = matrix[source]
            bias: Any = getattr(layer, "bias", None)
            if bias is not None:
                bias.data[rows] = bias.data[source]
        copies = torch.arange(self.parts * self.copies, device=orders.device)[:, None]
        order = (copies * self.size + orders.repeat_interleave(self.copies, 0)).flatten()
        matrix = matrix_of(layers[self.consumer])
        matrix.copy_(matrix[:, order])
        return order


def folds_of(
    layers: Mapping[str, nn.Module], roles: Mapping[str, Sequence[str]], config: Any, m: int
) -> Iterator[Fold]:
    """Yield the places of a block where an order of channels may fold, by the names of its layers.

    They are guesses: :func:`try_fold` checks that the consumer computes the same.

    Args:
        layers: name -> linear layer of the block.
        roles: see :func:`~sparsepretrain.models._families.roles_of`.
        config: of the model of transformers.
        m: size of a group, which must divide a part.
    """

    def has(name: str, role: str) -> bool:
        return any(fnmatchcase(f".{name}", glob) for glob in roles[role])

    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        beside = {n: x for n, x in layers.items() if n.rpartition(".")[0] == parent and n != name}
        width = matrix_of(layer).shape[1]
        if has(name, "ffn_out"):
            first = {n: x for n, x in beside.items() if has(n, "ffn") and not has(n, "ffn_out")}
            producers = [
                Producer(n, start)
                for n, x in first.items()
                for start in range(0, len(matrix_of(x)), width)
                if len(matrix_of(x)) in (width, 2 * width)  # gate and up may be one layer
            ]
            if producers and width % m == 0:
                yield Fold(name, tuple(producers), 1, 1, width)
        elif has(name, "attention") and last in OUTPUTS:
            yield from _heads(name, width, beside, config.get_text_config(), m)


def _heads(
    name: str, width: int, beside: Mapping[str, nn.Module], config: Any, m: int
) -> Iterator[Fold]:
    """Yield the fold of value and output projection, if the value projection is found."""
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if not heads or width % heads or (width // heads) % m:
        return
    size = width // heads
    for value, layer in beside.items():
        last = value.rpartition(".")[2]
        rows = len(matrix_of(layer))
        if last in VALUES and rows % size == 0 and heads % (rows // size) == 0:
            parts = rows // size
            yield Fold(name, (Producer(value, 0, size),), parts, heads // parts, size)
        elif last == "query_key_value" and rows == 3 * width:
            # of each head in turn: query, key, value
            yield Fold(name, (Producer(value, 2 * size, 3 * size),), heads, 1, size)
        elif last in FUSED and rows > width and (rows - width) % (2 * size) == 0:
            parts = (rows - width) // (2 * size)
            if heads % parts == 0:
                first = rows - parts * size
                yield Fold(name, (Producer(value, first, size),), parts, heads // parts, size)


def try_fold(
    fold: Fold,
    layers: Mapping[str, nn.Module],
    orders: Tensor,
    output: Callable[[], Tensor],
    tolerance: float,
) -> Tensor | None:
    """Apply a fold, and undo it unless the consumer computes the same.

    Args:
        fold: where.
        layers: name -> layer of the block.
        orders: (parts, size).
        output: computes the output of the consumer on a batch.
        tolerance: difference that rounding may make, relative to the norm of the output.

    Returns:
        the order of the inputs of the consumer; None: the fold was undone.
    """
    before = output()
    order = fold.apply(layers, orders)
    # an output without values, of a layer that did not run, proves nothing
    if bool(before.any()) and bool((output() - before).norm() <= tolerance * before.norm()):
        return order
    fold.apply(layers, orders.argsort(dim=1))
    return None
