"""Checkpoints as other people write them: names of directories, quantized weights."""

import json
import re

import pytest
import torch
import transformers

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.cli import main
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.runs import weights
from sparsepretrain.training.assembly import evaluated_model
from support.families import small_config
from support.finetune_cases import load, train

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


def pruned(directory, n):
    """A checkpoint whose FFN is n:4, not by magnitude."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config("gpt2"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name and parameter.dim() == 2:  # Conv1D: (in, out)
                kept = kernels.nm_mask(torch.rand_like(parameter), n, 4, dim=0)
                parameter.masked_fill_(~kept, 0)
    model.save_pretrained(directory)
    return model


def fine_tuned(tmp_path, *words):
    (tmp_path / "text.py").write_text("print('sheep')\n" * 300)
    return train(
        tmp_path / "model",
        *WORDS,
        f"data.roots=['{tmp_path}']",
        f"runs_dir='{tmp_path}/runs'",
        *words,
    )


NOTE = "note: 4 layers of the checkpoint are 2:4"


@pytest.mark.parametrize("sparsity", ["dense", "ste"])
def test_zeros_that_will_train_are_noted(tmp_path, sparsity):
    pruned(tmp_path / "model", 2)
    _, out, _ = fine_tuned(tmp_path, f"sparsity={sparsity}")
    text = " ".join(out.split())
    assert (
        f"{NOTE}, and sparsity={sparsity} trains their zeros too: sparsity=asp sparsity.at=0"
        in text
    )


CASES = {
    "exceptions": (lambda w: w[:4, :1].fill_(1.0), "4 layers .* are 2:4 but for 4 groups, and"),
    "zeros": (lambda w: w.zero_(), ""),
    "dense": (lambda w: w.fill_(1.0), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_that_were_meant_to_be_sparse_are_counted(tmp_path, case):
    change, expected = CASES[case]
    model = pruned(tmp_path / "model", 2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".mlp." in name and weight.dim() == 2:
                change(weight)
    model.save_pretrained(tmp_path / "model")
    _, out, _ = fine_tuned(tmp_path, "sparsity=ste")
    text = " ".join(out.split())
    assert re.search(expected, text) if expected else "of the checkpoint" not in text


def test_sparse_layers_that_are_no_targets_are_noted(tmp_path):
    pruned(tmp_path / "model", 2)
    words = ("sparsity=asp", "sparsity.at=0", 'sparsity.targets=["*.mlp.c_fc"]')
    _, out, _ = fine_tuned(tmp_path, *words)
    text = " ".join(out.split())
    assert "note: 2 layers of the checkpoint are 2:4, and they are not among the targets" in text


def test_the_proposed_words_keep_the_zeros(tmp_path):
    pruned(tmp_path / "model", 2)
    directory, out, _ = fine_tuned(tmp_path, "sparsity=asp", "sparsity.at=0")
    assert "of the checkpoint are" not in out
    source = pruned(tmp_path / "again", 2).state_dict()
    mask_of = sp.sparsifier_of(evaluated_model(weights.find(directory))[1]).masks()
    assert len(mask_of) == 4
    for name, mask in mask_of.items():
        assert torch.equal(mask, source[f"{name}.weight"] != 0)


def test_weights_sparser_than_the_pattern_keep_their_zeros(tmp_path):
    source = pruned(tmp_path / "model", 1).state_dict()
    directory, _, _ = fine_tuned(tmp_path, "sparsity=asp", "sparsity.at=0", "init.mask=zeros")
    for name, mask in sp.sparsifier_of(evaluated_model(weights.find(directory))[1]).masks().items():
        assert torch.equal(mask, source[f"{name}.weight"] != 0)


def test_masks_of_zeros_need_a_fixed_mask(tmp_path):
    pruned(tmp_path / "model", 2)
    with pytest.raises(ConfigError, match=r"init\.mask=zeros: ste has no mask that is fixed"):
        fine_tuned(tmp_path, "sparsity=ste", "init.mask=zeros")
