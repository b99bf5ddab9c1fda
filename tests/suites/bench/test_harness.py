"""Command line, timer and results of benchmarks."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

import harness
from harness import Case, difference
from sparsepretrain.kernels.timing import Series


@pytest.fixture
def bench(tmp_path):
    """``bench(works, *words)`` returns the exit code and the cases of the results file."""

    def run(works, *words):
        path = tmp_path / "out" / "a.json"
        words = ["--out", str(path), *words]
        try:
            code = harness.main("a", lambda options: works, words, methods=True)
        except KeyboardInterrupt as error:
            code = type(error)
        found = json.loads(path.read_text())
        assert found["script"] == "a" and found["environment"]["packages"]["torch"]
        assert found["environment"]["command"].startswith("python benchmarks/a.py --out ")
        return code, found["cases"]

    return run


def one(name, **words):
    return lambda: [Case(name=name, **words)]


def test_works_are_interleaved_in_rotating_order():
    seen = []
    works = {name: lambda name=name: seen.append(name) for name in "abc"}
    series = harness.interleave(works, 3, warmup=1)
    assert {name: len(each.us) for name, each in series.items()} == dict.fromkeys("abc", 3)
    assert sorted(seen) == sorted("abc" * 4)
    assert len({tuple(seen[i : i + 3]) for i in range(0, 12, 3)}) == 3


def test_a_ratio_is_the_median_over_rounds():
    over, under = Series(us=[2.0, 9.0, 3.0], mode=""), Series(us=[1.0, 3.0, 3.0], mode="")
    case = harness.ratio("x", over, under, at_most=1.5)
    assert (case.value, case.unit, case.ok) == (2.0, "×", False)
    assert case.detail["quartiles"] == [1.0, 3.0] and case.detail["rounds"] == 3
    assert "missed" in harness.describe(case.as_dict())


def test_measured_cases_survive_a_killed_run(bench):
    def killed():
        raise KeyboardInterrupt

    code, cases = bench({"a": one("a", value=1.0), "b": killed, "c": one("c", value=1.0)})
    assert code is KeyboardInterrupt and [case["name"] for case in cases] == ["a"]


def test_failed_work_does_not_stop_the_others(bench):
    def fails():
        raise RuntimeError("no such\nmatmul")

    def too_large():
        raise torch.OutOfMemoryError

    code, cases = bench({"a": fails, "b": too_large, "c": one("c", value=1.0)})
    assert code == 1 and [case["ok"] for case in cases] == [False, None, None]
    assert [case["status"].partition(":")[0] for case in cases] == ["failed", "skipped", "ok"]


def test_the_exit_code_judges_limits_unless_quick(bench):
    missed = {"a": one("a", value=0.8, at_least=0.9)}
    assert bench(missed)[0] == 1
    assert bench(missed, "--quick")[0] == 0
    assert bench({"a": one("a", value=0.9, at_least=0.9)})[0] == 0
    assert bench({"a": one("a", status="wrong: another result")}, "--quick")[0] == 1


def test_no_case_starts_after_the_budget(bench, monkeypatch):
    _, cases = bench({"ab": one("ab"), "b": one("b")}, "--only", "a*")
    assert [case["name"] for case in cases] == ["ab"]
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr(harness, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    code, cases = bench({name: one(name) for name in "abcde"}, "--budget", "25")
    assert code == 0 and [case["name"] for case in cases] == ["a", "b", "the last 3 of 5"]


def test_difference():
    x = torch.tensor([1.0, -4.0, float("nan"), float("inf")])
    assert difference(x, x.clone()) == 0
    assert difference(x + torch.tensor([1.0, 0, 0, 0]), x) == 0.25
    assert difference(x.nan_to_num(0.0), x) == float("inf")
    assert difference(-x, x) == float("inf")  # the sign of an infinity
    assert difference(x.half(), x) == float("inf")
    assert difference(x[:3], x) == float("inf")
    mask = torch.tensor([True, False, True, True])
    assert difference(mask, ~mask) == 1.0
    assert difference([mask, (x, 3 * mask)], [mask, (x, 3 * mask)]) == 0
    assert difference(torch.empty(0), torch.empty(0)) == 0


def test_nvidia_smi_is_asked_about_the_gpu_of_torch(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.log"\necho "580.1, 1980"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    properties = SimpleNamespace(uuid="6c3d-b3")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = harness.gpu()
    assert found["driver_version"] == "580.1" and found["clocks.sm"] == "1980"
    (asked,) = (tmp_path / "nvidia-smi.log").read_text().splitlines()
    assert asked.endswith("--id=GPU-6c3d-b3")
