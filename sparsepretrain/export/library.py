"""Saving a sparse model for other libraries: as a class of transformers does it, or as ONNX."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.export import onnx_file
from sparsepretrain.export.about import ABOUT, sparsity_of
from sparsepretrain.export.onnx_file import Initializer
from sparsepretrain.sparsity import densify, sparsifier_of
from sparsepretrain.sparsity.engine.weights import SparseWeight
from sparsepretrain.sparsity.patterns import Pattern
from sparsepretrain.sparsity.sparsifier import residual_weight

COMPILED = "_orig_mod."
"""Part of the names in a model, or of blocks, that torch.compile wrapped."""


def save_pretrained(model: nn.Module, directory: str | Path, **options: Any) -> None:
    """Write a sparse model with the weights of evaluation: exact zeros, scales folded in.

    ``from_pretrained`` of the same class then computes what the sparse model computes in evaluation
    and ``sparsity.json`` lists the sparse layers. The model does not change and can be trained on.
    Collective if the model is sharded.

    Args:
        model: was given to :func:`sparsepretrain.sparsify`, and has ``save_pretrained`` with a
            parameter ``state_dict``, as models of transformers.
        directory: where to write.
        options: of ``model.save_pretrained``.

    Raises:
        ConfigError: the model is not sparse, has no ``save_pretrained``, or has adapters of peft,
            which saves nothing else.
    """
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"{type(model).__name__} would save its adapters without the sparse weights: call "
            "merge_and_unload first, or save sparsifier_of(model).dense_state_dict()"
        )
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        raise ConfigError(
            f"{type(model).__name__} has no save_pretrained: save "
            "sparsifier_of(model).dense_state_dict()"
        )
    sparsifier = sparsifier_of(model)
    proof = sparsifier.prove()
    # under the names of this model: a part, or a container, of what was given to sparsify
    state = {
        name.replace(COMPILED, ""): tensor for name, tensor in sparsifier.dense_tensors_of(model)
    }
    save(directory, state_dict=state, **options)
    patterns = _patterns(model)
    left_dense = [name.replace(COMPILED, "") for name in sparsifier.left_dense_in(model)]
    about = {
        "method": sparsifier.method.options.name,
        **sparsity_of(patterns if proof.holds else {}, [*patterns], left_dense, str(proof)),
        "step": sparsifier.completed_steps,
    }
    if options.get("is_main_process", True):
        (Path(directory) / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _patterns(model: nn.Module) -> dict[str, Pattern]:
    """Return the patterns of the sparse layers and banks, under the names of this model."""
    patterns = {}
    for path, module in model.named_modules():
        if isinstance(module, SparseWeight):
            name = module.weight_key(path).removesuffix(".weight").replace(COMPILED, "")
            patterns[name] = module.operands.method.pattern
    return patterns


def save_onnx(
    model: nn.Module,
    path: str | Path,
    inputs: Mapping[str, Tensor],
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None,
) -> dict[str, Initializer]:
    """Write a sparse model as ONNX with the weights of evaluation: exact zeros, scales folded in.

    The zeros are proven in the file, and outputs for ``inputs`` are compared in ONNX Runtime on the
    CPU. A dense copy in fp32 is written; the model does not change and can be trained on.

    Args:
        model: was given to :func:`sparsepretrain.sparsify`.
        path: file to write. Weights of more than 2 GB are in a second file, ``PATH.data``.
        inputs: arguments of ``model.forward`` by name; floating-point ones become fp32.
        dynamic_shapes: input -> axis -> name of a size that may change, such as
            ``{"x": {0: "batch"}}``; all other sizes are those of ``inputs``.

    Returns:
        sparse layer -> its initializer in the file; empty if the weights are dense.

    Raises:
        ConfigError: the model is not sparse or cannot be exported, or a package of the extra
            ``onnx`` is missing.
        CheckpointError: a weight in the file is not N:M, or the file computes something else.
    """
    onnx_file.require_packages()
    sparsifier = sparsifier_of(model)
    is_merged = any(residual_weight(layer) is not None for layer in sparsifier.layers.values())
    patterns = _patterns(model) if sparsifier.prove().holds and not is_merged else {}
    dense = densify(copy.deepcopy(model)).cpu().float().eval()
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    inputs = {name: value.cpu() for name, value in inputs.items()}
    shapes = {name: (dynamic_shapes or {}).get(name, {}) for name in inputs}
    file = Path(path)
    found = onnx_file.write(dense, file, inputs, shapes, patterns)
    onnx_file.prove(file, found, patterns)
    onnx_file.compare(file, dense, [inputs])
    return found
