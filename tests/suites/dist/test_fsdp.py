"""``parallel=fsdp`` gives the answer of one process, and goes on with any other number of them."""

import shutil

import numpy
import pytest

from support.ranks import VARIANTS, Case, train_with, variant
from support.same_answer import FP64, KINDS, alone, assert_equal_masks, assert_same, check, drift

pytestmark = [pytest.mark.dist, pytest.mark.timeout(3000)]

FSDP = ("parallel=fsdp",)
PROOF = ("precision=fp64", "steps=8")


def test_every_method(tiny, record_property):
    """Whole runs; runs that are killed in a step, and go on with one process and with four."""
    words = {name: (*variant(name), *PROOF) for name in VARIANTS}
    whole = [Case(name, own, parallel=FSDP) for name, own in words.items()]
    killed, place = [], {"parallel": FSDP, "directory": tiny.root / "killed"}
    for index, (name, own) in enumerate(words.items()):
        # of 16, in steps 3 to 8; of each micro-batch maskpro runs two forwards
        number = (6 + index % 10) * (2 if name == "maskpro" else 1)
        moment = "SIGKILL", "micro-batch", number
        faults = dict.fromkeys(([0], [1], [0, 1])[index % 3], moment)
        killed.append(Case(f"killed {name}", own, faults=faults, fails=True, **place))
    many = train_with(tiny, 2, whole + killed)
    for case in killed:
        assert [rank for rank, code in enumerate(case.codes) if code == -9] == [*case.faults]
    shutil.copytree(tiny.root / "killed", tiny.root / "four")
    rest = [Case(n, own, parallel=FSDP, directory=tiny.root / "four") for n, own in words.items()]
    four = train_with(tiny, 4, rest)
    for name, own in words.items():
        one = alone(tiny, own)
        assert_same(one, many[name])
        assert_same(one, four[name])
        outcome = tiny.train(*own, f"runs_dir='{tiny.root / 'killed'}'")
        assert outcome.code == 0 and "continuing from" in outcome.output
        assert_same(one, outcome.directory)
    record_property("injected", len(killed))


@pytest.mark.parametrize("size", [2, 4])
def test_initial_weights_are_those_that_one_process_draws(tiny, size):
    words = {"sste": (), "slope": (), "sste all": ("sparsity.targets=all",)}
    drawn = {name: (*variant(name.split()[0]), *own) for name, own in words.items()}
    train_with(tiny, size, [Case(n, w, parallel=FSDP, only="weights") for n, w in drawn.items()])


def test_every_number_of_processes_loads_what_another_has_saved(tiny, record_property):
    """Bit by bit, with averages; damaged ones would not be loaded at all."""
    words = {name: (*variant(name), *PROOF, "ema=0.9") for name in VARIANTS}
    sizes = (1, 2, 4)

    def cases(saved_by, size, **options):
        own = {"parallel": FSDP if size > 1 else ("parallel=single",)}
        own["directory"] = tiny.root / f"saved by {saved_by}"
        return [Case(f"{n} of {saved_by}", w, **own, **options) for n, w in words.items()]

    for size in sizes:
        train_with(tiny, size, cases(size, size, stop_after=4))
    for size in sizes:
        all_cases = [case for saved_by in sizes for case in cases(saved_by, size, only="loading")]
        train_with(tiny, size, all_cases)
    record_property("injected", len(sizes) ** 2 * len(words))


@pytest.mark.parametrize(
    ("size", "names"),
    [(2, ("sste", "srste", "tsrste", "step", "bimask", "sdgp")), (4, ("sste", "tsrste"))],
)
def test_single_precision(tiny, size, names):
    cases = [Case(name, (*variant(name), *KINDS["fp32"]), parallel=FSDP) for name in names]
    many = train_with(tiny, size, cases)
    for case in cases:
        check("fp32", alone(tiny, case.words), many[case.name])


def test_averages_clipping_and_masks(tiny):
    words = (*variant("step"), *PROOF, "ema=0.9", "clip=0.05", "log.masks_every=4")
    options = [f"parallel.reshard_after_forward={again}" for again in ("true", "false")]
    options += ["parallel.reduce_each=true", "activation_checkpointing=true"]
    cases = [Case(option, words, parallel=(*FSDP, option)) for option in options]
    one = alone(tiny, words)
    for many in train_with(tiny, 2, cases).values():
        assert_same(one, many)
        files = sorted((one / "masks").iterdir())
        assert len(files) == 2
        for file in files:
            mine, theirs = (numpy.load(run / "masks" / file.name) for run in (one, many))
            assert all(numpy.array_equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("name", ["sste", "tsrste", "step", "bimask", "sdgp"])
def test_compiled_blocks(tiny, name):
    words = (*variant(name), *PROOF, "model.dropout=0")  # inductor draws other dropout masks
    case = Case(name, words, parallel=(*FSDP, "compile=blocks"))
    many = train_with(tiny, 2, [case])[name]
    assert drift(alone(tiny, words), many) <= FP64
    assert_equal_masks(alone(tiny, words), many)


def test_replicas(tiny):
    words = (*variant("tsrste"), *PROOF)
    case = Case("replicas", words, parallel=(*FSDP, "parallel.replicas=2"))
    assert_same(alone(tiny, words), train_with(tiny, 4, [case])["replicas"])


def test_runs_go_on_with_other_processes(tiny):
    # a run that ends early evaluates then: the undisturbed one has to do so at the same steps
    words = {
        name: (*variant(name), "steps=15", "precision=fp64", "eval.every=3", "ema=0.9")
        for name in ("sste", "tsrste", "step", "bimask")
    }
    runs = tiny.root / "resumed"
    parts = [(2, FSDP), (4, FSDP), (1, FSDP), (2, ("parallel=ddp",)), (2, FSDP)]
    for index, (size, parallel) in enumerate(parts):
        stop = {"stop_after": 3 * (index + 1), "directory": runs, "parallel": parallel}
        last = train_with(tiny, size, [Case(name, own, **stop) for name, own in words.items()])
    for name, own in words.items():
        one = alone(tiny, own)
        assert last[name].name == one.name
        assert_same(one, last[name])
