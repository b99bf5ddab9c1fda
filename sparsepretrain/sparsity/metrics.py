"""Numbers of the current weights of a sparse model, for the record of a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsepretrain.kernels import boundary_magnitudes
from sparsepretrain.sparsity.engine.model_state import ModelState
from sparsepretrain.sparsity.engine.weights import SparseWeight


@torch.no_grad()
def measure(
    layers: Mapping[str, SparseWeight],
    state: ModelState,
    flips: Tensor | None,
    counts: Tensor | None,
    *,
    per_layer: bool,
) -> tuple[dict[str, float], list[list[int]]]:
    """Return :meth:`Sparsifier.metrics`, and integers of the device, in one wait.

    Args:
        layers: name -> sparse layer.
        state: of the model.
        flips: counted after the last step, (layers,); None: masks were not compared.
        counts: integers to return as lists, (k, layers).
        per_layer: also the numbers of each layer.
    """
    method = state.method
    rows = []
    of_slices = {}  # numbers of the slices of a bank: name -> (density or flips, …)
    own_rows = next(iter(layers.values())).operands.rows
    for layer in layers.values():
        operands = layer.operands
        dim = layer.sparsity.dim
        n, m = operands.method.pattern
        forward = operands.project(layer.weight).forward if method.phase.training else None
        stored = operands.rows.local(layer.weight).detach()
        used = stored if forward is None else forward
        weight = operands.rows.complete(stored, m if dim == 0 else 1)
        dropped, kept = boundary_magnitudes(weight, n, m, dim=dim)
        gap = (kept - dropped).sum(dtype=torch.float64)
        sizes = [gap.new_full((), part.numel()) for part in (stored, dropped)]  # no copy
        masks = [gap.new_zeros(())] * 2
        if method.prunes_at_end:
            magnitude = stored.abs().double()
            rest = magnitude.masked_fill(operands.bool_mask(layer.weight), 0.0)
            masks = [rest.sum(), magnitude.sum()]
        rows.append(torch.stack([*sizes, used.count_nonzero().double(), gap, *masks]))
        slice_rows = layer.sparsity.slice_rows
        if per_layer and slice_rows is not None:
            name = layer.sparsity.layer_name
            in_slices = used.view(-1, slice_rows * used.shape[1]).count_nonzero(1)
            of_slices[f"density/{name}"] = operands.rows.gather(in_slices)
            if flips is not None and name in state.slice_flips:
                flipped_slices = state.slice_flips[name]
                of_slices[f"flip_rate/{name}"] = operands.rows.gather(flipped_slices)
    # sums of integers below 2⁵³ are exact in fp64
    columns = [
        own_rows.total(torch.stack(rows)),
        flips,
        counts if counts is None else counts.t(),
    ]
    stacked = torch.column_stack([c for c in columns if c is not None])
    together = [stacked.flatten(), *(numbers.double() for numbers in of_slices.values())]
    values = iter(torch.cat(together).tolist())
    table = [[next(values) for _ in range(stacked.shape[1])] for _ in layers]
    width = 6 + (flips is not None)
    counted = [list(map(int, c)) for c in zip(*(row[width:] for row in table), strict=True)]
    table = [row[:width] for row in table]
    sums = [float(sum(column)) for column in zip(*table, strict=True)]
    entries, groups, nonzeros, gaps, masked, magnitudes, *flipped = sums
    result = {
        "density": nonzeros / entries,
        "l1_gap": gaps / groups,
        "sparse": float(bool(method.phase.row.sparse)),
        **method.metrics(),
    }
    if method.prunes_at_end:
        result["masked_share"] = masked / magnitudes if magnitudes else 0.0
    if flipped:
        result["flip_rate"] = flipped[0] / entries
        if state.flip_interval > 1:
            result["flip_interval"] = float(state.flip_interval)
    if per_layer:
        for name, row in zip(layers, table, strict=True):
            result[f"l1_gap/{name}"] = row[3] / row[1]
            if flipped:
                result[f"flip_rate/{name}"] = row[-1] / row[0]
        for key, counted_slices in of_slices.items():
            of_slice = layers[key.partition("/")[2]].weight.numel() / len(counted_slices)
            for index in range(len(counted_slices)):
                result[f"{key}/{index}"] = next(values) / of_slice
    return result, counted
