"""Hugging Face checkpoints, built as their own transformers classes."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsepretrain.errors import CheckpointError, ConfigError, reason
from sparsepretrain.models import Head, Headable
from sparsepretrain.models._families import roles_of
from sparsepretrain.models._recipe import last_token
from sparsepretrain.registry import register

CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "labels": "AutoModelForSequenceClassification",
    "spans": "AutoModelForQuestionAnswering",
}


@dataclass(slots=True, kw_only=True)
class PretrainedOptions:
    """Keys that select a checkpoint."""

    name: str
    family: Literal["pretrained"]
    path: str | None

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.path:
            yield "path", "must name a Hugging Face checkpoint: a directory, or a name on the hub"


@register("model", "pretrained")
class Pretrained(Headable):
    """Class of transformers for the task, built from the checkpoint's config.json."""

    Options = PretrainedOptions
    guesses_roles = True

    @classmethod
    def roles(cls, options: PretrainedOptions) -> dict[str, list[str]]:
        """Return alias -> known globs that match a layer of the model."""
        return _roles(str(options.path))

    @staticmethod
    def build(options: PretrainedOptions) -> nn.Module:
        """Build the causal language model with random weights."""
        return _build(str(options.path), "causal_lm", 0)

    @classmethod
    def build_headed(cls, options: PretrainedOptions, head: Head, outputs: int) -> nn.Module:
        """Build the model with transformers' own head."""
        return _build(str(options.path), head, outputs)

    @staticmethod
    def initial_state(
        options: PretrainedOptions, head: Head | None, outputs: int
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Return a state dict with the checkpoint's weights, and the names of random ones.

        Weights that are missing or have another shape (a head for other classes) are random.
        """
        kind = head or "causal_lm"
        path = str(options.path)
        with quiet(path):
            try:
                model, info = _class(kind).from_pretrained(
                    path,
                    config=_config(path, kind, outputs),
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{path} cannot be loaded: {reason(error)}") from error
        state = {k: v.detach().float() for k, v in model.state_dict().items()}
        mismatched = [k[0] if isinstance(k, tuple) else k for k in info["mismatched_keys"]]
        return state, sorted({*info["missing_keys"], *mismatched})

    @classmethod
    def stock(cls, model: nn.Module, options: PretrainedOptions, head: Head | None) -> nn.Module:
        return model

    @staticmethod
    def vocabulary(options: PretrainedOptions) -> int:
        """Return the number of rows of the embedding."""
        return int(_config(str(options.path), "causal_lm", 0).vocab_size)

    @staticmethod
    def scores(model: Any, tokens: Tensor, mask: Tensor, second: Tensor) -> Tensor:
        inputs = {"input_ids": tokens, "attention_mask": mask.long()}
        if getattr(model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = second.long()
        if hasattr(model, "score"):  # causal: transformers looks for pad_token_id, not the mask
            return model.score(last_token(model.base_model(**inputs).last_hidden_state, mask))
        output = model(**inputs)
        if hasattr(output, "start_logits"):
            return torch.stack([output.start_logits, output.end_logits], dim=-1)
        return output.logits


def _build(path: str, kind: str, outputs: int) -> nn.Module:
    config = _config(path, kind, outputs)
    try:
        model: nn.Module = _class(kind).from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"model.path={path} ({config.model_type}) has no {CLASSES[kind]} in transformers"
        ) from error
    return model.float()


def _class(kind: str) -> Any:
    import transformers

    return getattr(transformers, CLASSES[kind])


def _config(path: str, kind: str, outputs: int) -> Any:
    config = copy.deepcopy(_read(path))
    config.dtype = "float32"  # master weights are always fp32
    if kind != "causal_lm" and config.num_labels != outputs:
        config.num_labels = outputs
    if kind == "labels":
        config.problem_type = None
    return config


@functools.lru_cache(maxsize=8)
def _read(path: str) -> Any:
    from transformers import AutoConfig

    with quiet(path):
        try:
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"model.path={path} cannot be read: {reason(error)}") from error
    if method := quantization(config):
        raise CheckpointError(
            f"model.path={path}: its config.json says that the weights are quantized ({method}): "
            "master weights must be floating-point numbers. Dequantize the model in transformers "
            "and save it; if its weights are stored unquantized, remove the entry of config.json"
        )
    return config


def quantization(config: Any) -> str:
    """Return the quantization method that a configuration or a part of it names, or ""."""
    values = config.to_dict()
    parts = [values, *(part for part in values.values() if isinstance(part, dict))]
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            if entry := part.get(key):
                method = entry.get("quant_method") if isinstance(entry, dict) else None
                return f"{key}: {method or type(entry).__name__}"
    return ""


@functools.lru_cache(maxsize=8)
def _roles(path: str) -> dict[str, list[str]]:
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(_read(path))
    return roles_of(name for name, module in model.named_modules() if hasattr(module, "weight"))


@contextlib.contextmanager
def quiet(path: str = "") -> Iterator[None]:
    """Silence transformers, and do not contact the hub for a local directory."""
    from huggingface_hub import constants
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or os.path.isdir(path)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
