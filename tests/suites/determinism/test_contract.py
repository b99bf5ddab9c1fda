"""The contract of docs/determinism.md: cases, gates, results; ``make determinism`` runs it."""

import contextlib
import importlib.util
import itertools
import json
import sys
from unittest.mock import Mock

import pytest
import torch

from sparsepretrain import registry
from support import ROOT, run_worlds
from support.tiny_runs import final_state

spec = importlib.util.spec_from_file_location("determinism", ROOT / "scripts" / "determinism.py")
determinism = sys.modules["determinism"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(determinism)
Case = determinism.Case
BITS = dict.fromkeys(determinism.PARTS, "0" * 16)


def test_every_method_has_each_kind_of_ranks_in_fp32():
    own = set(determinism.contract())
    for method in registry.built_in("method"):
        assert {Case(method, "fp32", kind, "none") for kind in ("single", "ddp", "fsdp")} <= own


def test_every_pair_of_values_occurs():
    axes = list(determinism.AXES.values())
    wanted = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a in axes[i]
        for b in axes[j]
    }
    refused = {((1, a), (2, b)) for a, b in determinism.REFUSED}
    cases = determinism.contract()
    trained = [case for case in cases if not determinism.is_refused(case)]
    assert {pair for case in trained for pair in determinism.pairs(case)} == wanted - refused
    assert {(case.precision, case.parallel) for case in cases} >= set(determinism.REFUSED)
    assert len(cases) == len(set(cases)) < 125, "a case that adds no pair costs half a minute"


def test_a_flipped_bit_changes_its_hash_alone(tiny, monkeypatch):
    run = tiny.train("steps=2").directory
    right, state = determinism.digest(run), final_state(run)
    name = next(name for name in state["model"] if name.endswith("c_fc.weight"))
    state["model"][name].view(torch.int32)[0, 0] ^= 1
    monkeypatch.setattr(determinism, "final_state", lambda directory: state)
    found = determinism.repeated(right, determinism.digest(run))
    assert found == {"passed": False, "differ": ["weights"]}
    assert determinism.repeated(right, right)["passed"]


def test_losses_within_and_beyond_the_bound():
    case, losses = Case("ste"), [5.0, 4.0]
    bound = determinism.bound_of(case, losses)
    assert bound == 2e-6
    assert determinism.near(losses, [5.0, 4.0 + 1e-6], bound)["passed"]
    assert not determinism.near(losses, [5.0, 4.0 + 3e-6], bound)["passed"]
    assert not determinism.near(losses, [5.0], bound)["passed"]
    assert determinism.bound_of(Case("ste", "bf16"), losses) == 5.0 / 256 / 96**0.5


def test_golden_bits_are_compared_on_their_cpu_and_losses_elsewhere():
    stored = {"commit": "c", "losses": [5.0], "bits": {"here": BITS}}
    other = {**BITS, "weights": "1" * 16}
    assert determinism.golden(Case("ste"), BITS, [5.0], stored, "here")["passed"]
    assert not determinism.golden(Case("ste"), other, [5.0], stored, "here")["passed"]
    assert determinism.golden(Case("ste"), other, [5.0], stored, "elsewhere")["passed"]
    assert not determinism.golden(Case("ste"), other, [5.1], stored, "elsewhere")["passed"]


@pytest.mark.parametrize("drift", [1e-6, 1e-3])
def test_golden_losses_on_another_cpu_are_kept_beside_the_gates_of_the_first(
    stub, monkeypatch, drift
):
    name = "ste fp32 single none"
    assert determinism.main([name]) == 0
    before = json.loads(determinism.RESULTS.read_text())["cases"][name]
    other = {**BITS, "weights": "1" * 16}
    monkeypatch.setattr(determinism, "Runs", lambda *_: Mock())
    monkeypatch.setattr(determinism, "digest", lambda directory: other)
    monkeypatch.setattr(determinism, "losses_of", lambda directory: [5.0 + drift])
    monkeypatch.setattr(determinism, "code_version", lambda: "ba9876543210")
    assert determinism.main(["--golden", name]) == 1, "other bits on the same CPU"
    monkeypatch.setattr(determinism, "hardware_key", lambda device: "another")
    determinism.RESULTS.write_text(
        json.dumps(json.loads(determinism.RESULTS.read_text()) | {"cases": {name: before}})
    )
    assert determinism.main(["--golden", name]) == int(drift > 2e-6)
    after = json.loads(determinism.RESULTS.read_text())["cases"][name]
    gate = after["gates"].pop("another CPU")
    assert (gate["cpu"], gate["commit"]) == ("another", "ba9876543210")
    assert gate["drift"] == pytest.approx(drift, rel=1e-6)
    assert after == before | {"passed": drift < 2e-6}


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Judge cases without training; returns the names of judged cases, and which one ends it."""
    judged, failure = [], {}

    def check(case, runs, stored, cpu):
        judged.append(case.name)
        if case.name == failure.get("name"):
            raise KeyboardInterrupt
        gate = {"passed": True, "differ": []}
        return {
            "passed": True,
            "gates": {"repeat": gate},
            "seconds": 0.0,
            "own": {"bits": BITS, "losses": [5.0]},
        }

    warm = lambda scratch, older: contextlib.nullcontext({})  # noqa: E731
    monkeypatch.setattr(determinism, "warm_parents", warm)
    monkeypatch.setattr(determinism, "check", check)
    monkeypatch.setattr(determinism, "code_version", lambda: "0123456789ab")
    monkeypatch.setattr(determinism, "RESULTS", tmp_path / "determinism.json")
    monkeypatch.setattr(determinism, "PROGRAMS", {})
    monkeypatch.setattr(determinism, "MUTANTS", ())
    return judged, failure


def test_an_interrupted_run_does_what_is_left(stub):
    judged, failure = stub
    failure["name"] = "sste fp32 ddp none"
    with pytest.raises(KeyboardInterrupt):
        determinism.main([])
    kept = set(json.loads(determinism.RESULTS.read_text())["cases"])
    assert kept and failure["name"] not in kept
    failure.clear()
    judged.clear()
    assert determinism.main([]) == 0
    assert set(judged) == {case.name for case in determinism.contract()} - kept
    judged.clear()
    assert determinism.main([]) == 0 and not judged
    assert determinism.main(["--again", "sste fp32 *"]) == 0
    assert judged and all(name.startswith("sste fp32 ") for name in judged)


def test_results_of_other_code_are_checked_again(stub, monkeypatch):
    judged, _ = stub
    determinism.main(["ste fp32 single none"])
    for version in ("ba9876543210", "0123456789ab-dirty"):
        monkeypatch.setattr(determinism, "code_version", lambda version=version: version)
        judged.clear()
        determinism.main(["ste fp32 single none"])
        assert judged == ["ste fp32 single none"]


def test_a_failed_gate_and_an_unnoticed_mutant_are_failures():
    for part, entry in (("cases", {"passed": False}), ("mutants", {"noticed": False})):
        content = {"cases": {}, part: {"a": entry}}
        assert determinism.report(content) == 1
    assert determinism.report({"cases": {"a": {"refused": "no"}}}) == 0


def test_every_gate_has_a_mutant():
    gates = {mutant.gate for mutant in determinism.MUTANTS}
    assert gates == {"repeat", "golden", "resume", "resume elsewhere"}
    assert {mutant.name for mutant in determinism.MUTANTS} == set(run_worlds.MUTANTS)


@pytest.mark.slow
def test_experts_repeat_their_bits_with_two_threads(tiny):
    """A token that four experts see gets four gradients: threads add them in varying order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    words = ("model=moe_nano", "model.experts_per_token=4", "steps=3", "deterministic=true")
    try:
        runs = [tiny.train(*words, f"runs_dir='{tiny.root / name}'").directory for name in "ab"]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert determinism.digest(runs[0]) == determinism.digest(runs[1])


def test_the_committed_results_are_those_of_the_contract():
    found = json.loads(determinism.RESULTS.read_text(encoding="utf-8"))
    cases = {case.name for case in determinism.contract()}
    assert set(found["cases"]) == cases == set(found["contract"]["cases"])
    assert set(found["mutants"]) == {mutant.name for mutant in determinism.MUTANTS}
    assert found["operators"] and found["costs"]
    assert determinism.report(found) == 0
