"""The verb ``eval``: the same numbers as in training, averages, other data, and what it refuses."""

import io
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from sparsepretrain.cli import main
from sparsepretrain.console import Console
from sparsepretrain.data.preparation import load
from sparsepretrain.errors import CheckpointError, DataError, DivergedError
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.checkpoint import Checkpoint
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.weights import WeightSource
from sparsepretrain.training import derive, trainer, validation
from sparsepretrain.training.evaluation import evaluate_checkpoint
from support.tiny_runs import Tiny, final_state, metrics


def evaluate(path, *overrides, **settings):
    """Return the result line, with what was printed as its ``output``."""
    out = io.StringIO()
    result = evaluate_checkpoint(str(path), overrides, console=Console(out), **settings)
    return result | {"output": out.getvalue()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_corpus, prepared_cache):
    """One run for all that only read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(prepared_cache))
        tiny = Tiny(tmp_path_factory.mktemp("trained"), small_corpus)
        return tiny.train("checkpoint.keep_last=3", "optim.lr=0.01").directory


def whole_split(t, split="validation"):
    return validation.evaluate(t, split, None, final=True)


@pytest.mark.parametrize("method", ["sste", "asp"])
def test_loss_equals_that_of_the_trained_model(tiny, monkeypatch, method):
    trained = []
    original = trainer.build_session
    keep = lambda *args, **kw: trained.append(original(*args, **kw)) or trained[-1]  # noqa: E731
    monkeypatch.setattr(trainer, "build_session", keep)
    run = tiny.train(f"sparsity={method}").directory
    expected = whole_split(trained[0])
    result = evaluate(run)
    assert result["metrics"] == expected
    assert expected["perplexity"] == math.exp(expected["loss"])
    assert (result["step"], result["split"]) == (6, "validation")
    found = [result[k] for k in ("weights", "pattern", "pattern_holds", "zeros", "why_dense")]
    assert found == ["sparse", "2:4", True, 0.5, None]
    assert result["samples"] == trained[0].task.samples("validation") > 50
    assert f"{expected['loss']:.4f}" in result["output"]
    assert "2:4 in all" in result["output"]


def test_a_line_per_evaluation_is_appended(tiny, tmp_path):
    run = tiny.train().directory
    record = (run / "metrics.jsonl").read_bytes()
    results = [evaluate(run), evaluate(run, split="train"), evaluate(run, "batch.micro=7")]
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    for result, line in zip(results, lines, strict=True):
        assert line == {k: v for k, v in result.items() if k != "output"}
    assert [line["split"] for line in lines] == ["validation", "train", "validation"]
    assert lines[2]["overrides"] == ["batch.micro=7"]
    # micro-batches that do not divide the split change nothing but the order of a sum
    assert lines[2]["metrics"]["loss"] == pytest.approx(lines[0]["metrics"]["loss"], rel=1e-6)
    assert {"torch", "numpy"} <= lines[0]["environment"]["packages"].keys()
    evaluate(run, out=tmp_path / "there" / "results.jsonl")
    assert len((run / "eval.jsonl").read_text().splitlines()) == 3
    assert json.loads((tmp_path / "there" / "results.jsonl").read_text())["step"] == 6
    assert (run / "metrics.jsonl").read_bytes() == record, "evaluating leaves the record alone"


@pytest.mark.parametrize(
    "words",
    [
        ("parallel=ddp", "parallel.nproc=2", "batch.micro=2"),
        ("parallel=ddp", "parallel.sync_batchnorm=true"),  # refused on a CPU
        ("parallel=fsdp", "parallel.nproc=2", "parallel.replicas=2", "batch.micro=2"),
        ("parallel.reduction=tree", "batch.micro=2"),
    ],
)
def test_an_evaluation_has_one_process_however_the_run_was_trained(tiny, words):
    config = tiny.load(*words).plain
    for more in ((), ("batch.micro=7",), ("parallel=single",)):
        run = derive.evaluated(
            WeightSource(Path("run"), config=config), ["parallel.device=cpu", *more], ()
        )
        assert (run.parallel.name, run.parallel.device, run.nproc) == ("single", "cpu", 1)
        assert run.batch.micro == (7 if "batch.micro=7" in more else config["batch"]["micro"])


def test_long_evaluation_prints_progress(trained, monkeypatch):
    monkeypatch.setattr(validation, "SILENT_SECONDS", math.inf)
    assert "validation: " not in evaluate(trained, "batch.micro=7")["output"]
    monkeypatch.setattr(validation, "SILENT_SECONDS", 0.0)
    result = evaluate(trained, "batch.micro=7")
    shown = [line for line in result["output"].splitlines() if line.startswith("validation: ")]
    assert shown[0].startswith(f"validation: 7 of {result['samples']} samples")
    assert shown[-1].startswith(f"validation: {result['samples']} of {result['samples']} samples")


def test_nan_loss_ends_with_exit_code_5(trained, monkeypatch, tmp_path):
    diverged = {"loss": math.nan, "accuracy": 0.5}
    monkeypatch.setattr(validation, "evaluate", lambda *_, **__: diverged)
    with pytest.raises(DivergedError, match=r"loss is nan") as caught:
        evaluate(trained, out=tmp_path / "eval.jsonl")
    assert caught.value.exit_code == 5 and not (tmp_path / "eval.jsonl").exists()


def test_earlier_checkpoint_is_evaluated(tiny, trained):
    early, late = evaluate(trained / "checkpoints/step_00000004"), evaluate(trained)
    assert early["step"] == 4 and early["metrics"] != late["metrics"]
    assert (trained / "eval.jsonl").is_file()


@pytest.mark.parametrize(
    "method",
    [
        "sste",
        "slope",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("srste", "asp", "tsrste")),
    ],
)
def test_average_projects_the_mean_of_the_stored_weights(tiny, method):
    words = [f"sparsity={method}", "checkpoint.keep_last=3", "optim.lr=0.01"]
    words += {"asp": ["sparsity.at=0.8"], "slope": ["sparsity.adapters.rank=4"]}.get(method, [])
    run = tiny.train(*words).directory
    states = [Checkpoint(run / f"checkpoints/step_0000000{s}").parts() for s in (2, 4, 6)]
    t = tiny.build(*words)
    t.model.load_state_dict(states[-1]["model"])
    t.sparsifier.load_state_dict(states[-1]["sparsifier"])
    with torch.no_grad():
        for name, parameter in t.model.named_parameters():
            parameter.copy_(torch.stack([s["model"][name].double() for s in states]).mean(0))
    t.sparsifier.refresh()
    result = evaluate(run, average=3)
    assert result["metrics"] == whole_split(t)
    assert result["metrics"] != evaluate(run)["metrics"]
    assert (result["average"], result["averaged_steps"]) == (3, [2, 4, 6])
    assert "mean of the weights of steps 2, 4, 6" in result["output"]
    assert result["pattern"] == (None if method == "tsrste" else "2:4")
    middle = evaluate(run / "checkpoints/step_00000004", average=2)
    assert (middle["step"], middle["averaged_steps"]) == (4, [2, 4])


def test_the_record_tells_averages_apart(trained):
    one, two = evaluate(trained), evaluate(trained, average=2)
    assert (one["average"], one["averaged_steps"]) == (1, [])
    run = RunDirectory(trained)
    assert run.evaluation("validation")["metrics"] == one["metrics"]
    assert run.evaluation("validation", average=2)["metrics"] == two["metrics"]
    assert run.evaluation("validation", average=3) is None


def test_damaged_checkpoints_are_left_out_of_an_average(trained, tmp_path):
    copy = tmp_path / trained.name
    shutil.copytree(trained, copy)
    (copy / "checkpoints/step_00000004/shard-00000-model.safetensors").write_bytes(b"torn")
    result = evaluate(copy, average=2)
    assert result["averaged_steps"] == [2, 6]
    assert "step_00000004 is damaged" in result["output"]
    with pytest.raises(CheckpointError, match="expected 3 whole checkpoints up to step 6, got 2"):
        evaluate(copy, average=3)


def test_evaluation_checks_each_file_once(trained, monkeypatch):
    read, original = [], checkpoint._sum
    monkeypatch.setattr(checkpoint, "_sum", lambda path: read.append(path.name) or original(path))
    evaluate(trained)
    assert sorted(read) == ["config.yaml", "shard-00000-model.safetensors", "state.json"]
    read.clear()
    evaluate(trained, average=3)
    assert read.count("shard-00000-model.safetensors") == 3 and len(read) == 9


def test_dense_tail_is_reported_as_dense(tiny):
    run = tiny.train("sparsity=tsrste", "sparsity.refresh=2", "sparsity.dense_tail=0.34").directory
    early, late = evaluate(run / "checkpoints/step_00000004"), evaluate(run)
    assert (early["weights"], late["weights"], late["pattern_holds"]) == ("dense", "dense", False)
    assert late["why_dense"] == "since step 4 (dense_tail)"


def test_a_run_with_ema_is_evaluated_without_and_with_it(tiny):
    run = tiny.train("ema=0.9", "checkpoint.keep_last=2").directory
    last = [line for line in metrics(run) if "split" in line][-1]
    found = evaluate(run)["metrics"]
    t = tiny.build("ema=0.9")
    state = final_state(run)
    t.model.load_state_dict(state["model"])
    t.sparsifier.load_state_dict(state["sparsifier"])
    t.ema.load(state["ema"], state["ema_updates"])
    assert found == whole_split(t)
    assert validation.evaluate(t, "validation", 1, final=True)["loss"] == last["loss"]
    t.ema = None
    raw = whole_split(t)
    assert raw == {k: v for k, v in found.items() if not k.startswith("ema_")}
    assert evaluate(run, average=2)["metrics"].keys() == raw.keys()


def test_other_text_is_read_with_the_tokenizer_of_the_run(tiny, tmp_path):
    bpe = ("data.tokenizer=bpe", "data.vocab_size=300", "model.vocab_size=300")
    run = tiny.train(*bpe).directory
    other = tmp_path / "other"
    other.mkdir()
    for i in range(8):
        (other / f"{i}.txt").write_text("entirely different words, and so other merges\n" * 60)
    words = ("data=text_files", f"data.files=['{other}/*.txt']", "data.validation=0.5")
    result = evaluate(run, *words)
    own = load(tiny.load(*bpe).data)
    assert result["fingerprint"] != own.fingerprint
    manifests = own.directory.parent.glob("*/manifest.json")
    prepared = {json.loads(file.read_text())["fingerprint"]: file.parent for file in manifests}
    used = prepared[result["fingerprint"]] / "tokenizer.json"
    assert used.read_bytes() == own.tokenizer_file.read_bytes()
    # the same text, given as other data, is the same text
    again = evaluate(run, f"data.files=['{tiny.corpus}/*.txt','{tiny.corpus}/00.txt']")
    assert again["samples"] > 0


def test_byte_model_reads_other_text_as_bytes(tiny, trained, tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 30)
    files = f"data.files=['{tmp_path}/a.txt']"
    result = evaluate(trained, "data=text_files", files, split="train")
    assert result["data"] == "text_files" and result["samples"] > 5


def test_changed_data_or_tokenizer_is_reported(tiny, tmp_path, monkeypatch):
    run = tiny.train().directory
    bpe = tiny.train("data.tokenizer=bpe", "data.vocab_size=300", "model.vocab_size=300").directory
    part = Checkpoint.part

    def other(self, name):
        return "0" * 16 if name == "fingerprint" else part(self, name)

    monkeypatch.setattr(Checkpoint, "part", other)
    assert "warning: the data" in evaluate(run)["output"]
    with pytest.raises(DataError, match="token ids"):
        evaluate(bpe)
    other_text = ("data=text_files", f"data.files=['{tiny.corpus}/01.txt']")
    assert evaluate(bpe, *other_text)["samples"] > 0, "the tokenizer is beside the run"
    (bpe / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"the tokenizer of "):
        evaluate(bpe, *other_text)


@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (4, "no such directory", ["/nowhere/run"]),
        (2, "name one before KEY=VALUE", ["split=test"]),
        (2, "CHECKPOINT", []),
        (2, "split must be one of", ["RUN", "split=tset"]),
        (2, "split must be one of", ["RUN", "split=train"]),
        (2, "eval", ["RUN", "eval.batches=1"]),
        (2, "average", ["RUN", "average=0"]),
        (2, "average", ["RUN", "average=many"]),
        (4, "average=9: expected 9 whole checkpoints up to step 6, got 3", ["RUN", "average=9"]),
        (3, "no test split (it has train, validation)", ["RUN", "split=test"]),
        (2, "sparsity: ", ["RUN", "sparsity=ste"]),
        (2, "model.n_layer: ", ["RUN", "model.n_layer=3"]),
        (2, "data has no option 'wiki'", ["RUN", "data=wiki"]),
        (2, "unknown key 'task.length'", ["RUN", "task.length=3"]),
        (2, "model.n_positions (256)", ["RUN", "task.sequence_length=999"]),
        (2, "data.tokenizer: ", ["RUN", "data.tokenizer=bpe"]),
        (2, "cannot write /proc/none/x", ["RUN", "out=/proc/none/x"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_refusals_are_one_line(tiny, trained, capsys, code, words, arguments):
    written = (trained / "eval.jsonl").exists()
    given = [str(trained) if word == "RUN" else word for word in arguments]
    assert main(["eval", *given]) == code
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and words in err[0], err
    assert (trained / "eval.jsonl").exists() == written


def test_eval_command_prints_metrics(tiny, trained, capsys):
    assert main(["eval", str(trained), "average=2"]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out and "steps 4, 6" in out and str(trained / "eval.jsonl") in out
