"""Walk over the blocks of a language model: each is pruned with inputs from pruned blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.models._families import roles_of
from sparsepretrain.pruning.inputs import InputSums
from sparsepretrain.pruning.layers import blocks_of, linear_layers, matrix_of, require_layers
from sparsepretrain.pruning.method import Pruned, PruningMethod, ScoreMethod
from sparsepretrain.pruning.methods.magnitude import Magnitude
from sparsepretrain.pruning.permutation import folds_of, try_fold

ROUNDING = 1e-4
"""Difference of a layer's output that another order of summation may make, relative to its norm."""


@dataclass
class Stage:
    """Result for one block, or for one layer if no calibration is needed."""

    name: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Name of a Parameter -> its new value, in the dtype of the checkpoint."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Name of a layer -> bool mask, (out_features, in_features)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers for the report."""


class Journal(Protocol):
    """Storage of finished stages."""

    def load(self, name: str) -> Stage | None:
        """Return a stage that was finished before, or None."""

    def save(self, stage: Stage) -> None:
        """Store a finished stage."""


class Calibration(NamedTuple):
    """Text that a model reads during calibration."""

    forward: Callable[[Tensor], object]
    """Runs the model on tokens (sequences, length) without a cache of keys and values."""
    batches: Sequence[Tensor]
    """Tokens of each forward, int64, on the device of the model."""


class _Call(NamedTuple):
    """Arguments of a block besides its hidden states."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]


@torch.no_grad()
def prune_model(
    model: nn.Module,
    layers: Sequence[str],
    method: PruningMethod | Mapping[str, PruningMethod],
    calibration: Calibration | None = None,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    journal: Journal | None = None,
    restore: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Iterator[Stage]:
    """Prune layers of a model in place, and yield each block when it is done.

    The layers of a block see inputs that come from pruned blocks before it and from dense layers
    within it, as in the published code of Wanda and SparseGPT.

    Args:
        model: fp32 or fp64, in eval mode.
        layers: names of nn.Linear or Conv1D in repeated blocks.
        method: the rule; or that of each layer, alike except for n and m, which permutes nothing.
        calibration: text; may be None if the method reads nothing.
        dtypes: name of a Parameter -> dtype that it will be stored in, to which values are rounded
            at once; others are not rounded.
        journal: finished stages, which are not computed again.
        restore: give the weights their values back behind each block: only masks are wanted.
        progress: called with (done, all, text).

    Raises:
        ConfigError: wrong layers, or blocks that exchange more than hidden states.
    """
    methods = dict.fromkeys(layers, method) if isinstance(method, PruningMethod) else method
    rule = method if isinstance(method, PruningMethod) else next(iter(methods.values()))
    require_layers(model, {name: methods[name].m for name in layers})
    dtypes = dtypes or {}
    if rule.reads == "nothing":
        modules = linear_layers(model)
        stages: dict[str, nn.Module] = {name: modules[name] for name in layers}
        stream = None
    else:
        if calibration is None:
            raise ConfigError(f"{type(rule).__name__} needs calibration text")
        stages = blocks_of(model, layers)
        stream = _Stream(calibration, stages)
        _require_all_run(layers, stages, stream.order)
        stages = {name: stages[name] for name in stream.order}
    for index, (name, module) in enumerate(stages.items()):
        if not any(_is_in(layer, name) for layer in layers):
            assert stream is not None
            stream.advance(name, module)
            if progress is not None:
                progress(index + 1, len(stages), "pruning")
            continue
        stage = journal.load(name) if journal is not None else None
        before = {k: p.detach().clone() for k, p in module.named_parameters()} if restore else {}
        if stage is None:
            stage = _prune_stage(model, name, module, layers, methods, stream, dtypes)
            if journal is not None:
                journal.save(stage)
        else:
            for key, value in stage.tensors.items():
                model.get_parameter(key).copy_(value)
        if stream is not None:
            stream.advance(name, module)
        for key, value in before.items():
            module.get_parameter(key).copy_(value)
        if progress is not None:
            progress(index + 1, len(stages), "pruning")
        yield stage


def _is_in(layer: str, block: str) -> bool:
    return layer == block or layer.startswith(f"{block}.")


def _require_all_run(layers: Sequence[str], blocks: Iterable[str], order: Sequence[str]) -> None:
    """Refuse layers in blocks that read no text, such as those of a vision tower."""
    idle = [block for block in blocks if block not in order]
    left = [layer for layer in layers if any(_is_in(layer, block) for block in idle)]
    if left:
        more = f" and {len(left) - 1} more layers" if len(left) > 1 else ""
        parent = idle[0].rpartition(".")[0]
        raise ConfigError(
            f"{left[0]}{more}: no text reaches these blocks: leave them out ('!{parent}.*')"
        )


def _prune_stage(
    model: nn.Module,
    name: str,
    module: nn.Module,
    layers: Sequence[str],
    methods: Mapping[str, PruningMethod],
    stream: _Stream | None,
    dtypes: Mapping[str, torch.dtype],
) -> Stage:
    """Prune the layers of a block, or one layer."""
    modules = linear_layers(model)
    inside = {n: modules[n] for n in layers if _is_in(n, name)}
    method = methods[next(iter(inside))]
    stage = Stage(name)
    sums: dict[str, InputSums] = {}
    output = None
    if stream is not None:
        sums, output = stream.sums(name, module, inside, moments=method.reads == "moments")
    touched = {f"{n}.weight" for n in inside}
    if stream is not None and isinstance(method, ScoreMethod) and method.permutes:
        touched |= _permute(model, name, module, inside, sums, method, stream, stage)
    for layer_name, layer in inside.items():
        matrix = matrix_of(layer)
        seen = sums.get(layer_name)
        pruned, fact = _pruned(matrix, seen, methods[layer_name])
        kept = pruned.weight.to(dtypes.get(f"{layer_name}.weight", matrix.dtype))
        matrix.copy_(kept)
        stage.masks[layer_name] = pruned.mask
        stage.facts.setdefault("layers", {})[layer_name] = fact
    if stream is not None and output is not None:
        now = stream.output(name, module)
        change = (now - output).norm() / output.norm()
        stage.facts["output_change"] = float(change)
    for key in sorted(touched):
        parameter = model.get_parameter(key)
        stage.tensors[key] = parameter.detach().to(dtypes.get(key, parameter.dtype)).clone()
    return stage


def _pruned(
    matrix: Tensor, seen: InputSums | None, method: PruningMethod
) -> tuple[Pruned, dict[str, Any]]:
    """Prune a matrix; by magnitude if no token reached it, such as an expert nobody chose."""
    fact: dict[str, Any] = {"shape": list(matrix.shape)}
    if seen is not None:
        fact["tokens"] = seen.tokens
        if seen.tokens == 0:
            method = Magnitude(Magnitude.Options(), method.n, method.m)
            fact["remark"] = "no calibration token reached it: pruned by magnitude"
    pruned = method.prune(matrix, seen)
    dense = matrix.square().sum(dtype=torch.float64)
    dropped = matrix.masked_fill(pruned.mask, 0.0).square().sum(dtype=torch.float64)
    fact["dropped"] = float((dropped / dense.clamp(min=1e-300)).sqrt())
    return pruned, fact


def _permute(
    model: nn.Module,
    name: str,
    block: nn.Module,
    inside: Mapping[str, nn.Module],
    sums: Mapping[str, InputSums],
    method: ScoreMethod,
    stream: _Stream,
    stage: Stage,
) -> set[str]:
    """Reorder channels of a block where that folds; return the names of changed Parameters."""
    local = linear_layers(block)
    roles = roles_of(linear_layers(model))
    touched: set[str] = set()
    for fold in folds_of(local, roles, model.config, method.m):
        full = f"{name}.{fold.consumer}"
        if full not in inside or sums[full].tokens == 0:
            continue
        if not fold.is_ffn and stream.shares(name):
            continue  # another block may read the values of this one
        score = method.score(matrix_of(inside[full]), sums[full])
        orders = fold.orders(score, method.n, method.m)
        # the output of the layer itself: in that of the block the residual may hide an error
        output = functools.partial(stream.output_of, name, block, inside[full])
        order = try_fold(fold, local, orders, output, ROUNDING)
        if order is None:
            stage.facts.setdefault("not_folded", []).append(full)
            continue
        sums[full].permute(order)
        moved = int((order != torch.arange(len(order), device=order.device)).sum())
        stage.facts.setdefault("permuted", {})[full] = moved
        for changed in (fold.consumer, *(producer.name for producer in fold.producers)):
            touched |= {f"{name}.{changed}.{k}" for k, _ in local[changed].named_parameters()}
    return touched


class _Stream:
    """Hidden states of all calibration text before the next block.

    The arguments that a model gives its blocks besides hidden states (masks, rotary positions) are
    recorded in one forward of the whole model.

    Raises:
        ConfigError: a block does not read the output of the one before.
    """

    def __init__(self, calibration: Calibration, blocks: Mapping[str, nn.Module]) -> None:
        self.order: list[str] = []
        self._hidden: list[Tensor] = []
        self._calls: dict[str, list[_Call]] = {name: [] for name in blocks}
        with ExitStack() as hooks:
            for name, block in blocks.items():
                enter = functools.partial(self._enter, name)
                hooks.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(self._leave))
            for tokens in calibration.batches:
                self._entered: list[str] = []
                self._last: Tensor | None = None
                self._others: list[Tensor] = []
                calibration.forward(tokens)
                self.order = self.order or self._entered
                if self._entered != self.order or len(set(self.order)) < len(self.order):
                    raise ConfigError(
                        "the blocks of this model do not run once each in one order: prune it with "
                        "--method magnitude, which needs no calibration"
                    )

    def _enter(
        self, name: str, block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        keywords = dict(keywords)
        hidden = args[0] if args else keywords.pop("hidden_states", None)
        if not isinstance(hidden, Tensor):
            raise ConfigError(
                f"{name} is called without hidden states: prune this model with --method "
                "magnitude, which needs no calibration"
            )
        if self._last is None:
            self._hidden.append(hidden)
        elif hidden is not self._last and not torch.equal(hidden, self._last):
            raise ConfigError(
                f"{name} reads something else than the output of the block before: prune this "
                "model with --method magnitude, which needs no calibration"
            )
        if any(value is other for other in self._others for value in (*args, *keywords.values())):
            raise ConfigError(
                f"{name} reads further results of the block before: prune this model with "
                "--method magnitude, which needs no calibration"
            )
        self._entered.append(name)
        call = _Call(args[1:], keywords)
        calls = self._calls[name]
        calls.append(_shared(call, calls[0]) if calls else call)

    def _leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._last = _first(output)
        others = output[1:] if isinstance(output, tuple | list) else ()
        self._others = [value for value in others if isinstance(value, Tensor)]

    def _run(self, name: str, block: nn.Module, index: int) -> Tensor:
        call = self._calls[name][index]
        return _first(block(self._hidden[index], *call.args, **call.keywords))

    def sums(
        self, name: str, block: nn.Module, layers: Mapping[str, nn.Module], *, moments: bool
    ) -> tuple[dict[str, InputSums], Tensor]:
        """Run the block on all text; return the sums of its layers, and the first output."""
        sums = {
            layer_name: InputSums(
                matrix_of(layer).shape[1], matrix_of(layer).device, moments=moments
            )
            for layer_name, layer in layers.items()
        }
        first = self.output(name, block)
        with ExitStack() as hooks:
            for layer_name, layer in layers.items():
                note = functools.partial(_add_inputs, sums[layer_name])
                hooks.enter_context(layer.register_forward_pre_hook(note, with_kwargs=True))
            for index in range(len(self._hidden)):
                self._run(name, block, index)
        return sums, first

    def output(self, name: str, block: nn.Module) -> Tensor:
        """Return the output of a block for the first batch."""
        return self._run(name, block, 0)

    def output_of(self, name: str, block: nn.Module, layer: nn.Module) -> Tensor:
        """Return the output of a layer of the block for the first batch, of its last call.

        Empty if the layer did not run, such as an expert that this batch does not reach.
        """
        seen: list[Tensor] = []
        with layer.register_forward_hook(lambda module, args, output: seen.append(output)):
            self._run(name, block, 0)
        return seen[-1] if seen else torch.zeros(0)

    def shares(self, name: str) -> bool:
        """Return True if the block gets a dict, in which blocks may leave values for others."""
        call = self._calls[name][0]
        return any(isinstance(v, dict) for v in (*call.args, *call.keywords.values()))

    def advance(self, name: str, block: nn.Module) -> None:
        """Replace the inputs of a block by its outputs."""
        for index in range(len(self._hidden)):
            self._hidden[index] = self._run(name, block, index)
        del self._calls[name]


def _add_inputs(
    sums: InputSums, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    sums.add(args[0] if args else keywords["input"])


def _first(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden


def _shared(call: _Call, first: _Call) -> _Call:
    """Return the call with tensors of an equal one, so that equal masks are in memory once."""
    args = tuple(_same(a, b) for a, b in zip(call.args, first.args, strict=False))
    args += call.args[len(first.args) :]
    keywords = {key: _same(value, first.keywords.get(key)) for key, value in call.keywords.items()}
    return _Call(args, keywords)


def _same(value: Any, other: Any) -> Any:
    if isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape:
        return other if value.dtype == other.dtype and torch.equal(value, other) else value
    if isinstance(value, tuple) and isinstance(other, tuple) and len(value) == len(other):
        return tuple(_same(a, b) for a, b in zip(value, other, strict=True))
    return value
