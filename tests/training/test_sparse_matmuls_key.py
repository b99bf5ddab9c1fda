"""The key ``sparse_matmuls``: refused where none exist, chosen where they are faster."""

import json

import pytest
import torch

from sparsepretrain import cli, kernels
from sparsepretrain.config import freeze
from sparsepretrain.kernels.cusparselt import packed24 as library
from sparsepretrain.sparsity import coverage
from sparsepretrain.sparsity.matmuls import fp8, policy, sparse24
from sparsepretrain.sparsity.matmuls.three import DENSE
from sparsepretrain.training import loop, trainer
from support.tiny_runs import metrics


@pytest.fixture
def supported(monkeypatch):
    """As on a device whose products are right, with the reference in place of its library."""
    monkeypatch.setattr(policy, "unsupported", lambda device, *_: None)
    monkeypatch.setattr(coverage, "version", lambda: "0.8.1")


def losses(outcome):
    return [line["loss"] for line in metrics(outcome.directory)]


def environment(outcome):
    return json.loads((outcome.directory / "environment.json").read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="such a machine may have them")
def test_backend_on_a_machine_without_sparse_matmuls(tiny, capsys):
    given = tiny.overrides("precision=bf16", "sparse_matmuls=semi_structured")
    assert cli.main(["train", *given]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    reason = "this machine has no CUDA device"
    line = f"sparse_matmuls=auto: all matmuls are emulated: {reason}"
    assert f"sparse_matmuls=semi_structured: {reason}" in told and not (tiny.root / "runs").exists()
    assert cli.main(["train", *given, "--dry-run"]) == 2
    assert cli.main(["train", *given[:-1], "sparse_matmuls=auto", "--dry-run"]) == 0
    assert line in capsys.readouterr().out
    auto = tiny.train("precision=bf16", "sparse_matmuls=auto", "steps=2")
    assert auto.code == 0 and line in auto.output.splitlines()
    assert environment(auto)["sparse_matmuls"] == {"name": "auto", "chosen": line, "matmuls": []}
    assert auto.directory == tiny.directory("precision=bf16", "sparse_matmuls=emulate", "steps=2")


def test_a_run_names_a_slow_version_once_if_its_matmuls_may_be_sparse(tiny, monkeypatch):
    monkeypatch.setattr(trainer, "slow_version", lambda device: "cuSPARSELt 0.8.0 is slower")
    for backend, times in (("auto", 1), ("emulate", 0)):
        words = ("precision=bf16", "steps=1", f"sparse_matmuls={backend}", f"name={backend}")
        assert tiny.train(*words).output.count("note: cuSPARSELt 0.8.0 is slower") == times


def test_precision_without_sparse_matmuls_is_refused(tiny, supported, capsys):
    assert cli.main(["train", *tiny.overrides("sparse_matmuls=semi_structured")]) == 2
    assert "not in float32" in capsys.readouterr().err
    given = tiny.overrides(
        "sparse_matmuls=semi_structured", "precision=fp8_sim", "precision.dtype=bf16"
    )
    assert cli.main(["train", *given]) == 2
    assert "simulated fp8" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["sste", "tsrste"])
def test_sparse_matmuls_train_like_emulated_ones(method, tiny, supported):
    given = ("precision=bf16", f"sparsity={method}", "model.n_embd=64")
    emulated = losses(tiny.train(*given, "name=emulated"))
    outcome = tiny.train(*given, "sparse_matmuls=semi_structured", "name=sparse")
    assert "are sparse, cuSPARSELt 0.8.1" in outcome.output
    assert losses(outcome) == pytest.approx(emulated, rel=1e-2)
    products = environment(outcome)["sparse_matmuls"]["matmuls"]
    assert {(row["runs"], row["tokens"]) for row in products} == {("sparse", 64)}
    # the same run goes on with another backend, and is evaluated without sparse products
    other = tiny.load(*given, "sparse_matmuls=semi_structured")
    assert freeze.identity(tiny.load(*given)) == freeze.identity(other)
    assert cli.main(["eval", str(outcome.directory)]) == 0


def test_algorithms_are_searched_before_training_only(tiny, supported, monkeypatch):
    searched, multiply = [], kernels.matmul_24

    def noted(*given, **flags):
        searched.append(library._searches.get())
        return multiply(*given, **flags)

    monkeypatch.setattr(sparse24, "matmul_24", noted)
    words = ("precision=bf16", "model.n_embd=64", "sparse_matmuls=semi_structured")
    session = tiny.build(*words)
    assert searched and all(searched)
    searched.clear()
    loop.train_step(session)
    assert searched and not any(searched)


@pytest.mark.skipif(torch.cuda.is_available(), reason="such a machine may have them")
def test_fp8_without_a_supported_device_is_refused(tiny, capsys):
    given = tiny.overrides("precision=fp8")
    for more in ([], ["--dry-run"], ["sparse_matmuls=auto"], ["sparsity=dense"]):
        assert cli.main(["train", *given, *more]) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert "precision=fp8: " in told and "precision=fp8_sim" in told
    assert not (tiny.root / "runs").exists()


@pytest.mark.parametrize(
    "backend", [pytest.param("emulate", marks=pytest.mark.slow), "semi_structured"]
)
def test_fp8_trains_like_simulated_fp8(backend, tiny, supported, monkeypatch, capsys):
    recipe = ("precision.recipe=e4m3", "precision.dtype=bf16")
    given = ("sparsity=tsrste", *recipe, "model.n_embd=128")
    simulated = losses(tiny.train("precision=fp8_sim", *given))
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "no_fp8_matmuls", lambda device: "")
        outcome = tiny.train("precision=fp8", *given, f"sparse_matmuls={backend}")
        assert cli.main(["train", *tiny.overrides("precision=fp8", *given), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "fp8 e4m3: fprop e4m3×e4m3, dgrad and wgrad e4m3×e4m3" in shown
    assert "no peak" in shown
    assert losses(outcome) == pytest.approx(simulated, rel=1e-2)
    assert ("are sparse, cuSPARSELt 0.8.1" in outcome.output) == (backend == "semi_structured")
    # on a machine without them it is evaluated, which needs no fp8
    assert cli.main(["eval", str(outcome.directory)]) == 0


def test_choices_of_auto_are_recorded(tiny, supported, monkeypatch):
    def seconds(run):
        run()
        return {"A": 1e-3, "U": 3e-3}.get(run.args[0].packs, 2e-3)

    def medians(works, device):
        return {name: seconds(run) for name, run in works.items()}

    monkeypatch.setattr(policy, "medians", medians)
    given = ("precision=bf16", "sparse_matmuls=auto", "steps=2", "compile=none", "model.n_embd=64")
    outcome = tiny.train(*given)
    assert "sparse_matmuls=auto: 2 of 4 matmuls are sparse, cuSPARSELt 0.8.1" in outcome.output
    written = environment(outcome)
    assert any("slower: 3000 µs, emulated 2000 µs" in line for line in written["coverage"])
    rows = {
        (row["matmul"], row["out_features"]): row for row in written["sparse_matmuls"]["matmuls"]
    }
    assert set(rows) == {(p, n) for p in ("fprop", "wgrad") for n in (64, 256)}
    for (product, _), row in rows.items():
        assert row["runs"] == ("sparse" if product == "fprop" else "emulated")
        assert row["emulated"] == 2e-3


def test_emulate_is_a_silent_default(tiny):
    outcome = tiny.train("steps=2")
    assert "matmuls are" not in outcome.output and "sparse_matmuls" not in environment(outcome)
    session = tiny.build("steps=2")
    matmuls = next(iter(session.sparsifier.layers.values())).operands.matmuls
    assert matmuls.now(torch.float32, True) is DENSE and matmuls.reasons == {}
