"""Hugging Face checkpoints, built as their own transformers classes."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sparsepretrain.errors import CheckpointError, ConfigError, SparsePretrainError, reason
from sparsepretrain.files import lfs_pointer, read_json
from sparsepretrain.models import Head, Headable
from sparsepretrain.models._families import roles_of
from sparsepretrain.models._recipe import last_token
from sparsepretrain.registry import register

POSITION_TABLES = ("wpe", "position_embeddings", "embed_positions", "position_embedding")
"""Names of embeddings of positions, whose number of rows limits the length of a sequence."""

ADAPTER = (
    "has an adapter (adapter_config.json): merge it (merge_and_unload of peft) and save the model "
    "in another directory, or move the files of the adapter away to train without it"
)
"""Remedy for a checkpoint of peft, alone or beside a model, to which transformers would add it."""

WRAPPERS = re.compile(
    r"^(module\.)+|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."
)
"""Parts that DataParallel, torch.compile, FSDP1 and checkpointing add to names of weights."""

STATES = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which training loops save a state dict beside other things."""

CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "labels": "AutoModelForSequenceClassification",
    "spans": "AutoModelForQuestionAnswering",
}


class Loaded(NamedTuple):
    """Model of transformers with the weights of a checkpoint, in fp32."""

    model: Any
    new: list[str]
    """Names of weights that the checkpoint lacks, which are random."""
    unused: list[str]
    """Names of the checkpoint that the model lacks."""


class InitialState(NamedTuple):
    """Weights of a checkpoint."""

    state: dict[str, Tensor]
    """State dict of the model, in fp32."""
    new: list[str]
    """Names of weights that the checkpoint lacks, which are random."""
    unused: list[str]
    """Names of the checkpoint that the model lacks."""


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
    def router_loss(options: PretrainedOptions, model: nn.Module) -> float:
        """Return the factor of the checkpoint, if its configuration asks for the loss."""
        config: Any = model.config
        asked = getattr(config, "output_router_logits", False)
        return float(getattr(config, "router_aux_loss_coef", 0.0)) if asked else 0.0

    @staticmethod
    def build(options: PretrainedOptions) -> nn.Module:
        """Build the causal language model with random weights."""
        return _build(str(options.path), "causal_lm", 0)

    @classmethod
    def build_headed(cls, options: PretrainedOptions, head: Head, outputs: int) -> nn.Module:
        """Build the model with transformers' own head."""
        return _build(str(options.path), head, outputs)

    @staticmethod
    def initial_state(options: PretrainedOptions, head: Head | None, outputs: int) -> InitialState:
        """Return the checkpoint's weights.

        Heads may be missing or of another shape, and are random then; weights of blocks may not.

        Raises:
            CheckpointError: the files are damaged, or do not belong to the model of config.json.
        """
        loaded = load(str(options.path), head or "causal_lm", outputs)
        state = {k: v.detach().float() for k, v in loaded.model.state_dict().items()}
        return InitialState(state, loaded.new, loaded.unused)

    @classmethod
    def stock(cls, model: nn.Module, options: PretrainedOptions, head: Head | None) -> nn.Module:
        return model

    @staticmethod
    def vocabulary(options: PretrainedOptions) -> int:
        """Return the number of rows of the embedding.

        Raises:
            ConfigError: the model reads images or sound.
        """
        config = _read(str(options.path))
        rows = getattr(config.get_text_config(), "vocab_size", None)
        if rows is None:
            raise ConfigError(
                f"model.path={options.path} ({config.model_type}) is no language model: it has no "
                "vocabulary; choose a checkpoint that reads text"
            )
        return int(rows)

    @staticmethod
    def positions(options: PretrainedOptions) -> int | None:
        """Return the longest sequence, or None if positions are computed for any length."""
        return _positions(str(options.path))

    @staticmethod
    def scores(model: Any, tokens: Tensor, mask: Tensor, second: Tensor) -> Tensor:
        inputs = {"input_ids": tokens, "attention_mask": mask.long()}
        if getattr(model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = second.long()
        if hasattr(model, "score"):  # causal: transformers looks for pad_token_id, not the mask
            return model.score(last_token(model.base_model(**inputs).last_hidden_state, mask))
        try:
            output = model(**inputs)
        except ValueError as error:  # BART and T5 classify at their end-of-text token
            raise ConfigError(
                f"{type(model).__name__} refuses the batch: {reason(error)} Give a task.tokenizer "
                "that adds the tokens of the model, or choose another model"
            ) from error
        if hasattr(output, "start_logits"):
            return torch.stack([output.start_logits, output.end_logits], dim=-1)
        return output.logits


def load(path: str, kind: str, outputs: int = 0) -> Loaded:
    """Load a checkpoint into the class of transformers for a kind of task.

    Heads may be missing or of another shape, and are random then; weights of blocks may not.

    Args:
        path: directory, or name on the hub.
        kind: a key of :data:`CLASSES`, or ``own``: the class that config.json names.
        outputs: classes of a head.

    Raises:
        CheckpointError: the files are damaged, or do not belong to the model of config.json.
    """
    model, info = _loaded(path, kind, outputs)
    body = model.base_model_prefix
    prefix = _other_prefix(body, info)
    if prefix is not None:
        del model  # two would be in memory at once
        renamed = {rf"^{re.escape(prefix)}\.": f"{body}."}
        model, info = _loaded(path, kind, outputs, key_mapping=renamed)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(f"model.path={path} {ADAPTER}")
    _refuse_quantized(path)
    mismatched = [k[0] if isinstance(k, tuple) else k for k in info["mismatched_keys"]]
    new = sorted({*info["missing_keys"], *mismatched})
    unused = sorted(info["unexpected_keys"])
    _refuse_others(path, model.base_model_prefix, model.state_dict(), new, unused)
    _require_tie(path, model)
    if kind == "causal_lm" and sees_later_tokens(model):
        raise CheckpointError(
            f"{path} ({type(model).__name__}) predicts a token from later ones: its class is "
            "no causal language model"
        )
    return Loaded(model, new, unused)


def _loaded(path: str, kind: str, outputs: int, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model with the weights of a checkpoint, and what transformers says of names."""
    with quiet(path), _one_line(f"{path} cannot be loaded"):
        for file in weight_files(path):
            if file.is_file() and (problem := lfs_pointer(file)):
                raise CheckpointError(f"{file} {problem}")
        model, info = _class(kind, path).from_pretrained(
            path,
            config=_config(path, kind, outputs),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **more,
        )
    return model, info


def _other_prefix(body: str, info: dict[str, Any]) -> str | None:
    """Return the prefix of the checkpoint if it calls the body otherwise than the class does.

    transformers' LlamaForQuestionAnswering has ``transformer``, other classes of Llama ``model``.
    """
    missing = {name for name in info["missing_keys"] if name.startswith(f"{body}.")}
    firsts = {name.partition(".")[0] for name in info["unexpected_keys"]} - {body}
    for first in sorted(firsts) if missing else ():
        if missing <= {f"{body}{n.removeprefix(first)}" for n in info["unexpected_keys"]}:
            return first
    return None


@torch.no_grad()
def sees_later_tokens(model: Any) -> bool:
    """Return True if the scores at a token depend on tokens after it, tried on eight tokens."""
    tokens = torch.arange(8)[None] % model.config.get_text_config().vocab_size
    other = tokens.clone()
    other[0, -1] = 0
    was_training = model.training
    model.eval()
    before, after = (model(input_ids=each).logits[0, :-1].float() for each in (tokens, other))
    model.train(was_training)
    return bool((before - after).abs().max() > 1e-4 * before.abs().max())


def _require_tie(path: str, model: Any) -> None:
    """Refuse a head of its own where config.json says that it is the embedding."""
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    if not model.config.get_text_config().tie_word_embeddings or outer is None or inner is None:
        return
    if inner.weight is not outer.weight and inner.weight.shape == outer.weight.shape:
        raise CheckpointError(
            f"{path} has weights of the head that differ from the embedding, although its "
            "config.json ties them: write tie_word_embeddings=false there"
        )


def _refuse_others(
    path: str, body: str, state: dict[str, Tensor], new: list[str], unused: list[str]
) -> None:
    """Refuse weights that do not belong to the model: random ones would train instead."""
    ours = [key for key in unused if any(part.startswith("sparsity") for part in key.split("."))]
    if ours:
        raise CheckpointError(
            f"{path} has the master weights of a sparse model ({ours[0]}), which are dense: give "
            "the sparse ones (checkpoint-N/sparse, or what sparsepretrain.save_pretrained wrote), "
            "or continue with the loop that wrote it"
        )
    known = {_of_any_block(name) for name in state}
    further = [name for name in unused if name not in state and _of_any_block(name) in known]
    missing = [
        name
        for name in new
        if _of_any_block(name) != name or (name.startswith(f"{body}.") and "pooler" not in name)
    ]
    if not missing and not further:
        return
    inside = {WRAPPERS.sub("", key): key for key in unused}
    wrapped = next((inside[name] for name in missing if name in inside), None)
    nested = [key for key in unused if key in STATES]
    prefixes = {
        key.removesuffix(name)
        for key in unused
        for name in (key[at + 1 :] for at, letter in enumerate(key) if letter == ".")
        if name in missing
    }
    if any("lora_" in key or ".base_layer." in key for key in unused):
        hint = "it has adapters: merge them (merge_and_unload of peft) and save the model"
    elif prefixes:
        prefix = min(prefixes, key=len)
        hint = f"its names begin with {prefix!r}, as those of a compiled or wrapped model: "
        hint += "save the state dict of the model inside, or rename them"
    elif wrapped is not None:
        hint = f"its names are those of wrapped modules ({wrapped}): save the model inside of them"
    elif nested:
        hint = f"the weights lie under the key {nested[0]!r} of the file: save that dict alone"
    else:
        hint = "the files belong to another config.json"
    what, names = ("lacks", missing) if missing else ("has further blocks:", further)
    more = f" and {len(names) - 1} more weights" if len(names) > 1 else ""
    raise CheckpointError(
        f"{path} {what} {names[0]}{more}, which its config.json describes otherwise: {hint}"
    )


def _of_any_block(name: str) -> str:
    """Return the name of a weight with # for the number of its block."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def _refuse_quantized(path: str) -> None:
    """Refuse weights stored as integers or in 8 bits, whatever config.json says.

    transformers loads them as if they were the weights; scales beside them are left out.
    """
    for file in weight_files(path):
        for name, kind in _codes(file):
            if name.endswith("weight"):
                raise CheckpointError(
                    f"{file}: {name} has the dtype {kind}, so its weights are quantized, although "
                    "config.json does not say so: dequantize the model and save it again"
                )


def checkpoint_file(path: str, name: str) -> Path | None:
    """Return a file of a checkpoint, from the cache if it is on the hub; None: it has none."""
    from transformers import utils

    with quiet(path):
        file = utils.cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def weight_files(path: str) -> list[Path]:
    """Return the files that transformers reads the weights from."""
    from transformers import utils

    # of a name on the hub: in its cache
    folder = Path(str(checkpoint_file(path, utils.CONFIG_NAME))).parent
    safe = utils.SAFE_WEIGHTS_NAME, utils.SAFE_WEIGHTS_INDEX_NAME
    for whole, index in (safe, (utils.WEIGHTS_NAME, utils.WEIGHTS_INDEX_NAME)):
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            names = read_json(folder / index)["weight_map"].values()
            return [folder / name for name in sorted(set(names))]
    return []


PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of plain values, as safetensors calls them."""


def stored_dtypes(path: str, model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype that a checkpoint in safetensors stores each Parameter of its model in.

    A Parameter whose name the files lack, because transformers converts it, has the dtype of most
    stored values.

    Raises:
        CheckpointError: the weights are pickled.
    """
    found: dict[str, torch.dtype] = {}
    entries: Counter[torch.dtype] = Counter()
    for file in weight_files(path):
        if file.suffix != ".safetensors":
            raise CheckpointError(
                f"{file} is pickled: load the model where you trust it, and save it with "
                "safe_serialization=True"
            )
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                if dtype := PLAIN.get(part.get_dtype()):
                    found[name] = dtype
                    entries[dtype] += math.prod(part.get_shape())
    other = entries.most_common(1)[0][0] if entries else torch.float32
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return {
        name: next(
            (found[n] for n in (name, name.removeprefix(prefix), prefix + name) if n in found),
            other,
        )
        for name, _ in model.named_parameters()
    }


def _codes(file: Path) -> Iterator[tuple[str, str]]:
    """Yield name and dtype of the tensors of a loaded file that do not hold plain values."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                kind = tensors.get_slice(name).get_dtype()
                if kind not in (*PLAIN, "C64"):
                    yield name, kind
        return
    load = functools.partial(torch.load, file, map_location="meta", weights_only=True)
    try:
        values = load(mmap=True)
    except RuntimeError:  # a file of torch 1.5 or older
        values = load()
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.is_complex():
            continue
        if not value.is_floating_point() or value.dtype.itemsize == 1:
            yield name, str(value.dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=8)
def _positions(path: str) -> int | None:
    """Return the rows of a table of positions, without the rows that are not positions."""
    from transformers import AutoModel

    config = _read(path)
    if config.model_type == "mpt":  # its biases are a slice of a table
        return int(config.max_seq_len)
    with torch.device("meta"), _one_line(f"{path}: config.json describes no model"):
        model = AutoModel.from_config(config)
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        table = isinstance(module, nn.Embedding) and last in POSITION_TABLES
        if table or "embed_positions" in module._buffers:  # GPT-J: sines and cosines
            most = getattr(config.get_text_config(), "max_position_embeddings", None)
            # RoBERTa counts positions from behind the padding token
            shifted = last == "position_embeddings" and module.padding_idx is not None
            return None if most is None else int(most) - (module.padding_idx + 1 if shifted else 0)
    return None


def _build(path: str, kind: str, outputs: int) -> nn.Module:
    config = _config(path, kind, outputs)
    with _one_line(f"{path}: config.json describes no model"):
        try:
            model: nn.Module = _class(kind, path).from_config(config, trust_remote_code=False)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise ConfigError(
                f"model.path={path} ({config.model_type}) has no {CLASSES[kind]} in transformers"
            ) from error
    return model.float()


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn an error of transformers, safetensors, pickle or the hub into a line."""
    try:
        yield
    except SparsePretrainError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{what}: it brings Python code of its own (auto_map in config.json), which is not "
                "run here: train it in your own loop, with sparsepretrain.sparsify"
            ) from error
        kind = "KeyError: " if isinstance(error, KeyError) else ""  # its text is only the key
        raise CheckpointError(f"{what}: {kind}{reason(error)}") from error


def _class(kind: str, path: str) -> Any:
    import transformers

    if kind != "own":
        return getattr(transformers, CLASSES[kind])
    names = _read(path).architectures or ()
    cls = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    if cls is None:
        raise CheckpointError(
            f"{path}: config.json names no class of transformers under architectures: {[*names]}"
        )
    return cls


def is_causal_lm(path: str) -> bool:
    """Return True if a checkpoint is a causal language model by the class that it names."""
    from transformers.models.auto import modeling_auto

    config = _read(path)
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.architectures:
        return any(name in causal.values() for name in config.architectures)
    return config.model_type in causal and not _reads_both_sides(config)


def _config(path: str, kind: str, outputs: int) -> Any:
    config = copy.deepcopy(_read(path))
    config.dtype = "float32"  # master weights are always fp32
    if kind in ("labels", "spans") and config.num_labels != outputs:
        config.num_labels = outputs
    if kind == "labels":
        config.problem_type = None
    if kind == "causal_lm" and _reads_both_sides(config):
        config.is_decoder = True  # else BERT and its relatives see the tokens they predict
        if hasattr(config, "causal"):  # XLM
            config.causal = True
    return config


def _reads_both_sides(config: Any) -> bool:
    """Return True for encoders that transformers also has as causal language models."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    both = config.model_type in causal and config.model_type in masked
    return both and not config.is_encoder_decoder


@functools.lru_cache(maxsize=8)
def _read(path: str) -> Any:
    from transformers import AutoConfig

    if Path(path, "adapter_config.json").is_file():
        raise CheckpointError(f"model.path={path} {ADAPTER}")
    config_file = Path(path, "config.json")
    if config_file.is_file() and (problem := lfs_pointer(config_file)):
        raise CheckpointError(f"{config_file} {problem}")
    with quiet(path), _one_line(f"model.path={path} cannot be read"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
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

    with torch.device("meta"), _one_line(f"{path}: config.json describes no model"):
        model = AutoModel.from_config(_read(path))
    return roles_of(names_of_weights(model))


def names_of_weights(model: nn.Module) -> list[str]:
    """Return the names of modules with a weight, and of Parameters that may be banks of experts."""
    layers = [name for name, module in model.named_modules() if hasattr(module, "weight")]
    return layers + [name for name, parameter in model.named_parameters() if parameter.dim() == 3]


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
