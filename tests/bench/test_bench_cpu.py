"""The CPU benchmark: compared works are equal, and every method is measured."""

import pytest
import torch

import cpu
import formulations
from harness import Case
from sparsepretrain import kernels, registry
from sparsepretrain.config import compose, validate
from sparsepretrain.kernels.timing import Series


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
    assert torch.equal(formulations.topk(w).bool(), kernels.nm_mask(w))
    torch.testing.assert_close(formulations.soft_by_sort(w), kernels.soft_threshold(w))
    patterns = formulations.transposable_patterns()
    assert patterns.shape == (16, 90)
    by_product = formulations.transposable_by_matmul(w, patterns)
    assert torch.equal(by_product, kernels.transposable_mask(w))
    torch.manual_seed(0)
    mean = sum(formulations.mvue_by_multinomial(w) for _ in range(3000)) / 3000
    assert (mean - w).abs().mean() < 0.05
    kept = formulations.mvue_by_multinomial(w) != 0
    assert (kept.view(16, 4, 96).sum(1) == 2).all()


def test_searches_are_amortized():
    case, dense = Case(name="x", value=1.1, at_most=1.12), Series(us=[1.0] * 3, mode="eager")
    cpu.amortize(case, Series(us=[5.1, 5.1, 9.0], mode="eager"), dense, period=40)
    assert case.value == pytest.approx(1.1 + 4.0 / 40) and not case.ok
    assert case.detail == {"without": 1.1, "every_step": 5.1, "period": 40}


def test_kernel_cases_have_limits_against_the_obvious():
    cases = {case.name: case for case in cpu.kernel_ratios(1)}
    limits = {name.partition(",")[0]: case.at_least for name, case in cases.items()}
    assert limits == {
        "2:4 mask": 10,
        "soft threshold": 15,
        "approximate MVUE": 15,
        "transposable mask": None,
    }
    assert all(case.value > 0 and case.detail["rounds"] == 1 for case in cases.values())
