"""Cost of a run: parameters, FLOPs of its matmuls, and the bound that they set to its speed-up."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from sparsepretrain.config.schema import Run
from sparsepretrain.console import count
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.sparsity.coverage import padding_lines
from sparsepretrain.sparsity.matmuls.policy import SparseMatmulPolicy, objection
from sparsepretrain.sparsity.matmuls.sparse24 import TOKENS, padded_features, padding, rounded_up
from sparsepretrain.sparsity.matmuls.three import MATMUL_OF, MATMULS
from sparsepretrain.sparsity.method import Method
from sparsepretrain.sparsity.operand_table import Row
from sparsepretrain.tasks import build_task
from sparsepretrain.training.assembly import META, build_model, layer_inputs, sparsify_model
from sparsepretrain.training.precision import compute_dtype
from sparsepretrain.training.tracing import step_cost


class MatmulFlops(NamedTuple):
    """FLOPs of one optimizer step, counted as dense matmuls."""

    step: float
    layers: Counter[str]
    """Matmul -> FLOPs in linear layers that are sparse."""
    sparse: Counter[str]
    """FLOPs of matmuls that could be 2:4."""
    zeros: Counter[str]
    """FLOPs that zero padding adds to them."""
    padded: Counter[tuple[str, str]]
    """Matmul and its padded features -> number of layers."""
    reasons: list[str]
    """Reasons for which matmuls with an N:M operand stay dense."""

    @property
    def bound(self) -> float:
        """Largest speed-up if 2:4 matmuls are twice as fast as dense ones (Amdahl)."""
        saved = (self.sparse.total() - self.zeros.total()) / 2
        return 1 / (1 - saved / self.step)

    def rows(self) -> list[tuple[str, str]]:
        """Return lines of the dry run."""
        if not self.layers:
            return []
        cells = [
            f"{matmul} {count(flops)}"
            + (f" ({count(self.sparse[matmul])} 2:4)" if self.sparse[matmul] else "")
            for matmul, flops in self.layers.items()
        ]
        if self.sparse:
            text = (
                f"at most {self.bound:.2f}×: {self.sparse.total() / self.step:.1%} of all FLOPs "
                "could be 2:4 matmuls, twice as fast at best (Amdahl)"
            )
        else:
            why = statistics.mode(self.reasons) if self.reasons else "no matmul has an N:M operand"
            text = f"none: {why}"
        lines = [("FLOPs per step", f"sparse layers: {', '.join(cells)}"), ("speed-up", text)]
        if self.padded:
            lines.append(("zero padding", "\n".join(padding_lines(self.padded))))
        if self.sparse and self.reasons:
            dense = [f"{n} of these matmuls: {why}" for why, n in Counter(self.reasons).items()]
            lines.append(("dense", "\n".join(dense)))
        return lines


def matmul_flops(
    run: Run,
    sparsifier: Sparsifier,
    inputs: dict[str, torch.Size],
    step: float,
    only: Method | None = None,
) -> MatmulFlops:
    """Count the FLOPs of sparse linear layers, on any GPU that has 2:4 matmuls.

    Args:
        run: the checked configuration.
        sparsifier: of a model on the meta device.
        inputs: name of a layer -> shape of its input in a micro-batch.
        step: FLOPs of the whole step.
        only: count the layers of one of :attr:`Sparsifier.methods`; None: all.
    """
    method = sparsifier.method
    policy = SparseMatmulPolicy("auto")
    micro_batches = run.batch.size // run.batch.micro
    dtype = compute_dtype(run.precision)
    # a method that learns from losses compares those of two forwards
    forwards, matmuls = (2, ["fprop"]) if method.follows_policy else (1, [*MATMULS])
    counted = MatmulFlops(step, Counter(), Counter(), Counter(), Counter(), [])
    if method.dense_training:
        counted.reasons.append(method.dense_training)
    for name, layer in sparsifier.layers.items():
        is_convolution = layer.weight.dim() == 4
        if is_convolution or name not in inputs:  # or a bank of a module of no known class
            continue
        own = layer.operands.method
        if only not in (None, own):
            continue
        row = Row() if own.dense_training else own.sparse_row
        tokens = tuple(inputs[name][:-1])
        token_count = math.prod(tokens)
        in_features, out_features, _ = layer.sizes
        flops = 2 * micro_batches * token_count * in_features * out_features * forwards
        counted.layers.update(dict.fromkeys(matmuls, flops))
        size = layer.operands.matmuls.size
        base = layer.operands.matmuls.base
        for operand, why in policy.reasons(row, size, base).items():
            if reason := why or objection(operand, tokens, dtype, base):
                counted.reasons.append(reason)
                continue
            matmul = MATMUL_OF[operand]
            features = size.features()
            wide = padded_features(base, operand, *features)
            padded_count = rounded_up(token_count, TOKENS)
            padded = 2 * micro_batches * padded_count * math.prod(wide)
            if padded >= 2 * flops:
                counted.reasons.append(_too_much_padding(features, wide, token_count, padded_count))
                continue
            counted.sparse[matmul] += flops
            counted.zeros[matmul] += padded - flops
            if text := padding(base, operand, *features):
                counted.padded[matmul, text] += 1
    return counted


def _too_much_padding(
    features: tuple[int, int], padded: tuple[int, int], tokens: int, padded_tokens: int
) -> str:
    before = f"{features[0]} × {features[1]}"
    after = f"{padded[0]} × {padded[1]}"
    if tokens != padded_tokens:
        before += f" with {tokens} tokens"
        after += f" with {padded_tokens}"
    return f"padding {before} to {after} costs more than 2:4 saves"


class Cost(NamedTuple):
    """Cost of a whole run."""

    sparse_matmuls: float  # per sparse layer, of three; 2:4 or fewer nonzeros, mean over the steps
    flops: float  # if each of these matmuls costs half a dense one
    parameters: int
    entries: int  # parameters without embeddings
    nonzero: int  # of the entries, at the end
    average: float  # nonzero entries of the forward operands, mean over the steps


def run_cost(run: Run, lines: Sequence[Mapping[str, Any]] | None = None) -> Cost:
    """Return the cost of a run.

    Args:
        run: its number of steps is known.
        lines: record of the finished run, whose training lines say which steps were sparse; None:
            the method's schedule says it.

    Raises:
        ConfigError: ``lines`` is None, and the optimizer decides when training is sparse.
    """
    task = build_task(run)
    model = build_model(task, META)
    flops = step_cost(run, task, model).flops
    inputs = layer_inputs(run, task, model)
    sparsifier = sparsify_model(run, task, model)
    halves = saved = 0.0
    zeros = 0
    zero_steps = 0.0  # zeros of the forward operands, summed over the steps
    for method in sparsifier.methods:
        layers = matmul_flops(run, sparsifier, inputs, flops, only=method).layers
        weights = [w for w in sparsifier.layers.values() if w.operands.method is method]
        share = len(weights) / len(sparsifier.layers)
        known = _planned(run, method) if lines is None else lines
        logged = [line for line in known if line.get("sparse") is not None]
        sparse_entries = sum(weight.weight.numel() for weight in weights)
        # A line tells the phase of the steps up to the next line; changes of phase have lines.
        bounds = [0, *(line["step"] for line in logged[1:]), run.steps]
        for line, (begin, end) in zip(logged, pairwise(bounds), strict=True):
            method.set_step(line["step"])
            # an optimizer may decide the phase: the record knows, a new method does not
            row = method.sparse_row if method.scalars else method.phase.row
            halved = row.halved if line["sparse"] else []
            halves += (end - begin) * len(halved) * share
            saved += (end - begin) * sum(layers[name] for name in halved) / 2
            kept, of = (row.A.pattern if line["sparse"] else None) or (1, 1)
            zero_steps += (end - begin) * sparse_entries * (of - kept) / of
        method.set_step(run.steps)
        ends_sparse = bool(logged[-1]["sparse"]) if method.scalars else method.phase.evaluation
        kept, of = method.sparse_row.A.pattern or (1, 1)
        zeros += sparse_entries * (of - kept) // of if ends_sparse else 0
    coverage = sparsifier.coverage()
    total = coverage.total_parameters
    entries = total - sum(math.prod(shape) for shape in coverage.embeddings.values())
    return Cost(
        sparse_matmuls=halves / run.steps,
        flops=run.steps * flops - saved,
        parameters=total,
        entries=entries,
        nonzero=entries - zeros,
        average=entries - zero_steps / run.steps,
    )


def _planned(run: Run, method: Method) -> list[dict[str, Any]]:
    """Return a line for the first step and for each change of phase."""
    if method.scalars:
        raise ConfigError(
            f"sparsity: the optimizer decides when {method.options.name} is sparse, so its cost is "
            "known after the run only"
        )
    lines: list[dict[str, Any]] = []
    before = None
    for step in range(run.steps):
        method.set_step(step)
        phase = method.phase
        if (phase.training, phase.row) != before:
            lines.append({"step": step, "sparse": phase.training})
            before = phase.training, phase.row
    return lines
