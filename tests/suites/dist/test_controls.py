"""The comparisons of several processes with one fail where the code is wrong: see mutants.py."""

import pytest

from support.ranks import Case, train_with, variant
from support.same_answer import FP64, KINDS, alone, drift
from support.sharded_loops import compared

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

FSDP = ("parallel=fsdp",)
NOTICED = 1e-6
DRAWS = {"local noise": "sste", "noise by rank": "sste", "local dropout": "dense"}


@pytest.mark.parametrize(
    ("parallel", "mistakes"),
    [
        ("ddp", {"mean": "sdgp", "no no_sync": "dense", **DRAWS}),
        ("fsdp", {"mean": "sdgp", "mean of blocks": "dense", "B dropped": "bimask", **DRAWS}),
    ],
)
def test_the_gates_notice_mistakes(tiny, parallel, mistakes, record_property):
    words = {name: (*variant(name), *KINDS["fp64"]) for name in mistakes.values()}
    group = (f"parallel={parallel}",)
    right = [Case(name, own, parallel=group) for name, own in words.items()]
    wrong = [Case(m, words[name], mutant=m, parallel=group) for m, name in mistakes.items()]
    many = train_with(tiny, 2, right + wrong)
    one = {name: alone(tiny, own) for name, own in words.items()}
    for name in words:
        assert drift(one[name], many[name]) <= FP64, name
    for mutant, name in mistakes.items():
        assert drift(one[name], many[mutant]) > NOTICED, mutant
    record_property("injected", len(mistakes))


def test_projections_kept_by_pointer_are_noticed(tiny):
    """Where rows do not divide evenly, some processes project anew alone: nobody gets further."""
    three = ("batch.size=12", "parallel.timeout=60")
    words = (*variant("tsrste"), *KINDS["fp64"], three[0])
    right = Case("right", (*words, three[1]), parallel=FSDP)
    wrong = Case("wrong", right.words, mutant="kept by data_ptr", parallel=FSDP, fails=True)
    assert drift(alone(tiny, words), train_with(tiny, 3, [right, wrong])["right"]) <= FP64
    assert 1 in wrong.codes, wrong.codes


def test_a_flat_previous_mask_is_noticed(tiny):
    """It trains in two processes, and four cannot load it."""
    words = (*variant("sste"), "steps=8", "precision=fp64", "eval.every=4")

    def cases(**options):
        return [
            Case(name, words, mutant=mutant, directory=tiny.root / name, parallel=FSDP, **options)
            for name, mutant in (("right", ""), ("wrong", "flat previous mask"))
        ]

    train_with(tiny, 2, cases(stop_after=4))
    right, wrong = cases()
    wrong.fails = True
    assert drift(alone(tiny, words), train_with(tiny, 4, [right, wrong])["right"]) <= FP64
    assert wrong.codes == [4] * 4


def test_shards_that_are_not_those_of_the_weights_are_noticed(record_property):
    """Operands of evaluation in a dense phase; masks that are one row off their weights."""
    beside = [("bimask", 32), ("tsrste", 36), ("asp", 32), ("ast", 32), ("cast", 32)]
    cases = [{"name": "step", "evaluates": True, "reshard": False, "mutant": "no reshard"}]
    cases += [{"name": n, "inner": i, "mutant": "a shard shifted by one"} for n, i in beside]
    found = compared(2, cases)
    assert all(f["loss"] > NOTICED for f in found), found
    # ASP's mask is never recomputed
    assert found[1]["misaligned"] and found[2]["misaligned"], found
    record_property("injected", len(found))
