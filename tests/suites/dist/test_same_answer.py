"""Several processes and one give the same answer: see docs/many_machines.md for what is promised.

In double precision losses agree to 1e-12, masks and flips are equal; in single precision losses
agree to 2e-6 over 50 steps. With ``parallel.reduction=tree`` everything is equal bit by bit.
"""

import json
import shutil

import pytest

from support.ranks import VARIANTS, Case, train_with, variant
from support.same_answer import FP32, FP64, KINDS, alone, assert_equal_masks, check, drift
from support.tiny_runs import metrics


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
@pytest.mark.timeout(900)
def test_two_processes_train_layers_with_different_patterns(tiny):
    patterns = "sparsity.patterns={*h.0.*: dense, *.c_fc: 1:4}"
    words = (*variant("tsrste"), "model.n_layer=2", patterns, *KINDS["fp64"])
    shards = Case("shards", words, parallel=("parallel=fsdp",))
    many = train_with(tiny, 2, [Case("whole", words), shards])
    one = alone(tiny, words)
    for name in ("whole", "shards"):
        check("fp64", one, many[name])


@pytest.mark.dist
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_method(tiny, size, kind):
    cases = [Case(name, (*variant(name), *KINDS[kind])) for name in VARIANTS]
    many = train_with(tiny, size, cases)
    for case in cases:
        # AdamS follows sign(W): where a weight is nearly zero, rounding becomes a step
        fp32 = 1e-4 if case.name == "cast" else FP32
        check(kind, alone(tiny, case.words), many[case.name], fp32)


@pytest.mark.dist
@pytest.mark.timeout(900)
def test_a_teacher_of_two_processes(tiny):
    """Whole on each with DistributedDataParallel, sharded with FSDP2."""
    source = alone(tiny, (*variant("dense"), *KINDS["fp64"], "steps=3"))
    start = (*KINDS["fp64"], f"init.path='{source}'", "teacher=self")
    words = {name: (*variant(name), *start) for name in ("srste", "sste")}
    cases = [
        Case(f"{name} {parallel}", own, parallel=(f"parallel={parallel}",))
        for name, own in words.items()
        for parallel in ("ddp", "fsdp")
    ]
    many = train_with(tiny, 2, cases)
    for case in cases:
        one = alone(tiny, case.words)
        check("fp64", one, many[case.name])
        terms = [
            [line["kl"] for line in metrics(run) if "kl" in line] for run in (one, many[case.name])
        ]
        assert terms[0] == pytest.approx(terms[1], rel=1e-9) and min(terms[0]) > 0


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
