"""Loading of a checkpoint by transformers: its model, its renamed weights, and what it misses."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsepretrain.errors import CheckpointError, reason
from sparsepretrain.export.weight_files import ModelWeights
from sparsepretrain.models.pretrained import quiet


def model_of(directory: Path) -> nn.Module | None:
    """Return the model of config.json without weights; None: there is none that is known here."""
    import transformers

    with contextlib.suppress(Exception), quiet(str(directory)), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        cls = _class_of(config)
        return transformers.AutoModel.from_config(config) if cls is None else cls(config)
    return None


def as_loaded(directory: Path) -> ModelWeights | None:
    """Return the weights as transformers loads them; None: it leaves some out, or makes some."""
    with contextlib.suppress(Exception), quiet(str(directory)):
        model, info = _load(directory, dtype="auto")
        if not any(info[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")):
            return ModelWeights({k: p.detach() for k, p in model.named_parameters()})
    return None


def not_loaded(directory: Path) -> tuple[list[str], dict[str, tuple[Any, Any]]]:
    """Return the weights that transformers would draw at random, as it does without an error.

    No values are loaded: the model may be larger than the memory.

    Returns:
        names that it does not find; name -> (shape in the files, shape in the model).

    Raises:
        CheckpointError: transformers cannot load the checkpoint, or accelerate is missing, without
            which it loads values.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise CheckpointError("accelerate is missing: pip install accelerate")
    try:
        with quiet(str(directory)):
            _, info = _load(directory, ignore_mismatched_sizes=True, device_map="meta")
    except Exception as error:  # of transformers, safetensors or a quantizer
        raise CheckpointError(f"transformers cannot load {directory}: {reason(error)}") from error
    others = {name: (tuple(a), tuple(b)) for name, a, b in info["mismatched_keys"]}
    return sorted(info["missing_keys"]), others


def _load(directory: Path, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    cls = _class_of(config) or transformers.AutoModel
    return cls.from_pretrained(directory, output_loading_info=True, **options)


def _class_of(config: Any) -> Any:
    """Return the class that config.json names; None: transformers does not have it."""
    import transformers

    names = config.architectures or ()
    return next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
