"""CPU benchmark: variants and amortized searches."""

import pytest

import cpu
from harness import Case
from sparsepretrain import registry
from sparsepretrain.config import compose, validate
from sparsepretrain.kernels.cpu import KERNELS
from sparsepretrain.kernels.timing import Series


def test_every_method_is_measured():
    overrides = [v.overrides[0] for v in cpu.variants().values()]
    assert {f"sparsity={name}" for name in registry.names("method")} == set(overrides)
    assert next(iter(cpu.variants())) == "dense"


def test_variants_compose():
    for name, variant in cpu.variants().items():
        options = validate(compose(variant.overrides, [])).sparsity
        if variant.rare is not None:
            key, period = variant.rare
            assert getattr(options, key[9:]) == period, name
            options = validate(compose(variant.searching(7), [])).sparsity
            assert getattr(options, key[9:]) == 7, name


def test_searches_are_amortized():
    case, plain = Case(name="x", value=1.1), Series(us=[1.0] * 3, mode="eager")
    cpu.amortize(case, Series(us=[5.1, 5.1, 9.0], mode="eager"), plain, period=40)
    assert case.value == pytest.approx(1.1 + 4.0 / 40)


def test_operations_have_no_loop_in_a_step_without_and_one_after_it():
    seen = []
    cpu.without_loops(("mvue", "nm_mask"), lambda: seen.append({"mvue", "nm_mask"} & set(KERNELS)))
    assert seen == [set()] and {"mvue", "nm_mask"} < set(KERNELS)
