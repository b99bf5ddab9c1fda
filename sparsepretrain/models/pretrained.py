"""Any checkpoint of transformers: its own classes, its own names."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.models._recipe import Head
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from torch import Tensor, nn

ROLES: dict[str, list[str]] = {
    "ffn": [
        "*.mlp.c_fc",  # GPT-2
        "*.mlp.c_proj",
        "*.intermediate.dense",  # BERT and its relatives; the digit leaves attention.output out
        "*[0-9].output.dense",
        "*.ffn.lin[12]",  # DistilBERT
        "*.fc[12]",  # Marian, BART, OPT
        "*.mlp.gate_proj",  # Llama and its relatives
        "*.mlp.up_proj",
        "*.mlp.down_proj",
        "*.mlp.dense_h_to_4h",  # GPT-NeoX
        "*.mlp.dense_4h_to_h",
        "*.DenseReluDense.w[io]*",  # T5
    ],
    "ffn_out": [
        "*.mlp.c_proj",
        "*[0-9].output.dense",
        "*.ffn.lin2",
        "*.fc2",
        "*.mlp.down_proj",
        "*.mlp.dense_4h_to_h",
        "*.DenseReluDense.wo",
    ],
    "attention": [
        "*.attn.c_attn",
        "*.attn.c_proj",
        "*.attention.self.*",
        "*.attention.output.dense",
        "*.attention.[qkv]_lin",
        "*.attention.out_lin",
        "*_attn.[qkv]_proj",
        "*_attn.out_proj",
        "*_attn.o_proj",
        "*.attention.query_key_value",
        "*.attention.dense",
        "*Attention.[qkvo]",
    ],
}
"""Names of the layers of each role in the families of transformers."""

CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "labels": "AutoModelForSequenceClassification",
    "spans": "AutoModelForQuestionAnswering",
}


@dataclass(slots=True, kw_only=True)
class PretrainedOptions:
    """Which checkpoint."""

    name: str
    family: Literal["pretrained"]
    path: str | None
    """Directory that save_pretrained wrote, or a name on the Hugging Face hub."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules beyond types, as (key, message)."""
        if not self.path:
            yield "path", "must name a Hugging Face checkpoint: a directory, or a name on the hub"


@register("model", "pretrained")
class Pretrained:
    """The class of transformers that fits the task, built from the checkpoint's config.json."""

    Options = PretrainedOptions
    tasks: ClassVar[frozenset[str]] = frozenset(
        {"causal_lm", "sequence_classification", "question_answering"}
    )
    """Names of the tasks that it can be built for."""

    @staticmethod
    def roles(options: PretrainedOptions) -> dict[str, list[str]]:
        """Aliases of ``sparsity.targets``: of the known names those that the model has."""
        found = {role: list(globs) for role, globs in _roles(str(options.path)).items()}
        return {**found, "all": [*found["ffn"], *found["attention"]]}

    @staticmethod
    def build(options: PretrainedOptions) -> nn.Module:
        """The causal language model with weights drawn from torch's global generator."""
        return _build(str(options.path), "causal_lm", 0)

    @staticmethod
    def build_headed(options: PretrainedOptions, head: Head, outputs: int) -> nn.Module:
        """The model with the head of its own kind."""
        return _build(str(options.path), head, outputs)

    @staticmethod
    def load(
        options: PretrainedOptions, head: Head | None, outputs: int
    ) -> tuple[dict[str, Tensor], list[str]]:
        """(state dict with the checkpoint's weights, names of those that it does not have).

        What it does not have, or has in another shape (a head for other classes), is drawn anew.
        """
        kind = head or "causal_lm"
        with _quiet(str(options.path)):
            try:
                model, info = _class(kind).from_pretrained(
                    options.path,
                    config=_config(str(options.path), kind, outputs),
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{options.path} cannot be loaded: {_line(error)}") from error
        state = {k: v.detach().float() for k, v in model.state_dict().items()}
        mismatched = [k[0] if isinstance(k, tuple) else k for k in info["mismatched_keys"]]
        return state, sorted({*info["missing_keys"], *mismatched})

    @staticmethod
    def vocabulary(options: PretrainedOptions) -> int:
        """Rows of the embedding."""
        return int(_config(str(options.path), "causal_lm", 0).vocab_size)

    @staticmethod
    def logits(model: nn.Module, tokens: Tensor) -> Tensor:
        """(batch, length) int64 -> (batch, length, vocab_size)."""
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    @staticmethod
    def label_scores(model: Any, tokens: Tensor, mask: Tensor, second: Tensor) -> Tensor:
        """(batch, outputs); see ``models._recipe.Headable``."""
        scores: Tensor
        if hasattr(model, "score"):  # causal: transformers looks for the last token by its id
            from sparsepretrain.models._heads import last_token

            inputs = _inputs(model, tokens, mask, second)
            scores = model.score(last_token(model.base_model(**inputs).last_hidden_state, mask))
        else:
            scores = model(**_inputs(model, tokens, mask, second)).logits
        return scores

    @staticmethod
    def span_scores(model: Any, tokens: Tensor, mask: Tensor, second: Tensor) -> Tensor:
        """(batch, length, 2); see ``models._recipe.Headable``."""
        import torch

        output = model(**_inputs(model, tokens, mask, second))
        return torch.stack([output.start_logits, output.end_logits], dim=-1)


def _inputs(model: Any, tokens: Tensor, mask: Tensor, second: Tensor) -> dict[str, Tensor]:
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = second.long()
    return inputs


def _build(path: str, kind: str, outputs: int) -> nn.Module:
    config = _config(path, kind, outputs)
    try:
        model: nn.Module = _class(kind).from_config(config)
    except ValueError as error:  # transformers names the classes that it would have
        raise ConfigError(
            f"model.path={path} ({config.model_type}) has no {CLASSES[kind]} in transformers"
        ) from error
    return model.float()


def _class(kind: str) -> Any:
    import transformers

    return getattr(transformers, CLASSES[kind])


def _config(path: str, kind: str, outputs: int) -> Any:
    config = copy.deepcopy(_read(path))
    config.dtype = "float32"  # masters are fp32, whatever the file holds
    if kind == "labels":
        if config.num_labels != outputs:
            config.num_labels = outputs
        config.problem_type = None
    elif kind == "spans":
        config.num_labels = 2
    return config


@functools.lru_cache(maxsize=8)
def _read(path: str) -> Any:
    from transformers import AutoConfig

    with _quiet(path):
        try:
            return AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"model.path={path} cannot be read: {_line(error)}") from error


@functools.lru_cache(maxsize=8)
def _roles(path: str) -> dict[str, tuple[str, ...]]:
    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(_read(path))
    names = [f".{name}" for name, module in model.named_modules() if hasattr(module, "weight")]
    return {
        role: tuple(g for g in globs if any(fnmatchcase(name, g) for name in names))
        for role, globs in ROLES.items()
    }


@contextlib.contextmanager
def _quiet(path: str) -> Iterator[None]:
    """Transformers without its reports; a directory is read without a look at the hub."""
    from huggingface_hub import constants
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
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


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
