"""``steps``, ``agree`` and ``curves`` on the CPU."""

import importlib
import json

import pytest
import torch

import agree
import curves
import steps
from harness import Options, attempt

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="rehearses without a GPU")


@pytest.fixture
def table(tmp_path, capsys):
    """``table(*words)``: exit code, results file and output of a quick run."""

    def table(*words):
        out = tmp_path / "steps.json"
        code = steps.main(["--quick", "--out", str(out), *words])
        return code, json.loads(out.read_text()), capsys.readouterr().out

    return table


def test_variants_are_timed_in_turns_against_plain_and_dense(table):
    code, found, text = table("--variants", "plain,dense,sste+mvue=none", "--profile", "dense")
    cases = {case["name"]: case for case in found["cases"]}
    assert code == 0 and list(cases) == ["plain", "dense", "sste+mvue=none"]
    for case in cases.values():
        detail = case["detail"]
        assert case["value"] > 0 and detail["rounds"] == 2
        assert detail["ms_per_micro_batch"] == pytest.approx(case["value"] / 4)
        assert detail["tokens_per_second"] > 0 and 0 < detail["host_share"] <= 1
    assert cases["sste+mvue=none"]["detail"]["over_dense"] > 0
    assert "over_dense" not in cases["dense"]["detail"]
    assert found["environment"]["commit"] and found["recipe"]["batch.micro"] == 2
    assert found["profiles"]["dense"][0]["us"] > 0
    assert "× dense" in text
    # random tokens of the whole vocabulary: the first loss is that of guessing
    vocabulary = 256
    expected = torch.tensor(float(vocabulary)).log().item()
    assert cases["dense"]["detail"]["first_loss"] == pytest.approx(expected, abs=0.5)


def test_a_variant_that_fails_is_a_row(table):
    code, found, text = table("--variants", "dense,sste+gama=1,nope,ste")
    status = {case["name"]: case["status"] for case in found["cases"]}
    assert code == 1 and status["dense"] == status["ste"] == "ok"
    assert status["sste+gama=1"].startswith("failed: ConfigError") and "gamma" in text
    assert status["nope"].startswith("failed")


def test_results_of_finished_variants_survive_a_crash(table, tmp_path, monkeypatch):
    build = steps.Bench.build

    def dies(self, label):
        if label == "ste":
            raise KeyboardInterrupt
        return build(self, label)

    monkeypatch.setattr(steps.Bench, "build", dies)
    with pytest.raises(KeyboardInterrupt):
        table("--variants", "dense,ste")
    cases = json.loads((tmp_path / "steps.json").read_text())["cases"]
    assert [case["name"] for case in cases] == ["dense"] and cases[0]["value"] > 0


def test_a_recipe_that_does_not_exist_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(steps, "TINY", ("batch.mikro=2",))
    assert steps.main(["--variants", "dense"]) == 2
    assert "batch.mikro" in capsys.readouterr().err


def test_variants_beyond_the_budget_are_named(table):
    _, found, _ = table("--variants", "dense,ste", "--budget", "1e-3")
    assert all(case["status"].startswith("skipped") for case in found["cases"])


def test_every_method_is_a_variant_with_auto_where_it_has_a_packable_operand():
    variants = steps.every_variant()
    names = {label.partition(":")[0].partition("+")[0] for label in variants}
    methods = set(importlib.import_module("sparsepretrain.registry").names("method"))
    assert names == methods | {"plain"} and variants[:2] == ["plain", "dense"]
    auto = {label.partition("+")[0].partition(":")[0] for label in variants if ":auto" in label}
    assert {"sste", "tsrste", "slope", "ste", "sdgp"} <= auto and "dense" not in auto


@pytest.mark.slow
def test_all_variants_take_steps(table):
    code, found, _ = table()
    assert code == 0 and all(case["status"] == "ok" for case in found["cases"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama_nano", "bert_nano", "transformer_nano", "vit_nano"])
def test_recipes_of_every_task_are_timed(table, monkeypatch, model):
    run = steps.Bench.words
    monkeypatch.setattr(steps, "TINY", ())
    monkeypatch.setattr(
        steps.Bench, "words", lambda self, more: [f"model={model}", *run(self, more)[1:]]
    )
    code, found, _ = table("--variants", "plain,dense,sste", "--micro-batches", "1")
    assert code == 0
    plain = found["cases"][0]["status"]
    assert plain == "ok" if model == "llama_nano" else plain.startswith("skipped: plain PyTorch")


def test_losses_are_compared_with_the_cpu(monkeypatch):
    name, work = next(iter(agree.works(Options(quick=True)).items()))
    (case,) = attempt(name, work)
    assert case.ok and case.value == 0 and len(case.detail["losses"]) == 2
    agree.on_cpu.cache_clear()
    losses, calls = agree.losses, []

    def shifted(*words):
        calls.append(words)
        factor = 1.0 if len(calls) == 1 else 1.01
        return [factor * loss for loss in losses(*words)]

    monkeypatch.setattr(agree, "losses", shifted)
    (case,) = attempt(name, work)
    assert case.ok is False and case.value == pytest.approx(0.01, rel=1e-3)
    agree.on_cpu.cache_clear()


def test_six_methods_are_compared_in_both_precisions():
    names = list(agree.works(Options()))
    assert len(agree.METHODS) == 6
    assert {name.partition(",")[0] for name in names} == set(agree.METHODS)
    assert {"fp32", "bf16"} == {name.split(", ")[1] for name in names}


def test_curves_are_compared_with_earlier_ones(tmp_path, capsys):
    for method in ("dense", "sste"):
        words = ["--methods", method, "--out", str(tmp_path / f"train-{method}.json")]
        assert curves.main([*words, "--after", str(tmp_path)]) == 0
    (case,) = json.loads((tmp_path / "train-sste.json").read_text())["cases"]
    assert case["detail"]["steps"] == curves.TINY_STEPS and case["value"] > 0
    assert len(case["detail"]["training"]) == curves.TINY_STEPS
    text = capsys.readouterr().out.rpartition("validation loss at step")[2]
    assert "dense" in text and "sste" in text and "tokens/s" in text


def test_a_run_that_stopped_early_is_not_a_result():
    lines = [
        {"step": step, "time": 10.0 + step, "tokens": 64 * step, "loss": 5.0} for step in (1, 2)
    ]
    case = curves.case_of("sste", lines, 800, 0.0, code=143)
    assert case.status.startswith("skipped: 2 of 800 steps") and case.value is None
    assert case.detail["training"][-1] == [2, 1.0, 5.0]
