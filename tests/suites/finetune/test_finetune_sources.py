"""Sources that changed after a run started from them, and checkpoints that read no text."""

import shutil

import pytest
import torch
import transformers

from sparsepretrain.cli import main
from sparsepretrain.errors import CheckpointError
from sparsepretrain.runs import origin
from sparsepretrain.training import trainer
from sparsepretrain.training.schedules import resolve_steps
from support.finetune_cases import QUICK, glue, load, train, write_rows

SIZES = {"vocab_size": 256, "n_positions": 64, "n_embd": 16, "n_head": 2}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)


def gpt2_config(layers):
    return transformers.GPT2Config(n_layer=layers, bos_token_id=0, eos_token_id=0, **SIZES)


def gpt2(directory, layers=1, cls=transformers.GPT2ForSequenceClassification, **options):
    cls(gpt2_config(layers)).save_pretrained(directory, **options)
    return directory


def other_head(directory):
    """Only the head changes: 128 bytes of the file."""
    model = transformers.GPT2ForSequenceClassification.from_pretrained(directory)
    torch.nn.init.ones_(model.score.weight)
    model.save_pretrained(directory)


def other_settings(directory):
    file = directory / "config.json"
    file.write_text(file.read_text().replace('"n_head": 2', '"n_head": 4'))


def several_files(directory):
    (directory / "model.safetensors").unlink()
    gpt2(directory, max_shard_size="20KB")


CHANGES = {
    "other weights": (gpt2, "model.safetensors"),
    "another layer": (lambda directory: gpt2(directory, 2), "config.json, model.safetensors"),
    "only the head": (other_head, "model.safetensors"),
    "only the configuration": (other_settings, "config.json"),
    "several files": (several_files, "model-00001-of-0000"),
}


@pytest.fixture
def finished(tmp_path):
    """(source, words) of a run of one step that is finished."""
    source = gpt2(tmp_path / "hf")
    words = [*glue(tmp_path), "task.max_length=64", "steps=1", "epochs=null"]
    words.append(f"runs_dir='{tmp_path}/runs'")
    train(source, *words)
    return source, words


def test_a_run_is_not_finished_if_its_source_changed(finished, tmp_path, capsys):
    source, words = finished
    shutil.copytree(source, tmp_path / "aside")
    for case, (change, names) in CHANGES.items():
        change(source)
        capsys.readouterr()
        assert main(["finetune", str(source), *QUICK, *words]) == 4, case
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{source} has changed since" in line and "another name=" in line
        assert names in line, case
        shutil.rmtree(source)
        shutil.copytree(tmp_path / "aside", source)


def test_a_run_does_not_continue_from_a_source_that_changed(tmp_path, stop_after):
    source = gpt2(tmp_path / "hf")
    typed = [*glue(tmp_path), "task.max_length=64", "epochs=1", "checkpoint.every=2"]
    run = resolve_steps(load(source, *typed, f"runs_dir='{tmp_path}/runs'"))
    stop_after(3)
    assert trainer.train(run) == 143
    stop_after(-1)
    shutil.move(source, tmp_path / "aside")
    gpt2(source)
    with pytest.raises(CheckpointError, match="has changed since"):
        trainer.train(run)
    shutil.rmtree(source)
    shutil.copytree(tmp_path / "aside", source)  # the same files, newer
    assert trainer.train(run) == 0


def test_resume_never_and_missing_sources_are_not_compared(finished, capsys):
    source, words = finished
    gpt2(source)
    assert main(["finetune", str(source), *QUICK, *words, "resume=never"]) == 0
    assert main(["finetune", str(source), *QUICK, *words]) == 0
    run = load(source, *words)
    shutil.rmtree(source)
    assert trainer.train(resolve_steps(run)) == 0


def test_a_run_as_source_is_known_by_its_manifest(finished, tmp_path, capsys):
    _, words = finished
    first = next((tmp_path / "runs").glob("*/*-s0"))
    assert main(["finetune", str(first), *QUICK, *words]) == 0
    manifest = first / "checkpoints/step_00000001/manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    capsys.readouterr()
    assert main(["finetune", str(first), *QUICK, *words]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_00000001 has changed since" in line and "(manifest.json)" in line


@pytest.mark.parametrize("safe", [True, False])
def test_the_fingerprint_sees_every_tensor(tmp_path, safe):
    model = transformers.GPT2ForSequenceClassification(gpt2_config(1))

    def saved(name):
        directory = tmp_path / name
        model.save_pretrained(directory)
        if not safe:
            torch.save(model.state_dict(), directory / "pytorch_model.bin")
            (directory / "model.safetensors").unlink()
        return origin.fingerprint(str(directory))

    before = saved("before")
    assert saved("again") == before
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter += 1
        after = saved("after")
        assert after != before, name
        before = after


def test_a_fingerprint_reads_little_of_a_large_file(tmp_path):
    gpt2(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with open(tmp_path / "pytorch_model.bin", "wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take minutes
    assert origin.fingerprint(str(tmp_path))["pytorch_model.bin"]


@pytest.mark.parametrize(
    "config",
    [
        transformers.ViTConfig(image_size=16, patch_size=8, intermediate_size=32, **SMALL),
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]),
        transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4),
        transformers.EncodecConfig(),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("task", ["causal_lm", "labels"])
def test_models_without_a_vocabulary_are_refused(tmp_path, capsys, config, task):
    config.save_pretrained(tmp_path / "hf")
    words = glue(tmp_path)
    if task == "causal_lm":
        text = write_rows(tmp_path / "text.txt", [{"text": "one sheep"}] * 99)
        words = ["task=causal_lm", "data=text_files", f"data.files=['{text}']"]
    assert main(["finetune", str(tmp_path / "hf"), *words, "parallel.device=cpu"]) == 2
    assert "is no language model" in capsys.readouterr().err
