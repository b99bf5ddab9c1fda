"""ONNX files of dense models with exact zeros: written, proven N:M, compared in ONNX Runtime."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsepretrain.errors import CheckpointError, ConfigError, cannot_write, needs, reason
from sparsepretrain.sparsity.coverage import nm_holds
from sparsepretrain.sparsity.engine.banks import is_transposed
from sparsepretrain.sparsity.engine.layer_classes import replacement_of
from sparsepretrain.sparsity.patterns import Pattern

FILE = "model.onnx"
TOLERANCE = 1e-4
"""Largest difference of an output from torch's, relative to the largest output."""
LARGE = 2**31 - 2**27
"""Bytes of weights above which they are in a second file: protobuf ends at 2 GiB."""


class Initializer(NamedTuple):
    """Weight of a sparse layer in the file."""

    name: str
    axis: int
    """Axis that the matmul sums over, along which the groups lie."""


def require_packages() -> None:
    """Refuse to begin if a package is missing (ConfigError)."""
    with needs("ONNX export", "onnx, onnxruntime and onnxscript", "onnx", error=ConfigError):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401


def write(
    model: nn.Module,
    path: Path,
    inputs: Mapping[str, Tensor],
    shapes: Mapping[str, Mapping[int, str]],
    layers: Iterable[str],
) -> dict[str, Initializer]:
    """Export a dense model in eval mode on the CPU; return the initializers of ``layers``."""
    try:
        with _exportable(model), _silent():
            with torch.no_grad():
                outputs = model(**inputs)
            names = list(outputs) if isinstance(outputs, Mapping) else ["output"]
            program: Any = torch.onnx.export(
                model,
                kwargs=dict(inputs),
                dynamic_shapes=dict(shapes),
                output_names=names if len(names) == len(tree_leaves(outputs)) else None,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # of the model, of torch.export, of the translation
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigError(
            f"torch.onnx cannot export {type(model).__name__}: {reason(cause)}"
        ) from error
    initializers = program.model.graph.initializers
    by_value = {_digest(each.const_value.numpy()): name for name, each in initializers.items()}
    found = {layer: _find(initializers, by_value, model, layer) for layer in layers}
    size = sum(each.const_value.nbytes for each in initializers.values())
    try:
        program.save(str(path), external_data=size > LARGE)
    except OSError as error:
        raise cannot_write(path, error) from error
    return found


def _digest(array: np.ndarray) -> tuple[Any, ...]:
    """Return a key that arrays of equal shape, dtype and bytes share."""
    data = np.ascontiguousarray(array)
    return array.shape, str(array.dtype), hashlib.blake2b(data.view(np.uint8).data).digest()


def _find(
    initializers: Any, by_value: Mapping[tuple[Any, ...], str], model: nn.Module, layer: str
) -> Initializer:
    """Find the weight of a layer by its values, which the exporter may have transposed."""
    weight, axis = weight_of(model, layer)
    array = weight.detach().numpy()
    if name := by_value.get(_digest(array)):
        return Initializer(name, axis)
    last = (array.ndim - 2, array.ndim - 1)
    if axis in last and (name := by_value.get(_digest(array.swapaxes(*last)))):
        return Initializer(name, sum(last) - axis)
    name = f"{layer}.weight"
    if name in initializers and array.ndim == 4:
        # A BatchNorm was folded into the convolution: a channel with a factor below 0 has -0.0.
        scaled = initializers[name].const_value.numpy()
        if scaled.shape == array.shape:
            from onnxscript import ir

            initializers[name].const_value = ir.tensor(scaled + 0.0, name=name)
            return Initializer(name, axis)
    raise CheckpointError(f"the weight of {layer} is no initializer of the exported graph")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep graphs of failed attempts, warnings and logs of torch off the terminal."""
    before = logging.root.manager.disable
    nowhere = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _exportable(model: Any) -> Iterator[None]:
    """Let a model of transformers return no cache, and multiply by experts without a loop."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "use_cache"):
        yield
        return
    has_experts = any(is_transposed(module) is not None for module in model.modules())
    use_cache = config.use_cache
    implementation = config._experts_implementation if has_experts else None
    try:
        config.use_cache = False
        if has_experts:
            # a loop over the experts that have tokens, and grouped matmuls, have no translation
            model.set_experts_implementation("batched_mm")
        yield
    finally:
        config.use_cache = use_cache
        if has_experts:
            config._experts_implementation = implementation


def weight_of(model: nn.Module, layer: str) -> tuple[Tensor, int]:
    """Return the weight of a layer of a dense model, or a bank, and its axis of in_features."""
    parent, _, key = layer.rpartition(".")
    bank = model.get_submodule(parent)._parameters.get(key)
    if bank is not None:
        is_in_out = is_transposed(model.get_submodule(parent))
        return bank, bank.dim() - (2 if is_in_out else 1)
    module: Any = model.get_submodule(layer)
    return module.weight, replacement_of(module).in_dim


def prove(path: Path, found: Mapping[str, Initializer], patterns: Mapping[str, Pattern]) -> None:
    """Refuse a file in which a group of a sparse layer has more than N non-zeros, or a -0.0."""
    if not found:
        return
    import onnx

    initializers = {each.name: each for each in onnx.load(str(path)).graph.initializer}
    for layer, (name, axis) in found.items():
        weight = torch.from_numpy(onnx.numpy_helper.to_array(initializers[name]).copy())
        n, m = patterns[layer]
        if not nm_holds(weight, n, m, axis).all():
            raise CheckpointError(f"{path.name}: {name}, the weight of {layer}, is not {n}:{m}")


@torch.no_grad()
def compare(path: Path, model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the largest difference of an output in ONNX Runtime from torch's, on the CPU.

    Raises:
        CheckpointError: the runtime fails, or the difference is above :data:`TOLERANCE`.
    """
    import onnxruntime

    largest = 0.0
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        given = [{name: batch[name].numpy() for name in names} for batch in batches]
        results = [session.run(None, each) for each in given]
    except Exception as error:  # the runtime has classes of its own, without a common one
        raise CheckpointError(f"ONNX Runtime cannot run {path.name}: {reason(error)}") from error
    for batch, found in zip(batches, results, strict=True):
        with _exportable(model):
            expected = tree_leaves(model(**batch))
        for ours, theirs in zip(expected, found, strict=True):
            difference = float((torch.from_numpy(theirs).double() - ours.double()).abs().max())
            if not difference <= TOLERANCE * max(1.0, float(ours.double().abs().max())):
                raise CheckpointError(
                    f"outputs of {path.name} in ONNX Runtime differ from torch's: {difference}"
                )
            largest = max(largest, difference)
    return largest
