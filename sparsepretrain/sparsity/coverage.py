"""Reports on a sparse model: its layers and their operands, and a proof that weights are N:M."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsepretrain.kernels import nonzeros_per_group
from sparsepretrain.kernels.cusparselt.packed24 import version
from sparsepretrain.sparsity.engine.layer_classes import dense_weights, sparse_class
from sparsepretrain.sparsity.engine.model_state import ModelState
from sparsepretrain.sparsity.engine.weights import SparseWeight
from sparsepretrain.sparsity.matmuls.three import MATMUL_OF, MATMULS
from sparsepretrain.sparsity.operand_table import Row, W
from sparsepretrain.sparsity.patterns import pattern_text

SHOWN = 4
"""Maximum number of other dense weights that a report names."""


class CoveredLayer(NamedTuple):
    """One sparse layer."""

    name: str
    kind: str  # class that was replaced
    in_features: int  # of a convolution: in_channels / groups
    out_features: int  # of a convolution: out_channels
    kernel: tuple[int, ...]  # kernel size of a convolution, slices of a bank; () for linear layers
    pattern: str  # N:M of the sparse phase
    fprop: str  # operands in the sparse phase
    dgrad: str
    wgrad: str
    simulated: str  # reason why fp8 is simulated; "": it is not simulated
    emulated: dict[str, str]
    """Matmul with an N:M operand -> reason why it runs dense; "": it runs sparse."""
    padded: dict[str, str]
    """Matmul that runs sparse with zero padding -> its features."""


@dataclass(slots=True, kw_only=True)
class Coverage:
    """All sparse layers of a model; ``str()`` is a table."""

    method: str
    pattern: str  # N:M; several as 1:4+2:4
    row: Row  # operands in the sparse phase; with several patterns those of the first layer
    title: str  # method and pattern; the method alone if no matmul has an N:M operand
    layers: list[CoveredLayer] = field(default_factory=list)
    sparse_parameters: int = 0  # entries of the sparse weights
    total_parameters: int = 0
    dense_linears: list[str] = field(default_factory=list)
    """Linear layers and convolutions that stay dense."""
    dense_by_pattern: list[str] = field(default_factory=list)
    """Layers and banks among the targets that ``patterns`` leaves dense."""
    other_weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of other dense parameters of two or more dimensions, without embeddings."""
    embeddings: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of embedding weights, which stay dense."""
    precision: str | None = None  # formats of fp8; None: matmuls follow autocast
    sparse_matmuls: str = "emulate"
    dense_training: str = ""  # reason for which the operands are those of evaluation alone

    @property
    def chosen(self) -> str:
        """Return the number of sparse matmuls among those with an N:M operand, or why it is 0."""
        reasons = Counter(why for layer in self.layers for why in layer.emulated.values())
        count = reasons.total()
        sparse = reasons.pop("", 0)
        policy = f"sparse_matmuls={self.sparse_matmuls}"
        if sparse or not reasons:
            library = f", cuSPARSELt {version()}" if sparse else ""
            return f"{policy}: {sparse} of {count} matmuls are sparse{library}"
        ((why, _),) = reasons.most_common(1)
        return f"{policy}: all matmuls are emulated: {why}"

    def __str__(self) -> str:
        """Return a table; layers that differ in one index share a row."""
        rows = [["layer", "out × in", *MATMULS]]
        cells = []
        sizes = [(r.out_features, r.in_features, *r.kernel) for r in self.layers]
        for layer, size in zip(self.layers, sizes, strict=True):
            texts = []
            for matmul in MATMULS:
                is_sparse = layer.emulated.get(matmul) == ""
                texts.append(getattr(layer, matmul) + (" (sparse)" if is_sparse else ""))
            cells.append([layer.name, " × ".join(map(str, size)), *texts])
        lines = _in_columns([*rows, *collapsed(cells)])
        share = self.sparse_parameters / max(self.total_parameters, 1)
        lines.append(
            f"{self.title}: {len(self.layers)} layers, {self.sparse_parameters:,} "
            f"of {self.total_parameters:,} parameters ({share:.1%}); "
            f"{len(self.dense_linears)} linear layers and convolutions stay dense"
        )
        if self.dense_training:
            lines.append(f"the matmuls of training are dense: {self.dense_training}")
        if self.dense_by_pattern:
            names = [name for (name,) in collapsed([[name] for name in self.dense_by_pattern])]
            lines.append(f"dense by patterns: {', '.join(names)}")
        if others := self.other_weights:
            entries = sum(map(math.prod, others.values()))
            shown = [f"{k} {shape}" for k, shape in [*others.items()][:SHOWN]]
            if len(others) > SHOWN:
                shown.append(f"{len(others) - SHOWN} more")
            listed = ", ".join(shown)
            lines.append(f"other weights of two or more dimensions: {entries:,} entries: {listed}")
        if self.embeddings:
            entries = sum(map(math.prod, self.embeddings.values()))
            lines.append(f"embeddings: {entries:,} entries")
        if self.precision is not None:
            lines.append(f"{self.precision}; evaluation without fp8")
            found = Counter(layer.simulated for layer in self.layers if layer.simulated)
            lines += [f"  simulated: {_layers(n)}: {why}" for why, n in found.items()]
        if self.sparse_matmuls != "emulate":
            lines.append(self.chosen)
            dense = Counter(p for layer in self.layers for p in layer.emulated.items() if p[1])
            lines += [f"  emulated: {k} of {_layers(n)}: {why}" for (k, why), n in dense.items()]
            padded = Counter(p for layer in self.layers for p in layer.padded.items())
            lines += [f"  padded with zeros: {text}" for text in padding_lines(padded)]
        return "\n".join(lines)


def _in_columns(rows: list[list[str]]) -> list[str]:
    """Align the cells of rows; return a line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in aligned]


def padding_lines(counts: Counter[tuple[str, str]]) -> list[str]:
    """Return a line for each pair of a matmul and its padded features; values count layers."""
    return [f"{matmul} of {_layers(n)}: {features}" for (matmul, features), n in counts.items()]


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def cover(layers: dict[str, SparseWeight], state: ModelState) -> Coverage:
    """Build the report."""
    method = state.method
    patterns = [layer.operands.method.final_pattern for layer in layers.values()]
    rows = []
    for name, layer in layers.items():
        own = layer.operands.method
        row = own.sparse_row.operands
        words: Any = {k: ", ".join(map(str, operands)) for k, operands in row.items()}
        # method.pattern may still approach it
        words["pattern"] = pattern_text(own.final_pattern)
        chosen = layer.operands.matmuls
        untried = "" if chosen.packs or chosen.is_final else "not tried yet"
        why = {MATMUL_OF[name]: why or untried for name, why in chosen.reasons.items()}
        kind = layer.replaces.__name__
        padded = {MATMUL_OF[name]: features for name, features in chosen.padding().items()}
        words |= {"simulated": chosen.simulated, "emulated": why, "padded": padded}
        rows.append(CoveredLayer(name, kind, *layer.sizes, **words))
    census = count_weights(state.root)
    return Coverage(
        method=method.options.name,
        pattern=pattern_text(*patterns),
        row=method.sparse_row,
        title=state.title,
        layers=rows,
        sparse_parameters=sum(layer.weight.numel() for layer in layers.values()),
        total_parameters=state.count_parameters(),
        dense_linears=[*census.linears],
        dense_by_pattern=[*state.dense_by_pattern],
        other_weights={name: tuple(weight.shape) for name, weight in census.others.items()},
        embeddings={name: tuple(weight.shape) for name, weight in census.embeddings.items()},
        precision=None if state.precision is None else str(state.precision),
        sparse_matmuls="emulate" if state.policy is None else state.policy.name,
        dense_training=method.dense_training,
    )


class Census(NamedTuple):
    """Weights of two or more dimensions, by kind of module and name."""

    sparse: dict[str, Tensor]
    linears: dict[str, Tensor]  # layers of a class that could be sparse, by layer name
    others: dict[str, Tensor]
    embeddings: dict[str, Tensor]

    @property
    def multiplied(self) -> int:
        """Entries of all weights except embeddings and heads tied to them."""
        tied = set(map(id, self.embeddings.values()))
        kinds = self.sparse, self.linears, self.others
        return sum(w.numel() for kind in kinds for w in kind.values() if id(w) not in tied)


def count_weights(root: nn.Module) -> Census:
    """Group the weights of two or more dimensions by kind of module."""
    census = Census({}, {}, {}, {})
    for name, module in root.named_modules():
        if isinstance(module, SparseWeight):
            census.sparse[name] = module.weight
        elif sparse_class(type(module)) is not None:
            census.linears[name] = module.weight
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            census.embeddings[name] = module.weight
        else:
            weights = dense_weights(module).items()
            census.others.update({".".join(filter(None, (name, k))): w for k, w in weights})
    return census


def collapsed(rows: list[list[str]]) -> list[list[str]]:
    """Join rows that differ in one index of the dotted name: ``h.0–11.mlp.c_fc  ×12``.

    If several indices differ, only the last one is collapsed.
    """
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for name, *cells in rows:
        parts = name.split(".")
        pattern = ".".join("#" if part.isdigit() else part for part in parts)
        alike.setdefault((pattern, *cells), []).append(parts)
    result: dict[tuple[str, ...], list[int]] = {}
    lines: list[list[str]] = []
    for (_, *cells), names in alike.items():
        places = [i for i, values in enumerate(zip(*names, strict=True)) if len({*values}) > 1]
        for parts in names:
            index = []
            if places:
                index, parts[places[-1]] = [int(parts[places[-1]])], "#"
            result.setdefault((".".join(parts), *cells), []).extend(index)
    for (name, *cells), indices in result.items():
        is_range = len(indices) > 1 and indices == [*range(indices[0], indices[-1] + 1)]
        span = f"{indices[0]}–{indices[-1]}" if is_range else ",".join(map(str, indices))
        times = f"  ×{len(indices)}" if len(indices) > 1 else ""
        lines.append([name.replace("#", span) + times, *cells])
    return lines


@dataclass(slots=True, kw_only=True)
class Proof:
    """Counts over all sparse layers; :attr:`holds` is True if every group is N:M."""

    pattern: str  # N:M; several as 1:4+2:4
    sparse: bool  # False: a dense method or phase, nothing to prove
    why_dense: str = ""  # reason of a dense phase, such as "since step 4"
    groups: int = 0
    zeros: int = 0  # exact zeros
    entries: int = 0
    multiplied: int = 0  # entries of all weights of two or more dimensions, without embeddings
    violations: tuple[str, ...] = ()  # layers with more than N non-zeros in a group, or a -0.0
    patterns: dict[str, str] = field(default_factory=dict)
    """Layer -> N:M of its groups; empty if nothing was to prove."""

    @property
    def is_mixed(self) -> bool:
        """True if layers have different patterns."""
        return len({*self.patterns.values()}) > 1

    @property
    def holds(self) -> bool:
        """True if every group of every layer has at most N non-zeros and all zeros are +0.0."""
        return self.sparse and not self.violations

    @property
    def density(self) -> float:
        """Fraction of the weights that are not exactly zero; 1 for dense weights."""
        return 1 - self.zeros / self.entries if self.sparse else 1.0

    def __str__(self) -> str:
        if not self.sparse:
            return f"dense weights {self.why_dense}".rstrip()
        if self.violations:
            if not self.is_mixed:
                return f"NOT {self.pattern}: {', '.join(self.violations)}"
            wrong = [f"{name} is not {self.patterns[name]}" for name in self.violations]
            return f"NOT {self.pattern}: {', '.join(wrong)}"
        share = self.zeros / self.entries
        part = self.entries / self.multiplied
        found = f"{self.pattern} in all {self.groups:,} groups"
        if self.is_mixed:
            counts = Counter(self.patterns.values())
            parts = [f"{each} in {_layers(counts[each])}" for each in self.pattern.split("+")]
            found = f"{' and '.join(parts)}, all {self.groups:,} groups"
        held = f"these layers have {part:.1%} of the weights outside embeddings"
        return f"{found}, {share:.1%} exact zeros; {held}"


def nm_holds(weight: Tensor, n: int, m: int, dim: int) -> Tensor:
    """Return True if every group of m has at most n non-zeros and all zeros are +0.0; 0-d bool."""
    fits: Tensor = (nonzeros_per_group(weight, m, dim=dim) <= n).all()
    return fits & ~((weight == 0) & weight.signbit()).any()


@torch.no_grad()
def prove(layers: dict[str, SparseWeight], state: ModelState) -> Proof:
    """Count non-zeros per group of M along in_features in every forward weight."""
    phase = state.method.phase
    why = "" if phase.evaluation else phase.reason
    pattern = pattern_text(*(layer.operands.method.pattern for layer in layers.values()))
    proof = Proof(pattern=pattern, sparse=False, why_dense=why)
    a = phase.row.A
    follows_training = phase.evaluation and not state.method.trains_another_weight
    if follows_training and phase.training and a != W and a.pattern is None:
        # decaying masks (mdgf) and weights that the end prunes (cast): a run may stop before
        proof.why_dense = f"({a}), not {pattern} so far"
        return proof
    counts = {}
    for name, layer in layers.items():
        weight = layer.operands.project(layer.weight).forward
        if weight is None:
            continue
        weight = layer.operands.rows.gather(weight)
        n, m = layer.operands.method.pattern
        holds = nm_holds(weight, n, m, layer.sparsity.dim)
        proof.patterns[name] = pattern_text((n, m))
        counts[name] = torch.stack([holds.long(), (weight == 0).sum()])
        proof.groups += weight.numel() // m
        proof.entries += weight.numel()
    if counts:
        proof.sparse = True
        proof.multiplied = count_weights(state.root).multiplied
        rows = dict(zip(counts, torch.stack([*counts.values()]).tolist(), strict=True))
        proof.violations = tuple(name for name, (right, _) in rows.items() if not right)
        proof.zeros = sum(zeros for _, zeros in rows.values())
    return proof
