"""Fine-tuning of pre-training runs on local files in GLUE's format, with the network blocked."""

import functools
import math
import socket
from dataclasses import replace

import pytest
import torch

from sparsepretrain.cli import main
from sparsepretrain.config import freeze
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.runs import weights
from sparsepretrain.sparsity import densify
from sparsepretrain.tasks import build_task
from sparsepretrain.training import assembly, trainer
from sparsepretrain.training.schedules import resolve_steps
from support.finetune_cases import QUICK, build, glue, load, squad, train
from support.tiny_runs import Tiny, assert_equal_bits, final_state, metrics


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a test asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_corpus):
    """``trained(*overrides)``: directory of a run, trained once, for tests that only read it."""
    own = Tiny(tmp_path_factory.mktemp("sources"), small_corpus)
    return functools.cache(lambda *overrides: own.train(*overrides).directory)


def test_finetune_command_reports_glue_metrics(trained, tmp_path, capfd):
    source = trained("sparsity=sste")
    argv = ["finetune", str(source), *QUICK, *glue(tmp_path), f"runs_dir='{tmp_path / 'tuned'}'"]
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert not err
    assert "stored weights" in out and "newly initialized: score.weight" in out
    assert "left out: lm_head" in out and "validation f1" in out
    (directory,) = (tmp_path / "tuned" / "glue_mrpc").iterdir()
    lines = [line for line in metrics(directory) if line.get("split") == "validation"]
    assert [line["step"] for line in lines] == [30]  # 5 epochs of 24 examples in batches of 4
    assert lines[-1]["score"] == pytest.approx((lines[-1]["accuracy"] + lines[-1]["f1"]) / 2)
    assert (directory / "report.md").is_file()
    assert main(argv) == 0 and "is finished" in capfd.readouterr().out


@pytest.mark.parametrize(("model", "task"), [("bert_nano", "labels"), ("bert_geglu", "spans")])
def test_bert_fine_tunes_on_labels_and_spans(trained, tmp_path, model, task):
    small = ("precision=fp32", "schedule=constant", "data.tokenizer=wordpiece")
    sizes = ("data.vocab_size=1200", "model.vocab_size=1300", "steps=2")
    source = trained(f"model={model}", *small, *sizes)
    words = glue(tmp_path) if task == "labels" else squad(tmp_path)
    directory, out, lines = train(source, *words, "steps=3", f"runs_dir='{tmp_path / 'tuned'}'")
    new = "classifier.weight, pooler" if task == "labels" else "qa_outputs.weight"
    assert "stored weights" in out and new.split(",")[0] in out and "left out: " in out
    assert (directory / "tokenizer.json").is_file()
    final = next(line for line in reversed(lines) if line.get("split") == "validation")
    assert final["f1"] >= 0 and math.isfinite(final["loss"])


def test_resume_without_the_source_is_bit_exact(tiny, tmp_path, stop_after):
    source = tiny.train().directory
    words = [*glue(tmp_path), "epochs=1", "checkpoint.every=2"]
    whole, _, _ = train(source, *words, f"runs_dir='{tmp_path / 'a'}'")
    run = resolve_steps(load(source, *words, f"runs_dir='{tmp_path / 'b'}'"))
    stop_after(3)
    assert trainer.train(run) == 143
    stop_after(-1)
    for file in source.glob("checkpoints/*/state.json"):
        file.unlink()
    assert trainer.train(run) == 0
    other = freeze.run_directory(run)
    assert metrics(whole) == metrics(other)
    assert_equal_bits(final_state(whole), final_state(other))


def logits(model: torch.nn.Module, task: object) -> torch.Tensor:
    tokens = torch.arange(16)[None] + 40
    with torch.no_grad():
        return task.recipe.encode(model.eval(), tokens)


@pytest.mark.parametrize(
    ("before", "after", "exact"),
    [
        *((name, None, True) for name in ("sste", "slope", "mdgf")),
        *(
            pytest.param(name, None, True, marks=pytest.mark.slow)
            for name in ("tsrste", "sdgp", "bimask")
        ),
        ("sste", "ste", True),  # S-STE Table 7, both ways
        pytest.param("ste", "sste", True, marks=pytest.mark.slow),
        ("sste", "dense", True),
        ("dense", "sste", False),  # a dense function is not sparse
    ],
)
def test_function_at_step_0_equals_the_source(tiny, trained, tmp_path, before, after, exact):
    source = trained(f"sparsity={before}")
    run = tiny.load(f"sparsity={before}")
    task = build_task(run)
    model = assembly.build_model(task, torch.device("cpu"))
    model.load_state_dict(densify(assembly.evaluated_model(weights.find(source))[1]).state_dict())
    chosen = [] if after is None else [f"sparsity={after}"]
    t = build(source, *glue(tmp_path), *chosen)
    expected, found = logits(model, task), logits(t.model, t.task)
    assert torch.allclose(found, expected, atol=1e-5) is exact


def test_frozen_scale_comes_with_the_stored_weights(trained, tmp_path):
    source = trained("sparsity=sste")
    stored = weights.find(source).checkpoint.part("model")
    name = "transformer.h.0.mlp.c_fc"
    t = build(source, *glue(tmp_path))
    own = t.model.state_dict()
    assert torch.equal(own[f"{name}.weight"], stored[f"{name}.weight"])
    assert torch.equal(own[f"{name}.sparsity.beta"], stored[f"{name}.sparsity.beta"])
    # negative control: recomputed scales differ
    t = build(source, *glue(tmp_path), "init.weights=projected")
    own = t.model.state_dict()
    assert not torch.equal(own[f"{name}.sparsity.beta"], stored[f"{name}.sparsity.beta"])
    assert not torch.equal(own[f"{name}.weight"], stored[f"{name}.weight"])


def test_defaults_follow_the_source(trained, tmp_path):
    words = ("precision=fp8_sim", "precision.dtype=fp16", "precision.init_scale=2048")
    words = (*words, "sparsity.gamma=0.25", "sparsity.window.start=0.2")
    source = trained("sparsity=sste", *words)
    run = load(source, *glue(tmp_path))
    assert (run.precision.name, run.precision.init_scale) == ("fp16", 2048)
    assert (run.sparsity.gamma, run.sparsity.mvue) == (0.25, "none")
    assert run.sparsity.window.start == 0.0
    assert (run.optim.lr, run.optim.weight_decay, run.epochs) == (5e-6, 0.0, 5.0)
    assert (run.batch.size, run.task.max_length, run.model.n_embd) == (4, 128, 32)
    run = load(source, *glue(tmp_path), "sparsity.mvue=gradient", "precision=bf16")
    assert (run.sparsity.mvue, run.precision.name) == ("gradient", "bf16")
    run = load(source, *glue(tmp_path), "sparsity=srste")
    assert (run.sparsity.name, run.sparsity.n, run.sparsity.targets) == ("srste", 2, "ffn")


def test_tokenizer_is_copied_to_the_run(tiny, trained, tmp_path, small_corpus):
    source = trained("data.tokenizer=bpe", "data.vocab_size=300", "model.vocab_size=304")
    assert (source / "tokenizer.json").is_file()
    directory, _, _ = train(source, *glue(tmp_path), "epochs=1", f"runs_dir='{tmp_path}'")
    assert (directory / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    # a fine-tuned run is a source again, and keeps its head
    _, out, _ = train(directory, *glue(tmp_path), "steps=1", "seed=1", f"runs_dir='{tmp_path}'")
    assert "newly initialized" not in out
    text = ["data=text_files", f"data.files=['{small_corpus}/*']"]
    for words in (text, []):  # other text, or that of the run
        run = load(source, "task=causal_lm", *words)
        assert run.data.tokenizer.endswith("tokenizer.json")
        assert run.data.vocab_size == 300 and run.task.sequence_length == 16
    assert run.data == replace(tiny.load().data, tokenizer=run.data.tokenizer, vocab_size=300)


def test_language_model_fine_tunes_on_other_text(trained, tmp_path, small_corpus):
    source = trained()
    words = ["task=causal_lm", "data=text_files", f"data.files=['{small_corpus}/0*.txt']"]
    words += ["steps=2", "eval.every=1", "eval.batches=1", f"runs_dir='{tmp_path}'"]
    _, out, lines = train(source, *words)
    assert "newly initialized" not in out
    last = [line for line in metrics(source) if "split" in line][-1]
    assert lines[0]["split"] == "validation" and lines[0]["step"] == 0
    assert lines[0]["loss"] == pytest.approx(last["loss"], abs=0.2)  # 5.5 without the weights


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "task=… is missing: choose from glue/cola"),
        (["task=glue/mprc"], "did you mean 'glue/mrpc'?"),
        (["task=glue/mrpc", "model=gpt2_nano"], "model comes from"),
        (["task=glue/mrpc", "init.path=other"], "init.path is the checkpoint, the first argument"),
        (["task=glue/mrpc", "model.path=other"], "model.path is the checkpoint"),
        (["task=glue/mnli", "task.metrics=[f1]"], "f1"),
        (["task=squad"], "task.max_length must be ≤ model.n_positions (256)"),
        (["task=squad", "task.max_length=64"], "task.max_length leaves no room"),
        (["task=glue/mrpc", "data=python_qa"], "data python_qa has questions"),
        (["task=glue/mrpc", "init.weights=all"], "init.weights"),
    ],
)
def test_bad_overrides_are_refused(trained, words, message):
    with pytest.raises(ConfigError) as caught:
        build(trained(), *words)
    assert message in str(caught.value)


def test_unusable_checkpoints_are_refused(tiny, trained, tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoints"):
        load(tmp_path, "task=glue/mrpc")
    with pytest.raises(CheckpointError, match=r"transformer.wte.weight"):
        build(trained(), *glue(tmp_path), "model.n_embd=16")
    broken = next(tiny.train("steps=2").directory.glob("checkpoints/*"))
    (broken / "state.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is damaged"):
        load(broken, "task=glue/mrpc")
