"""Small checkpoints of transformers and calibration text for the tests of pruning."""

from pathlib import Path

import tokenizers
import torch
import transformers

from sparsepretrain.data.encoding import byte_tokenizer
from support.families import small_config


def checkpoint(directory: Path, family: str = "llama", dtype=torch.float32, **options) -> Path:
    """A language model of two blocks that reads bytes, with a tokenizer."""
    torch.manual_seed(0)
    config = small_config(family)
    cls = options.pop("cls", transformers.AutoModelForCausalLM)
    model = cls.from_config(config).to(dtype)
    for parameter in model.parameters():  # biases and norms are not trivial
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(directory, **options)
    tokenizer = tokenizers.Tokenizer.from_str(byte_tokenizer())
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def text(directory: Path, kilobytes: int = 4) -> list[str]:
    """Overrides that read a local file in sequences of 16 bytes."""
    file = directory / "text.txt"
    lines = [f"{i} sheep and {i * i % 97} goats in line {i % 13}\n" for i in range(2000)]
    file.write_text("".join(lines)[: 1024 * kilobytes])
    return [
        "data=text_files",
        f"data.files=['{file}']",
        "data.validation=0.3",
        "task.sequence_length=16",
        "parallel.device=cpu",
    ]
