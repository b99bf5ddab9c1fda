"""Tokenizer of a run for AutoTokenizer, and the token ids in the model's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsepretrain.data.encoding import Template, byte_tokenizer, open_codec
from sparsepretrain.tasks import Task

BERT = {f"{key}_token": f"[{key.upper()}]" for key in ("unk", "cls", "sep", "pad", "mask")}


def make_tokenizer(file: Path | None, task: Task, model: Any) -> Any:
    """Build a fast tokenizer (no file: of bytes) and set the special token ids of ``model``."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    codec = open_codec(file)
    text = byte_tokenizer() if file is None else file.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    if task.options.name == "masked_lm" and codec.mask is None:
        tokenizer.add_special_tokens([BERT["mask_token"]])  # the row after the tokens
    # special tokens around a text as in training; running text has none
    template = codec.template() if hasattr(task, "head") else None
    if task.kind == "pairs":
        template = Template((), (), (), () if codec.end_of_text is None else (codec.end_of_text,))
    if template is not None:
        names = {i: tokenizer.id_to_token(i) for i in sorted({*sum(template, ())})}
        first, middle, last, alone = ([names[i] for i in part] for part in template)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *alone],
            pair=[*first, "$A", *middle, "$B:1", *last],
            special_tokens=[(name, i) for i, name in names.items()],
        )
    known = tokenizer.get_vocab(with_added_tokens=True)
    settings: dict[str, Any] = {key: name for key, name in BERT.items() if name in known}
    if codec.end_of_text is not None:
        end = tokenizer.id_to_token(codec.end_of_text)
        settings = {"eos_token": end, "pad_token": end, **settings}
    # the model may have more positions, but they were not trained
    for key in ("max_length", "sequence_length"):
        if hasattr(task.options, key):
            settings["model_max_length"] = getattr(task.options, key)
    if codec.end_of_text is not None and getattr(task.recipe, "causal", True):
        _set_token_ids(model, task, codec.end_of_text)
    # no token types, which GPT-2 would embed like tokens
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def _set_token_ids(model: Any, task: Task, end: int) -> None:
    """Use ``end`` as end and padding token, and as start token of translations."""
    settings = {"eos_token_id": end, "pad_token_id": end}
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
