"""Tokenizer of a run for AutoTokenizer, and the token ids in the model's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsepretrain.data.encoding import ByteCodec, Codec, Template, byte_tokenizer, open_codec
from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.files import read_json
from sparsepretrain.tasks import Task

BERT = {f"{key}_token": f"[{key.upper()}]" for key in ("unk", "cls", "sep", "pad", "mask")}
PAD = "<pad>"
"""Name of a padding token that is added to a tokenizer without one."""
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
"""Files of a checkpoint that name special tokens; the second one wins."""
KEPT = ("padding_side", "truncation_side", "clean_up_tokenization_spaces", "chat_template")
"""Settings of a checkpoint's tokenizer that are exported besides its special tokens. Others, such
as ``add_bos_token``, would make transformers add tokens that training did not."""
CHAT_TEMPLATE = "chat_template.jinja"


def make_tokenizer(file: Path | None, checkpoint: Path | None, task: Task, model: Any) -> Any:
    """Build a fast tokenizer and set the special token ids of ``model``.

    Args:
        file: tokenizer.json of the run; None: bytes.
        checkpoint: directory with the settings of the tokenizer that the run started from, whose
            special tokens and chat template are kept; None: no settings.
        task: decides the special tokens around a text.
        model: the exported model of transformers.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    codec = open_codec(file)
    text = byte_tokenizer() if file is None else file.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    if task.options.name == "masked_lm" and codec.mask is None:
        tokenizer.add_special_tokens([BERT["mask_token"]])  # the row after the tokens
    # special tokens around a text as in training
    template = codec.template() if hasattr(task, "head") else None
    if task.kind == "pairs":
        template = Template((), (), (), () if codec.end_of_text is None else (codec.end_of_text,))
    continues = task.model_options.family == "pretrained"
    if template is not None:
        names = {i: tokenizer.id_to_token(i) for i in sorted({*sum(template, ())})}
        first, middle, last, alone = ([names[i] for i in part] for part in template)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *alone],
            pair=[*first, "$A", *middle, "$B:1", *(f"{name}:1" for name in last)],
            special_tokens=[(name, i) for i, name in names.items()],
        )
    elif tokenizer.num_special_tokens_to_add(False) and not continues:
        # Running text has none: after the end of a document nothing was ever trained. A checkpoint
        # that was trained further keeps those that it began with.
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    known = tokenizer.get_vocab(with_added_tokens=True)
    settings: dict[str, Any] = {key: name for key, name in BERT.items() if name in known}
    settings |= _kept_settings(checkpoint, known)
    if hasattr(task, "head"):
        settings["padding_side"] = "right"  # as in training: GPT-2 counts positions from the left
    if codec.end_of_text is not None:
        settings["eos_token"] = tokenizer.id_to_token(codec.end_of_text)
    if "pad_token" not in settings and continues:
        configured: Any = getattr(model.config, "pad_token_id", None)
        if configured in known.values():
            settings["pad_token"] = tokenizer.id_to_token(configured)
    pad = _pad_token(tokenizer, codec, settings, template, model)
    if pad is not None:
        settings["pad_token"] = pad
    # the model may have more positions, but they were not trained
    for key in ("max_length", "sequence_length"):
        if hasattr(task.options, key):
            settings["model_max_length"] = getattr(task.options, key)
    _set_token_ids(
        model, task, codec.end_of_text, None if pad is None else tokenizer.token_to_id(pad)
    )
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    if reads_token_types(task, model):
        settings["model_input_names"].insert(1, "token_type_ids")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def reads_token_types(task: Task, model: Any) -> bool:
    """Return True if training marked the tokens of the second text.

    Models of this package do not, and GPT-2 would embed the marks like tokens.
    """
    marks = getattr(model.config, "type_vocab_size", 0) > 1
    return bool(marks and task.model_options.family == "pretrained" and hasattr(task, "head"))


def _kept_settings(checkpoint: Path | None, known: dict[str, int]) -> dict[str, Any]:
    """Return the special tokens and other settings of a checkpoint's tokenizer.

    Tokens that the vocabulary lacks are left out: transformers would add them, and the embedding
    has no rows for them.
    """
    settings: dict[str, Any] = {}
    for name in SETTINGS if checkpoint is not None else ():
        file = Path(str(checkpoint), name)
        if not file.is_file():
            continue
        try:
            values = read_json(file)
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read: {error}: repair or remove it") from error
        for key, value in values.items():
            token = _content(value)
            if key in KEPT and value is not None:
                settings[key] = value
            elif key.endswith("_token") and token in known:
                settings[key] = token
            elif key in ("additional_special_tokens", "extra_special_tokens"):
                listed = value.values() if isinstance(value, dict) else value or ()
                settings["extra_special_tokens"] = [
                    token for token in map(_content, listed) if token in known
                ]
    if checkpoint is not None and (checkpoint / CHAT_TEMPLATE).is_file():
        settings["chat_template"] = (checkpoint / CHAT_TEMPLATE).read_text(encoding="utf-8")
    return settings


def _content(value: Any) -> str | None:
    """Return the text of a token, which may be written with its properties."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _pad_token(
    tokenizer: Any, codec: Codec, settings: dict[str, Any], template: Template | None, model: Any
) -> str | None:
    """Return the padding token, or None if there is none and the model needs none.

    It is the checkpoint's own, else the end of text. A causal classifier reads the token before the
    padding, so no text may end with the padding token: then it is another special token or a new
    one.
    """
    candidates = [settings.get("pad_token"), settings.get("eos_token")]
    last: set[str] = set()
    if template is not None and hasattr(model, "score"):
        names = [] if isinstance(codec, ByteCodec) else codec.special_names()
        candidates += [name for name in names if name != settings.get("unk_token")]
        last = {tokenizer.id_to_token(part[-1]) for part in template[2:] if part}
    usable = [name for name in candidates if name is not None and name not in last]
    if usable or not hasattr(model, "score"):
        return usable[0] if usable else None
    if max(tokenizer.get_vocab().values()) + 1 >= model.get_input_embeddings().num_embeddings:
        raise ConfigError(
            "the tokenizer has no token to pad with, and the embedding no row for a new one: give "
            "task.tokenizer a file with a special token that ends no text, such as <pad>"
        )
    tokenizer.add_special_tokens([PAD])
    return PAD


def _set_token_ids(model: Any, task: Task, end: int | None, pad: int | None) -> None:
    """Set end and padding token, and the start token of translations, where training set none.

    A model of transformers keeps its own; a classifier must know the padding of the tokenizer.
    """
    settings = {} if pad is None else {"pad_token_id": pad}
    if task.model_options.family == "pretrained":
        if hasattr(model, "score") or getattr(model.config, "pad_token_id", None) is None:
            model.config.update(settings)
        return
    if end is None or not getattr(task.recipe, "causal", True):
        return
    settings["eos_token_id"] = end
    if task.kind == "pairs":
        settings["decoder_start_token_id"] = end
    model.config.update(settings)
    if (generation := getattr(model, "generation_config", None)) is not None:
        if task.kind == "pairs":
            settings["num_beams"] = task.options.beam
            settings["max_length"] = model.config.max_position_embeddings
            if task.options.beam > 1:
                settings["length_penalty"] = task.options.length_penalty
        generation.update(**settings)
