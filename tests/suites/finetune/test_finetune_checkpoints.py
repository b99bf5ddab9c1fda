"""Checkpoints as other people write them: names of directories, quantized weights."""

import json

import pytest
import transformers

from sparsepretrain.cli import main
from sparsepretrain.errors import CheckpointError
from support.families import small_config
from support.finetune_cases import load

WORDS = ("task=causal_lm", "data=python_source", "task.sequence_length=16", "steps=1")


def save(directory, **more):
    model = transformers.AutoModelForCausalLM.from_config(small_config("gpt2"))
    model.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return directory


QUANTIZED = {
    "compressed-tensors": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "sparsity_config": {"format": "dense"},
        }
    },
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "fp8": {"quantization_config": {"quant_method": "fp8"}},
    "older name": {"compression_config": {"format": "dense"}},
    "part": {"text_config": {"quantization_config": {"quant_method": "awq"}}},
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_checkpoint_is_one_line(tmp_path, kind):
    source = save(tmp_path / "model", **QUANTIZED[kind])
    with pytest.raises(CheckpointError, match=r"weights are quantized .*Dequantize") as caught:
        load(source, *WORDS, f"data.roots=['{tmp_path}']")
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)


def test_a_checkpoint_may_have_any_name(tmp_path, monkeypatch, capsys):
    source = save(tmp_path / "epoch=3-step=40")
    (tmp_path / "text.py").write_text("print('sheep')\n" * 300)
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, f"data.roots=['{tmp_path}']", "parallel.device=cpu", "--dry-run"]
    assert main(["finetune", f"./{source.name}", *words]) == 0
    assert main(["finetune", source.name, *words]) == 0
    capsys.readouterr()
    assert main(["finetune", "task=causal_lm", *words]) == 2
    assert "the checkpoint comes first" in capsys.readouterr().err
