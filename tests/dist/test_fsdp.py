"""``parallel=fsdp`` gives the answer of one process, and goes on with any other number of them."""

import numpy
import pytest
from ranks import VARIANTS, Case, train_with, variant
from test_launch import FAULT, end, start
from test_same_answer import FP64, alone, assert_equal_masks, drift
from tiny_runs import final_state, metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(3000)]

FSDP = ("parallel=fsdp",)
PROOF = ("precision=fp64", "steps=8")


def assert_same(one, many):
    """Losses, masks, flips, and what is in the checkpoints."""
    assert drift(one, many) <= FP64
    assert_equal_masks(one, many)
    left, right = final_state(one), final_state(many)
    assert list(left) == list(right)
    for part in ("model", "optimizer", *(["ema"] if "ema" in left else [])):
        assert list(left[part]) == list(right[part])
        for name, value in left[part].items():
            assert value.shape == right[part][name].shape and value.dtype == right[part][name].dtype
            assert (value.double() - right[part][name].double()).abs().max() <= 1e-9, name


def test_every_method(tiny):
    cases = [Case(name, (*variant(name), *PROOF), parallel=FSDP) for name in VARIANTS]
    many = train_with(tiny, 2, cases)
    for case in cases:
        assert_same(alone(tiny, case.words), many[case.name])


def test_averages_clipping_and_masks(tiny):
    words = (*variant("step"), *PROOF, "ema=0.9", "clip=0.05", "log.masks_every=4")
    cases = [
        Case(f"reshard {again}", words, parallel=(*FSDP, f"parallel.reshard_after_forward={again}"))
        for again in ("true", "false")
    ]
    one = alone(tiny, words)
    for many in train_with(tiny, 2, cases).values():
        assert_same(one, many)
        files = sorted((one / "masks").iterdir())
        assert len(files) == 2
        for file in files:
            mine, theirs = (numpy.load(run / "masks" / file.name) for run in (one, many))
            assert all(numpy.array_equal(mine[key], theirs[key]) for key in mine)


def test_replicas(tiny):
    words = (*variant("tsrste"), *PROOF)
    case = Case("replicas", words, parallel=(*FSDP, "parallel.replicas=2"))
    assert_same(alone(tiny, words), train_with(tiny, 4, [case])["replicas"])


@pytest.mark.parametrize("name", ["sste", "tsrste", "step", "bimask"])
def test_a_run_goes_on_with_other_processes(tiny, name):
    # a run that ends early evaluates then: the undisturbed one has to do so at the same steps
    words = (*variant(name), "steps=15", "precision=fp64", "eval.every=3", "ema=0.9")
    one = alone(tiny, words)
    runs = tiny.root / "resumed"
    parts = [(2, FSDP), (4, FSDP), (1, FSDP), (2, ("parallel=ddp",)), (2, FSDP)]
    for index, (size, parallel) in enumerate(parts):
        stop = {"stop_after": 3 * (index + 1), "directory": runs, "parallel": parallel}
        (directory,) = train_with(tiny, size, [Case("part", words, **stop)]).values()
    assert directory.name == one.name
    assert_same(one, directory)


@pytest.mark.parametrize("size", [1, 4])
def test_a_killed_run_goes_on(tiny, size):
    words = (*variant("sste"), *PROOF)
    one = alone(tiny, words)
    # the plug-in, which kills a process, is part of the run
    nproc = (*FSDP, "parallel.nproc=2")
    code, out, errors = end(start(tiny, *PROOF, *nproc, fault="SIGKILL:1:11"))
    assert code == 137 and len(errors) == 1, (out, errors)
    plugin = f"plugins=['{FAULT}']"
    case = Case("killed", (*words, plugin), parallel=FSDP, directory=tiny.root / "runs")
    many = train_with(tiny, size, [case])["killed"]
    assert len(metrics(many)) == len(metrics(one))
    assert_same(one, many)
