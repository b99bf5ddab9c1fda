"""The coverage report: which layers are sparse and what each product sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sparsepretrain.sparsity.execution import EMULATE
from sparsepretrain.sparsity.layers import SparseLayer, sparse_class
from sparsepretrain.sparsity.row import Row
from sparsepretrain.sparsity.state import ModelState


class CoveredLayer(NamedTuple):
    """One sparse layer."""

    name: str
    kind: str  # class that was replaced
    in_features: int  # of a convolution: in_channels / groups
    out_features: int  # of a convolution: out_channels
    kernel: tuple[int, ...]  # kernel size of a convolution; () for linear layers
    fprop: str  # operands in words, once they are sparse
    dgrad: str
    wgrad: str


@dataclass(slots=True, kw_only=True)
class Coverage:
    """All sparse layers of a model; ``str()`` is a table."""

    method: str
    pattern: str
    row: Row  # what the products see once they are sparse
    title: str  # method and pattern; the method alone where no product has an N:M operand
    layers: list[CoveredLayer] = field(default_factory=list)
    sparse_parameters: int = 0  # entries of the sparse weights
    total_parameters: int = 0
    dense_linears: list[str] = field(default_factory=list)
    """Linear layers and convolutions that stay dense."""
    precision: str | None = None  # formats of simulated fp8; None: the products follow autocast

    @property
    def sparse_products(self) -> str:
        """Products that sparse hardware could run, such as ``fprop, wgrad``."""
        return ", ".join(self.row.sparse) or "none"

    def __str__(self) -> str:
        """Layers that differ in one index only share a row."""
        head = ["layer", "out × in", "fprop", "dgrad", "wgrad"]
        sizes = [(r.out_features, r.in_features, *r.kernel) for r in self.layers]
        shapes = [" × ".join(map(str, size)) for size in sizes]
        found = zip(self.layers, shapes, strict=True)
        rows = collapsed([[r.name, shape, r.fprop, r.dgrad, r.wgrad] for r, shape in found])
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        ]
        share = self.sparse_parameters / max(self.total_parameters, 1)
        lines.append(
            f"{self.title}: {len(self.layers)} layers, {self.sparse_parameters:,} "
            f"of {self.total_parameters:,} parameters ({share:.1%}); "
            f"{len(self.dense_linears)} linear layers and convolutions stay dense"
        )
        if self.precision is not None:
            lines.append(f"{self.precision}; evaluation without fp8")
        return "\n".join(lines)


def cover(layers: dict[str, SparseLayer], state: ModelState) -> Coverage:
    """Build the report."""
    method, row = state.method, state.method.sparse_row
    n, m = method.options.n, method.options.m  # the one it ends with
    rows = []
    for name, layer in layers.items():
        axis, shape = layer.sparsity.dim, layer.weight.shape
        sizes = shape[axis], shape[1 - axis], tuple(shape[2:])
        words = [", ".join(map(str, operands)) for operands in row.products.values()]
        rows.append(CoveredLayer(name, layer.replaces.__name__, *sizes, *words))
    dense = [
        name
        for name, module in state.root.named_modules()
        if sparse_class(type(module)) is not None  # None for layers that are sparse
    ]
    return Coverage(
        method=method.options.name,
        pattern=f"{n}:{m}",
        row=row,
        title=method.title,
        layers=rows,
        sparse_parameters=sum(layer.weight.numel() for layer in layers.values()),
        total_parameters=sum(p.numel() for p in state.root.parameters()),
        dense_linears=dense,
        precision=None if state.execution is EMULATE else str(state.execution),
    )


def collapsed(rows: list[list[str]]) -> list[list[str]]:
    """Rows that are equal but for one index in the dotted name, as one: ``h.0–11.mlp.c_fc  ×12``.

    Of several indices that differ it is the last one that runs.
    """
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for name, *cells in rows:
        parts = name.split(".")
        pattern = ".".join("#" if part.isdigit() else part for part in parts)
        alike.setdefault((pattern, *cells), []).append(parts)
    result: dict[tuple[str, ...], list[int]] = {}
    for (_, *cells), names in alike.items():
        places = [i for i, values in enumerate(zip(*names, strict=True)) if len({*values}) > 1]
        for parts in names:
            index = []
            if places:
                index, parts[places[-1]] = [int(parts[places[-1]])], "#"
            result.setdefault((".".join(parts), *cells), []).extend(index)
    return [[_with_range(name, found), *cells] for (name, *cells), found in result.items()]


def _with_range(name: str, found: list[int]) -> str:
    """``name`` with its ``#`` replaced by the indices, and their number."""
    if len(found) < 2:
        return name.replace("#", "".join(map(str, found)))
    whole = found == [*range(found[0], found[-1] + 1)]
    span = f"{found[0]}–{found[-1]}" if whole else ",".join(map(str, found))
    return f"{name.replace('#', span)}  ×{len(found)}"
