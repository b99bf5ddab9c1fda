"""Every method computes the losses it computed before (golden/losses.json; ``make golden``)."""

import pytest

import sparsepretrain as sp
from support import golden_losses as golden
from support.sparse_cases import LEARNED

pytestmark = pytest.mark.filterwarnings("ignore:StepAdamW switched")
CASES = golden.cases()


def same(name, losses):
    """Whether ``losses`` are those in the file, within the tolerance of their case."""
    errors = golden.deviation(golden.stored()[name], losses)
    return all(e <= t for e, t in zip(errors, golden.tolerance(*CASES[name]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_the_stored_ones(name):
    losses = golden.losses(*CASES[name])
    assert same(name, losses), "if this change is meant: make golden, and say why"
    if CASES[name][0] not in LEARNED:  # their weights are the random ones of the start
        assert losses[-1] < 0.3 * losses[0], "it trains"


def test_every_method_has_a_case_and_every_case_is_stored():
    known = {method for method, _ in CASES.values()}
    assert known == {name for name in sp.list_methods() if not name.startswith("mine")}
    assert list(golden.stored()) == list(CASES), "make golden"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("srste decay=0.02", {"decay": 0.022}),
        ("srste decay=2.0 decay_on=weight", {"decay": 2.2}),
        ("srste decay=0.02 decay_ramp=0.5", {"decay_ramp": 0.55}),
        ("ste window={'start': 0.2, 'stop': 0.6}", {"window": {"start": 0.22, "stop": 0.6}}),
        ("step", {"decay": 0.01}),
        ("sste", {"gamma": 0.03}),
        ("sste", {"n": 1}),
        ("tsrste decay=0.02 refresh=5", {"refresh": 6}),
        ("tsrste decay=0.02 refresh=5", {"dense_tail": 0.2}),
        ("sdgp epsilon=0.0001", {"scope": "group"}),
        ("sdgp epsilon=0.0001", {"epsilon": 0.0}),
        ("sdgp epsilon=0.0001", {"n": 3}),
        ("asp at=0.4", {"at": 0.42}),
        ("bimask decay=0.02 every=10 candidates=5", {"every": 11}),
        ("mdgf", {"until": 0.52}),
        ("mdgf shape=exponential", {"rate": 5.5}),
        ("sdgf n=1 m=8", {"until": 0.52}),
        ("slope", {"n": 1}),
    ],
)
def test_a_changed_option_is_noticed(name, changes):
    method, options = CASES[name]
    assert not same(name, golden.losses(method, options | changes))


def test_stored_losses_of_variants_differ():
    stored = golden.stored()
    for name in stored:
        assert [other for other in stored if same(name, stored[other])] == [name]
