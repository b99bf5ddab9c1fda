"""Exports load in stock classes, prove their weights and compute what evaluation does."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from sparsepretrain import cli, config
from sparsepretrain.console import Console
from sparsepretrain.data.encoding import ByteCodec, train_wordpiece
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.export import convert as converting
from sparsepretrain.export.audit import audit
from sparsepretrain.runs import weights
from sparsepretrain.runs.checkpoint import Checkpoint
from sparsepretrain.sparsity.methods.sste import SSTE
from sparsepretrain.training import derive
from sparsepretrain.training.assembly import evaluated_model
from support.export_cases import SMALL, export, write_checkpoint, write_run

TEXT = "Ā héllo\0\n\tdef f(x):  😀"

ALONE = """
import json, sys
class Blocked:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "sparsepretrain":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer("def f", return_tensors="pt")
made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
print(json.dumps([type(model).__name__, made[0].tolist(), tokenizer.decode(made[0])]))
"""


def about(directory: Path) -> dict:
    return json.loads((directory / "sparsity.json").read_text())


@pytest.mark.slow
def test_the_default_run_generates_with_transformers_alone(tmp_path):
    run = write_run(tmp_path, "gpt2")
    directory, told = export(run)
    assert directory == run / "export/hf"
    assert "2:4 in all 16,384 groups, 50.0% exact zeros" in told
    command = [sys.executable, "-W", "ignore", "-c", ALONE, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    name, tokens, text = json.loads(done.stdout)
    _, model, _ = evaluated_model(weights.find(run))
    expected = list(b"def f")
    with torch.no_grad():
        for _ in range(8):
            logits = model(input_ids=torch.tensor([expected])).logits
            expected.append(int(logits[0, -1].argmax()))
    assert name == "GPT2LMHeadModel"
    assert tokens == expected[: len(tokens)] and len(tokens) > 5
    assert text == ByteCodec().decode(tokens)

    loaded = AutoTokenizer.from_pretrained(directory)
    (ids,) = ByteCodec().encode([TEXT])
    assert loaded(TEXT).input_ids == ids.tolist()
    assert loaded.decode(ids.tolist()) == TEXT
    assert (loaded.eos_token_id, len(loaded), loaded.model_max_length) == (0, 256, 128)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    assert len({file.stat().st_mode for file in directory.iterdir()}) == 1, "all may be read"


@pytest.mark.parametrize(
    ("kind", "overrides", "pattern"),
    [
        ("gpt2", ("model.bias=true", "model.activation=gelu"), "2:4"),
        ("gpt2", ("sparsity=srste", "sparsity.n=1", "sparsity.m=8", "sparsity.targets=all"), "1:8"),
        ("gpt2", ("sparsity=sdgp",), None),
        ("bert", (), "2:4"),
        ("vit", ("model.activation=gelu_tanh",), "2:4"),
        ("resnet", (), "2:4"),
    ],
)
def test_exported_families_reload_with_equal_logits(kind, overrides, pattern, tmp_path):
    run = write_run(tmp_path, kind, *overrides)
    directory, told = export(run, out=tmp_path / "out")
    assert about(directory)["pattern"] == pattern
    assert "evaluation's" in told
    card = (directory / "README.md").read_text()
    assert ("all zeros are +0.0" in card) == (pattern is not None)
    assert ("final weights are dense" in card) == (pattern is None)
    code = card.partition("```python\n")[2].partition("```")[0].replace("DIR", str(directory))
    found: dict = {}
    exec("\n".join(line for line in code.splitlines() if "print" not in line), found)
    task, model, _ = evaluated_model(weights.find(run))
    inputs = converting.small_batch(task, found["model"])
    logits = converting.run(found["model"].eval(), inputs)
    torch.testing.assert_close(logits, converting.run(model, inputs))


def test_ternary_weights_are_exported_as_three_values(tmp_path):
    directory, _ = export(write_run(tmp_path, "gpt2", "sparsity=ternary"))
    assert about(directory)["pattern"] == "2:4" and not audit(directory, require=(2, 4)).fails
    state = load_file(directory / "model.safetensors")
    for name in about(directory)["layers"]:
        low, zero, high = state[f"{name}.weight"].unique().tolist()
        assert zero == 0 and low == -high < 0


def test_the_mean_of_checkpoints_is_exported(tmp_path, capsys):
    run = config.load([*SMALL["gpt2"], "parallel.device=cpu", f"runs_dir='{tmp_path}'"])
    states = []
    for step in (1, 2, 3):
        directory = write_checkpoint(run, step, seed=step)
        states.append(Checkpoint(directory / f"checkpoints/step_0000000{step}").part("model"))
    assert cli.main(["export", str(directory), "average=2", "--out", str(tmp_path / "out")]) == 0
    assert "mean of steps 2, 3" in capsys.readouterr().out
    assert about(tmp_path / "out")["averaged_steps"] == [2, 3]
    assert "mean of the checkpoints of steps 2, 3" in (tmp_path / "out/README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    name = "transformer.wte.weight"
    one, two = (state[name].double() for state in states[1:])
    expected = ((one + two) / 2).float()
    assert torch.equal(model.get_parameter(name), expected) and not torch.equal(one, two)
    assert model.lm_head.weight is model.transformer.wte.weight
    sparse = model.transformer.h[0].mlp.c_fc.weight  # (in, out)
    assert int((sparse == 0).sum()) == sparse.numel() // 2
    capsys.readouterr()
    for words, code in ((["average=4"], 4), (["average=0"], 2), (["avrage=2"], 2)):
        assert cli.main(["export", str(directory), *words]) == code
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_timm_reads_the_directory(tmp_path):
    directory, _ = export(write_run(tmp_path, "vit"))
    model = timm.create_model(f"local-dir:{directory}", pretrained=True)
    weight = model.blocks[0].mlp.fc1.weight
    assert int((weight == 0).sum()) == weight.numel() // 2


def test_heads_of_fine_tuned_models(tmp_path):
    """On our own backbone, and on a class of transformers that came from an export."""
    files = ("data.train=[a.jsonl]", "data.validation=[b.jsonl]")
    pairs, short = ("task=glue/mrpc", *files), ("task.max_length=64", "task.stride=16")
    spans = ("task=squad", *short, "task.max_question=24", *files)
    where = ("steps=4", "epochs=null", "parallel.device=cpu", f"runs_dir='{tmp_path}'")
    first = export(write_run(tmp_path, "gpt2"))[0]
    bert = write_run(tmp_path, "bert", "sparsity=ste")
    for source, words, name in [
        (first, pairs, "GPT2ForSequenceClassification"),
        (first.parents[1], spans, "GPT2ForQuestionAnswering"),
        (bert, pairs, "BertForSequenceClassification"),
    ]:
        run = derive.finetuned(str(source), [*words, *where], [], Console(io.StringIO()))
        directory, told = export(write_checkpoint(run))
        assert name in told and name in (directory / "config.json").read_text()
        ids = AutoTokenizer.from_pretrained(directory)("ab", "c").input_ids
        assert ids == [97, 98, 0, 99]  # as the task joins two texts of bytes


def test_dense_tail_is_reported(tmp_path):
    run = write_run(tmp_path, "gpt2", "sparsity=tsrste", "sparsity.dense_tail=0.5")
    directory, told = export(run)
    assert "dense weights since step 2 (dense_tail)" in told
    assert "dense weights since step 2 (dense_tail)" in (directory / "README.md").read_text()


def test_adapters_are_added_to_the_weights(tmp_path):
    words = ("sparsity=slope", "sparsity.adapters.rank=2", "sparsity.adapters.start=0.5")
    run = write_run(tmp_path, "gpt2", *words)
    with pytest.warns(UserWarning, match="folded into 4 layers"):
        directory, told = export(run)
    assert "adapters were added" in told and about(directory)["pattern"] is None
    task, model, _ = evaluated_model(weights.find(run))
    stock = AutoModelForCausalLM.from_pretrained(directory).eval()
    inputs = converting.small_batch(task, stock)
    torch.testing.assert_close(converting.run(stock, inputs), converting.run(model, inputs))


def test_translation(tmp_path):
    run = write_run(tmp_path, "marian", "model.vocab_size=4096")
    words = train_wordpiece(["one two three [SEP] four"] * 3, 64, lowercase=False)
    (run / "tokenizer.json").write_text(words)
    directory, _ = export(run)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer("one two", return_tensors="pt")
    assert inputs.input_ids[0, -1] == tokenizer.sep_token_id == tokenizer.eos_token_id
    model = AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    made = model.generate(**inputs, max_length=6)[0].tolist()
    task, ours, _ = evaluated_model(weights.find(run))
    mask = torch.ones_like(inputs.input_ids, dtype=torch.bool)
    search = {"beams": task.options.beam, "length_penalty": task.options.length_penalty}
    search |= {"end": tokenizer.eos_token_id, "length": 5}
    (expected,) = task.recipe.generate(ours, inputs.input_ids, mask, **search)
    assert made[0] == tokenizer.eos_token_id and made[1 : 1 + len(expected)] == expected


@pytest.mark.parametrize("kind", ["geglu", "resnet"])
def test_architectures_without_a_library_class_are_refused(kind, tmp_path, capsys):
    run = write_run(tmp_path, kind, *["model.stem=cifar"] * (kind == "resnet"))
    assert cli.main(["export", str(run)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and ("family bert_geglu" in told[0] or "3×3 stem" in told[0])
    assert not (run / "export").exists() or not list((run / "export").iterdir())


def test_only_earlier_exports_are_overwritten(tmp_path):
    run = write_run(tmp_path, "gpt2")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="is no export: choose another --out"):
        export(run, out=out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    export(run, out=out)
    before = (out / "model.safetensors").read_bytes()
    export(run, out=out)  # again: the same
    assert (out / "model.safetensors").read_bytes() == before
    with pytest.raises(ConfigError, match="Hugging Face checkpoint already"):
        export(out)


def test_any_output_but_this_directory(tmp_path, monkeypatch):
    run = write_run(tmp_path, "gpt2")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for out in (Path(), Path("sub/.."), tmp_path / "here"):
        with pytest.raises(ConfigError, match="is the current directory, which would be replaced"):
            export(run, out=out)
    for out in (Path("sub"), Path("~/sub"), Path("sub/deeper")):
        made, _ = export(run, out=out)
        assert (made / "model.safetensors").is_file()
    assert (tmp_path / "home/sub/config.json").is_file()
    assert (tmp_path / "here/sub/config.json").is_file()


def tree(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("added", ["notes.txt", ".git/HEAD", "model-00002-of-00002.safetensors"])
def test_an_export_with_other_files_is_kept(added, tmp_path):
    run = write_run(tmp_path, "gpt2")
    out, _ = export(run, out=tmp_path / "out")
    (out / added).parent.mkdir(exist_ok=True)
    (out / added).write_text("mine")
    before = tree(out)
    with pytest.raises(ConfigError, match=rf"files that export did not write \({added}\): move"):
        export(run, out=out)
    assert tree(out) == before


def test_what_prune_and_the_library_wrote_is_kept(tmp_path):
    run = write_run(tmp_path, "gpt2")
    pruned = tmp_path / "pruned"
    words = ["prune", str(run), "--method", "magnitude", "--out", str(pruned)]
    assert cli.main(words) == 0
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "sparsity.json").write_text('{"method": "ste", "pattern": "2:4"}')
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sparsity.json").write_text("{")
    for out in (pruned, saved, broken):
        before = tree(out)
        with pytest.raises(ConfigError, match="is no export: choose another --out"):
            export(run, out=out)
        assert tree(out) == before


@pytest.mark.parametrize("change", ["seed=1", "optim.lr=0.5"])
def test_the_export_of_another_run_is_kept(change, tmp_path):
    out, _ = export(write_run(tmp_path, "gpt2"), out=tmp_path / "out")
    before = tree(out)
    with pytest.raises(ConfigError, match="the export of another run: choose another --out"):
        export(write_run(tmp_path, "gpt2", change), out=out)
    assert tree(out) == before


def test_changed_weights_or_logits_leave_no_export(tmp_path, monkeypatch):
    run = write_run(tmp_path, "gpt2")
    original = converting.load

    changes = {"h.0.mlp.c_fc.weight": "h.0.mlp.c_fc changed", "ln_f.weight": "logits .* differ"}
    for name, message in changes.items():

        def load(*args, name=name):
            model = original(*args)
            with torch.no_grad():
                model.transformer.get_parameter(name).view(-1)[0] += 1
            return model

        monkeypatch.setattr(converting, "load", load)
        with pytest.raises(CheckpointError, match=message):
            export(run)
    assert list((run / "export").iterdir()) == []


def test_weights_that_are_not_sparse_are_refused(tmp_path, monkeypatch):
    run = write_run(tmp_path, "gpt2")
    project = SSTE.project

    def negative(self, weight, layer):
        found = project(self, weight, layer)
        return found._replace(forward=torch.where(found.forward == 0, -0.0, found.forward))

    monkeypatch.setattr(SSTE, "project", negative)
    with pytest.raises(CheckpointError, match=r"NOT 2:4: .*mlp"):
        export(run)
