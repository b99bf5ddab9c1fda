"""Several processes and one give the same answer: see docs/many_machines.md for what is promised.

In double precision losses agree to 1e-12, masks and flips are equal; in single precision losses
agree to 2e-6 over 50 steps. With ``parallel.reduction=tree`` everything is equal bit by bit.
"""

import json
import shutil

import pytest
import torch
from ranks import VARIANTS, Case, train_with, variant
from tiny_runs import assert_equal_bits, final_state, metrics

FP64, FP32 = 1e-12, 2e-6


def alone(tiny, words):
    """The run directory of one process."""
    outcome = tiny.train(*words)
    assert outcome.code == 0, outcome.output
    return outcome.directory


def drift(left, right):
    """Greatest difference of a loss or validation loss; flips and masks have to be equal."""
    lines = list(zip(metrics(left), metrics(right), strict=True))
    assert [a["step"] for a, _ in lines] == [b["step"] for _, b in lines]
    return max(abs(a["loss"] - b["loss"]) for a, b in lines)


def assert_equal_masks(left, right):
    """Flip rates of all steps and layers, densities, masks of the last comparison."""
    for a, b in zip(metrics(left), metrics(right), strict=True):
        kept = [key for key in a if key.startswith(("flip", "density", "sparse"))]
        assert [a[key] for key in kept] == [b[key] for key in kept], a["step"]
    mine, theirs = (final_state(run)["model"] for run in (left, right))
    for name in mine:
        if "mask" in name:
            assert torch.equal(mine[name], theirs[name]), name


def check(kind, one, many):
    """The gate of a kind of case; what a run begins with is the same in all of them."""
    begun = [json.loads((run / "environment.json").read_text())["hashes"] for run in (one, many)]
    assert begun[0] == begun[1] and begun[0]["initial_weights"]
    if kind.startswith("tree"):
        assert metrics(one) == metrics(many)
        assert_equal_bits(final_state(one), final_state(many))
        return
    assert drift(one, many) <= (FP64 if kind == "fp64" else FP32)
    if kind == "fp64":
        assert_equal_masks(one, many)


KINDS = {
    "fp64": ("precision=fp64", "steps=10"),
    "fp32": ("steps=50", "log.layers_every=50", "checkpoint.every=50"),
    "tree": ("steps=10", "parallel.reduction=tree"),
    "tree bf16": ("steps=10", "parallel.reduction=tree", "precision=bf16"),
}


@pytest.mark.timeout(900)
def test_two_processes_give_the_answer_of_one(tiny):
    chosen = {"fp64": "sste", "fp32": "srste", "tree": "tsrste"}
    short = {**KINDS, "fp32": ("steps=10",)}
    cases = [Case(kind, (*variant(name), *short[kind])) for kind, name in chosen.items()]
    muon = (*variant("srste"), "optim=muon", *KINDS["tree"])
    many = train_with(tiny, 2, [*cases, Case("muon", muon)])
    for kind, name in chosen.items():
        one = alone(tiny, (*variant(name), *short[kind]))
        check(kind, one, many[kind])
        assert one.name == many[kind].name, "how many processes is no part of a run's identity"
    check("tree", alone(tiny, muon), many["muon"])
    about = json.loads((many["fp64"] / "environment.json").read_text())
    assert about["processes"] == {"parallel": "ddp", "count": 2}


@pytest.mark.dist
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_method(tiny, size, kind):
    cases = [Case(name, (*variant(name), *KINDS[kind])) for name in VARIANTS]
    many = train_with(tiny, size, cases)
    for case in cases:
        check(kind, alone(tiny, case.words), many[case.name])


@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_runs_go_on_with_other_processes(tiny):
    # a run that ends early evaluates then: the undisturbed one has to do so at the same steps
    words = {
        name: (*variant(name), "steps=12", "precision=fp64", "eval.every=3")
        for name in ("sste", "tsrste", "step", "bimask")
    }
    whole = {name: alone(tiny, own) for name, own in words.items()}
    runs = tiny.root / "resumed"
    for index, size in enumerate((2, 4, 2)):
        stop = {"stop_after": 3 * (index + 1), "directory": runs}
        train_with(tiny, size, [Case(*item, **stop) for item in words.items()])
    tiny.root = tiny.root / "last"
    tiny.root.mkdir()
    shutil.move(runs, tiny.root / "runs")
    for name, one in whole.items():
        last = alone(tiny, words[name])
        assert last.name == one.name
        assert drift(one, last) <= FP64
        assert_equal_masks(one, last)
