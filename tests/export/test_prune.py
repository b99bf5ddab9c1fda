"""The verb ``prune``: checkpoints in, pruned checkpoints out."""

import errno
import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sparsepretrain import registry
from sparsepretrain.cli import main
from sparsepretrain.export.audit import audit
from sparsepretrain.pruning import journal
from sparsepretrain.pruning.mask_files import read_masks
from support.prune_cases import checkpoint, text


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))


def prune(source, out, *words, method="wanda", sequences=16):
    typed = ["--method", method, "--out", str(out), "--sequences", str(sequences)]
    return main(["prune", str(source), *typed, *words])


def tensors(directory):
    return {
        k: v for f in sorted(directory.glob("model*.safetensors")) for k, v in load_file(f).items()
    }


@pytest.mark.parametrize("method", registry.names("pruning"))
def test_a_checkpoint_in_shards_and_bf16_stays_one(tmp_path, method):
    source = checkpoint(tmp_path / "hf", dtype=torch.bfloat16, max_shard_size="20KB")
    out = tmp_path / "out"
    assert prune(source, out, *text(tmp_path), method=method) == 0
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys()
    masks = dict(read_masks(out))
    assert len(masks) == 14
    moved = "o_proj v_proj down_proj up_proj gate_proj" if method == "ria" else ""
    for name, value in after.items():
        assert value.dtype == torch.bfloat16
        layer = name.removesuffix(".weight")
        if layer not in masks:
            assert torch.equal(value, before[name]), name
            continue
        assert torch.equal(value != 0, masks[layer])
        assert masks[layer].unflatten(1, (-1, 4)).sum(-1).eq(2).all()
        if method in ("magnitude", "wanda") or layer.rpartition(".")[2] not in moved.split():
            same = value == before[name].where(masks[layer], 0.0)
            assert bool(same.all()) == (method != "sparsegpt")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        one, other = (json.loads((d / name).read_text()) for d in (source, out))
        assert one == other
    assert not audit(out, require=(2, 4)).fails
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    facts = json.loads((out / "prune.json").read_text())
    (entry,) = facts["perplexity"]["after"]
    assert entry["window"] == 16 and entry["predicted"] > 300
    assert "perplexity after" in (out / "prune.md").read_text()
    assert {f.name for f in tmp_path.iterdir()} == {"hf", "out", "text.txt", "cache"}


@pytest.mark.parametrize(
    "family", ["gpt2", "opt", "gpt_neox", "qwen2", "gemma2", "phi3", "bloom", "falcon", "mpt"]
)
def test_families_keep_their_files_and_load(tmp_path, family):
    source = checkpoint(tmp_path / "hf", family)
    out = tmp_path / "out"
    assert prune(source, out, *text(tmp_path), method="ria") == 0
    assert tensors(source).keys() == tensors(out).keys()
    assert not audit(out, require=(2, 4)).fails
    _, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_model_of_other_tasks_is_pruned_by_magnitude_only(tmp_path, capsys):
    source = checkpoint(tmp_path / "hf", "bert", cls=transformers.AutoModelForMaskedLM)
    out = tmp_path / "out"
    assert prune(source, out, method="magnitude") == 0
    assert not audit(out, require=(2, 4), layers=["*.layer.*"]).fails
    assert prune(source, tmp_path / "no", *text(tmp_path)) == 2
    assert "--method magnitude" in capsys.readouterr().err.splitlines()[-1]


def test_layers_and_pattern_are_chosen(tmp_path):
    source = checkpoint(tmp_path / "hf")
    out = tmp_path / "out"
    words = ["--layers", "ffn", "!*.up_proj", "--pattern", "1:4"]
    assert prune(source, out, *text(tmp_path), *words) == 0
    masks = dict(read_masks(out))
    assert {name.rpartition(".")[2] for name in masks} == {"gate_proj", "down_proj"}
    assert all(mask.unflatten(1, (-1, 4)).sum(-1).eq(1).all() for mask in masks.values())
    assert json.loads((out / "sparsity.json").read_text())["pattern"] == "1:4"


def require_equal_files(first, second):
    assert {file.name for file in first.iterdir()} == {file.name for file in second.iterdir()}
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def interrupt(monkeypatch, after):
    """End the command when it has finished so many blocks."""
    saved = journal.DirectoryJournal.save
    count = iter(range(after, -1, -1))

    def save(self, stage):
        if next(count) == 0:
            raise KeyboardInterrupt
        saved(self, stage)

    monkeypatch.setattr(journal.DirectoryJournal, "save", save)


@pytest.mark.parametrize("method", registry.names("pruning"))
def test_an_interrupted_command_goes_on_to_the_same_bytes(tmp_path, monkeypatch, method):
    source = checkpoint(tmp_path / "hf", dtype=torch.bfloat16)
    words = text(tmp_path)
    assert prune(source, tmp_path / "whole", *words, method=method) == 0
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        assert prune(source, out, *words, method=method) == 130
    assert not out.exists()
    assert len([*(tmp_path / ".out.partial" / "stages").iterdir()]) == 1
    assert prune(source, out, *words, method=method) == 0
    require_equal_files(tmp_path / "whole", out)
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("place", ["a block", "the model"])
def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path, monkeypatch, capsys, place):
    source = checkpoint(tmp_path / "hf")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:

        def full(*args, **options):
            raise OSError(errno.ENOSPC, "No space left on device")

        if place == "a block":
            patch.setattr(journal, "save_file", full)
        else:
            patch.setattr("sparsepretrain.pruning.mask_files.save_file", full)
        assert prune(source, out, *text(tmp_path)) == 4
    assert "disk full" in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()
    assert prune(source, out, *text(tmp_path)) == 0


def test_other_settings_do_not_go_on_with_the_work_of_before(tmp_path, monkeypatch, capsys):
    source = checkpoint(tmp_path / "hf")
    words = text(tmp_path)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        assert prune(source, out, *words) == 130
    for other in (["--pattern", "1:4"], ["seed=1"], ["--layers", "ffn"]):
        assert prune(source, out, *words, *other) == 2
        assert "other settings" in capsys.readouterr().err.splitlines()[-1]
    assert prune(source, out, *words) == 0


def test_a_finished_command_does_nothing_and_overwrites_nothing(tmp_path, capsys):
    source = checkpoint(tmp_path / "hf")
    words = text(tmp_path)
    out = tmp_path / "out"
    assert prune(source, out, *words) == 0
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert prune(source, out, *words) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert prune(source, out, *words, method="magnitude") == 2
    assert before == {file.name: file.stat().st_mtime_ns for file in out.iterdir()}


def no_text(source, root):
    return []


def few_sequences(source, root):
    return [*text(root, kilobytes=1), "task.sequence_length=64"]


def small_embedding(source, root):
    """The tokenizer has 256 tokens."""
    shutil.rmtree(source)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    tokenizer = checkpoint(root / "other")
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    shutil.copy(tokenizer / "tokenizer.json", source)
    shutil.rmtree(tokenizer)
    return text(root)


def no_tokenizer(source, root):
    (source / "tokenizer.json").unlink()
    return text(root)


def indivisible(source, root):
    return [*text(root), "--pattern", "2:5"]


def pickled(source, root):
    state = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(state, source / "pytorch_model.bin")
    return text(root)


def truncated(source, root):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return text(root)


def not_finite(source, root):
    state = load_file(source / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(state, source / "model.safetensors", {"format": "pt"})
    return text(root)


def without_head(source, root):
    """Untied, and the file has no lm_head: transformers would draw one."""
    state = load_file(source / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, source / "model.safetensors", {"format": "pt"})
    return text(root)


def long_sequences(source, root):
    """GPT-2 has a table of positions, here of 64."""
    shutil.rmtree(source)
    checkpoint(source, "gpt2")
    return [*text(root), "task.sequence_length=128"]


def another_task(source, root):
    return [*text(root), "task=masked_lm"]


def other_layers(source, root):
    return [*text(root), "--layers", "*.mpl.*"]


def the_head(source, root):
    return [*text(root), "--layers", "lm_head"]


def unknown_pattern(source, root):
    return [*text(root), "--pattern", "2-4"]


def unknown_option(source, root):
    return [*text(root), "powr=0.5"]


def gone(source, root):
    words = text(root)
    shutil.rmtree(source)
    return words


REFUSED = {
    no_text: (2, "data=c4_shard"),
    few_sequences: (2, "calibration reads 16"),
    small_embedding: (3, "256 tokens"),
    no_tokenizer: (2, "no tokenizer.json"),
    indivisible: (2, "multiple of 5"),
    pickled: (4, "pickled"),
    truncated: (4, "cannot be loaded"),
    not_finite: (4, "not finite"),
    without_head: (4, "lacks lm_head.weight"),
    long_sequences: (2, "task.sequence_length"),
    another_task: (2, "task"),
    other_layers: (2, "--layers"),
    the_head: (2, "lm_head"),
    unknown_pattern: (2, "--pattern"),
    unknown_option: (2, "powr"),
    gone: (4, "no such directory"),
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, case):
    source = checkpoint(tmp_path / "hf")
    words = case(source, tmp_path)
    code, text_of_error = REFUSED[case]
    before = sorted(path.name for path in tmp_path.iterdir() if path.name != "cache")
    assert prune(source, tmp_path / "new" / "out", *words) == code
    lines = capsys.readouterr().err.splitlines()
    assert text_of_error in lines[-1] and not any("Traceback" in line for line in lines)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name not in ("cache", "new"))
    assert left == before
    assert [*tmp_path.glob("new/*"), *tmp_path.glob("new/.*")] == []


@pytest.mark.parametrize("word", ["powr=0.5", "task.sequence_length=16", "seed=1"])
def test_words_that_would_do_nothing_are_refused(tmp_path, capsys, word):
    source = checkpoint(tmp_path / "hf")
    assert prune(source, tmp_path / "out", word, method="magnitude") == 2
    assert word.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_damaged_report_is_not_a_finished_command(tmp_path, capsys):
    source = checkpoint(tmp_path / "hf")
    out = tmp_path / "out"
    assert prune(source, out, method="magnitude") == 0
    (out / "prune.json").write_text("{")
    assert prune(source, out, method="magnitude") == 2
    assert "was not made by prune" in capsys.readouterr().err


def test_widths_that_do_not_fit_are_one_line_each_before_text_is_read(tmp_path, capsys):
    source = checkpoint(tmp_path / "hf")
    words = ["--pattern", "2:3", *text(tmp_path)]
    capsys.readouterr()
    assert prune(source, tmp_path / "out", *words) == 2
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if "is not a multiple of 3" in line]
    assert len(lines) == len(told.err.splitlines()) == 2
    assert "more layers: in_features" in lines[0] and lines[0].endswith(": leave them out")
    assert "perplexity" not in told.out + told.err


def test_an_unknown_method_is_one_line(tmp_path, capsys):
    assert prune(tmp_path, tmp_path / "out", method="wand") == 2
    assert "'wanda'" in capsys.readouterr().err


def test_a_directory_with_other_files_is_kept(tmp_path, capsys):
    source = checkpoint(tmp_path / "hf")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    assert prune(source, out, *text(tmp_path)) == 2
    assert (out / "mine").read_text() == "kept"


def test_a_run_is_calibrated_with_its_own_data_and_pruned_like_its_export(tiny, tmp_path):
    run = tiny.train("model.n_layer=2").directory
    out = tmp_path / "out"
    assert prune(run, out, "--layers", "all") == 0
    facts = json.loads((out / "prune.json").read_text())
    assert facts["settings"]["text"]["data"] == "text_files"
    assert not audit(out, require=(2, 4)).fails
    exported = tmp_path / "export"
    assert main(["export", str(run), "--out", str(exported)]) == 0
    again = tmp_path / "again"
    data = [f"data.files=['{tiny.corpus}/*.txt']", "data.validation=0.3"]
    words = ["data=text_files", *data, "data.tokenizer=bytes", "task.sequence_length=16"]
    assert prune(exported, again, *words, "--layers", "all") == 0
    one, other = tensors(out), tensors(again)
    assert all(torch.equal(one[name], other[name]) for name in one)
    loss = facts["perplexity"]["before"][0]["perplexity"]
    assert (
        loss
        == json.loads((again / "prune.json").read_text())["perplexity"]["before"][0]["perplexity"]
    )


def test_documents_are_packed_for_calibration(tiny, tmp_path):
    """Padding is no text: the masks are those of a run without documents."""
    out = {}
    for documents in ("true", "false"):
        run = tiny.train(f"task.documents={documents}", "steps=2").directory
        pruned = tmp_path / documents
        words = ["seed=3"]
        assert prune(run, pruned, *words) == 0
        out[documents] = json.loads((pruned / "prune.json").read_text())
        assert out[documents]["perplexity"]["after"][0]["loss"] > 0
    first, second = (out[key]["settings"]["text"] for key in out)
    assert first == second


def test_the_same_checkpoint_by_another_path_goes_on(tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "hf")
    words = text(tmp_path)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        assert prune(source, out, *words) == 130
    monkeypatch.chdir(tmp_path)
    assert prune("hf", "out", *words) == 0


def test_runs_of_other_tasks_are_refused(tiny, tmp_path, capsys):
    run = tiny.train("model=bert_nano", "model.n_inner=64").directory
    assert prune(run, tmp_path / "out") == 2
    assert "task=masked_lm" in capsys.readouterr().err.splitlines()[-1]
    assert prune(run, tmp_path / "out", method="magnitude") == 0
    assert not audit(tmp_path / "out", require=(2, 4), layers=["*.layer.*"]).fails


KILLED = """
import os, signal, sys
from sparsepretrain.cli import main
from sparsepretrain.pruning.journal import DirectoryJournal

saved = DirectoryJournal.save

def save(journal, stage):
    if sys.argv[1] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    saved(journal, stage)
    os.kill(os.getpid(), signal.SIGKILL)

DirectoryJournal.save = save
main(sys.argv[2:])
"""


@pytest.mark.fault
@pytest.mark.parametrize("method", ["ria", "sparsegpt"])
def test_a_command_killed_after_every_block_ends_with_the_same_bytes(tmp_path, method):
    source = checkpoint(tmp_path / "hf", dtype=torch.bfloat16)
    words = text(tmp_path)
    assert prune(source, tmp_path / "whole", *words, method=method) == 0
    out = tmp_path / "out"
    typed = ["prune", str(source), "--method", method, "--out", str(out), "--sequences", "16"]
    for moment in ("before", "after", "before", "after"):
        command = [sys.executable, "-c", KILLED, moment, *typed, *words]
        assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
        assert not out.exists()
    assert prune(source, out, *words, method=method) == 0
    require_equal_files(tmp_path / "whole", out)
    assert not (tmp_path / ".out.partial").exists()
