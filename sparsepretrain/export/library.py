"""Saving a sparse model of transformers, or of a class like it, for other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.export.semi_structured import ABOUT
from sparsepretrain.sparsity import sparsifier_of
from sparsepretrain.sparsity.engine.weights import SparseWeight

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
    sparse = [(path, m) for path, m in model.named_modules() if isinstance(m, SparseWeight)]
    names = [module.weight_key(path).removesuffix(".weight") for path, module in sparse]
    about = {
        "method": sparsifier.method.options.name,
        "pattern": proof.pattern if proof.holds else None,
        "weights": str(proof),
        "layers": [name.replace(COMPILED, "") for name in names],
        "step": sparsifier.completed_steps,
    }
    if options.get("is_main_process", True):
        (Path(directory) / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
