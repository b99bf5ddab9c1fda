"""The CPU suite: what it compares is the same work, and what it reports is what was timed."""

import re

import pytest
import torch

from sparsepretrain import kernels, registry
from sparsepretrain.bench import cpu, cpu_kernels, operands, timing
from sparsepretrain.bench.progress import Phase
from sparsepretrain.config import compose, validate


def test_every_method_is_measured():
    overrides = [v.overrides[0] for v in cpu.variants().values()]
    assert {f"sparsity={name}" for name in registry.names("method")} == set(overrides)
    assert next(iter(cpu.variants())) == "dense"


@pytest.mark.parametrize("name", list(cpu.variants()))
def test_variants_compose(name):
    variant = cpu.variants()[name]
    validate(compose([*variant.overrides, "tracker=jsonl"], []))
    if variant.rare is None:
        return
    key, period = variant.rare
    assert getattr(validate(compose(variant.overrides, [])).sparsity, key[9:]) == period
    for every in (1, cpu.NEVER):
        options = validate(compose(variant.searching(every), [])).sparsity
        assert getattr(options, key[9:]) == every


def test_plain_formulations_do_the_same():
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cpu_kernels.topk(w).bool(), kernels.nm_mask(w))
    torch.testing.assert_close(cpu_kernels.soft_by_sort(w), kernels.soft_threshold(w))
    patterns = cpu_kernels._transposable_patterns()
    assert patterns.shape == (16, 90)
    by_product = cpu_kernels._transposable_by_product(w, patterns)
    assert torch.equal(by_product, kernels.transposable_mask(w))
    torch.manual_seed(0)
    mean = sum(cpu_kernels._mvue_by_multinomial(w) for _ in range(3000)) / 3000
    assert (mean - w).abs().mean() < 0.05
    kept = cpu_kernels._mvue_by_multinomial(w) != 0
    assert (kept.view(16, 4, 96).sum(1) == 2).all()


def test_interleaved_reports_each_round():
    seen, done = [], []
    works = {name: lambda name=name: seen.append(name) for name in "abc"}
    seconds = timing.interleaved(works, rounds=3, warmup=1, on_round=done.append)
    assert done == [0, 1, 2, 3]
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 3)
    assert sorted(seen) == sorted("abc" * 4)
    assert len({tuple(seen[i : i + 3]) for i in range(0, 12, 3)}) == 3, "the order rotates"


def test_rare_work_is_shared_out():
    case = timing.ratio("x", [1.2, 1.1, 1.0], [1.0, 1.0, 1.0], at_most=1.12)
    shared = timing.amortised(case, [5.1, 5.1, 9.0], [1.0, 1.0, 1.0], period=40)
    assert shared.value == pytest.approx(1.1 + 4.0 / 40) and not shared.ok and case.ok
    assert shared.detail["without"] == 1.1 and shared.detail["every_step"] == 5.1
    assert shared.detail["rounds"] == 3 and shared.limit_text == "≤ 1.12"


def test_progress_goes_to_the_standard_error(capsys):
    show = Phase("training steps", 3, "rounds")
    for done in range(4):
        show(done)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("training steps: 0 of 3 rounds\n")
    assert re.search(r"training steps: 3 of 3 rounds\n$", err)


def test_kernel_cases_have_limits_against_the_obvious():
    cases = {case.name: case for case in cpu_kernels.cases(1, lambda done: None)}
    limits = {name.partition(",")[0]: case.at_least for name, case in cases.items()}
    assert limits == {
        "2:4 mask": 10,
        "soft threshold": 15,
        "approximate MVUE": 15,
        "transposable mask": None,
    }
    assert all(case.value > 0 and case.detail["rounds"] == 1 for case in cases.values())


def test_pure_forwards_against_stored_operands(tiny, monkeypatch):
    """Both runs of a pair are built of one configuration."""
    seen = []

    def build(overrides):
        seen.append(overrides)
        return tiny.build(*overrides, "compile=false", "batch.size=16")

    monkeypatch.setattr(operands, "training", build)
    monkeypatch.setattr(operands, "MICRO_BATCHES", (2,))
    found = operands.cases(quick=True)
    assert [case.name.partition(" operands, ")[2] for case in found] == [
        f"{method}, {mode}, 2 micro-batches"
        for mode in ("eager", "compiled")
        for method in ("ste", "sste")
    ]
    assert all(case.value > 0 for case in found)
    assert seen[0] == ["sparsity=ste", "batch.micro=8", "compile=False"]
    assert seen[-1] == ["sparsity=sste", "batch.micro=8", "compile=True"]
