"""Kills, signals, hanging processes and bad numbers at named moments of one process, or of all."""

import itertools

import pytest

from sparsepretrain.runs.checkpoint import Checkpoint, saved
from support.faults import MOMENTS, SAVING
from support.ranks import Case, train_with, variant
from support.same_answer import alone, assert_same
from support.tiny_runs import metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

WORDS = (*variant("sste"), "precision=fp64", "steps=8", "eval.every=3", "checkpoint.every=2")
WHO = {"one": [1], "the first": [0], "all": [0, 1]}
SHARED, FIRST = list(MOMENTS)[:6], list(MOMENTS)[6:]
NUMBERS = {
    "start-up": 1,
    "micro-batch": 8,
    "evaluation": 3,
    "writing a checkpoint": 4,
    "moving a file": 6,
}
"""Which call of these, after the first checkpoint; of the others the third."""


def struck(tiny, kind, who, moment, index, number=None, **options):
    """A run, sharded or not, of two processes."""
    number = number or NUMBERS.get(moment, 3)
    options["faults"] = dict.fromkeys(WHO[who], (kind, moment, number))
    options["parallel"] = (("parallel=fsdp",), ("parallel=ddp",))[index % 2]
    name = f"{kind} {who} {moment} {number}"
    return Case(name, WORDS, directory=tiny.root / f"{index}", **options)


def assert_they_go_on(tiny, cases):
    """Continued by one process, they are the run that nothing happened to."""
    one = alone(tiny, WORDS)
    for case in cases:
        outcome = tiny.train(*WORDS, f"runs_dir='{case.directory}'")
        assert outcome.code == 0, (case, outcome.output)
        assert_same(one, outcome.directory)
        checkpoints = set(saved(outcome.directory / "checkpoints").values())
        assert all(Checkpoint(path).problem() is None for path in checkpoints)
        assert set((outcome.directory / "checkpoints").iterdir()) == checkpoints


@pytest.mark.parametrize("saves", [False, True], ids=["anywhere", "three saves"])
def test_kill_9_at_named_moments(tiny, saves, record_property):
    """Before what is named there; of saves also while the first process alone writes (late)."""
    kinds = ("SIGKILL", "SIGKILL late") if saves else ("SIGKILL",)
    shared, first = (["collecting a checkpoint"], list(SAVING)) if saves else (SHARED, FIRST)
    places = [(kind, who, moment) for kind in kinds for moment in shared for who in WHO]
    places += [("SIGKILL", "the first", moment) for moment in first]
    cases = []
    for number in (1, 2, 3) if saves else (None,):
        for place in places:
            cases.append(struck(tiny, *place, len(cases), number, fails=True))
    train_with(tiny, 2, cases)
    killed = [[rank for rank, code in enumerate(case.codes) if code == -9] for case in cases]
    for case, ranks in zip(cases, killed, strict=True):  # the death of one may forestall the other
        assert ranks and set(ranks) <= {*case.faults}, case
    assert_they_go_on(tiny, cases)
    record_property("injected", sum(map(len, killed)))


def test_signals_at_named_moments(tiny, record_property):
    """All stop at the same step, at most one after the signal; at start-up, at once."""
    places = [("SIGTERM", who, moment) for moment in SHARED for who in ("one", "all")]
    places += [("SIGTERM", "the first", moment) for moment in FIRST]
    places += [("SIGINT", "one", moment) for moment in SHARED]
    cases = [struck(tiny, *place, index, fails=True) for index, place in enumerate(places)]
    many = train_with(tiny, 2, cases)
    for case in cases:
        code = 130 if "SIGINT" in case.name else 143
        if "start-up" in case.name:  # the others lose it and end
            assert all(case.codes[rank] == code for rank in case.faults), case
            assert not many[case.name].exists()
            continue
        assert case.codes == [code] * 2, case
        kept = saved(many[case.name] / "checkpoints")
        last = max((line["step"] for line in metrics(many[case.name])), default=0)
        assert last == max(kept, default=0), case  # 0: before the first step
    assert_they_go_on(tiny, cases)
    record_property("injected", len(cases))


def test_a_process_that_hangs(tiny, record_property):
    """The others wait for ``parallel.timeout``, and no checkpoint is lost."""
    places = [("one", "before the step"), ("one", "evaluation"), ("the first", "moving a file")]
    cases = [struck(tiny, "hang", *place, index, fails=True) for index, place in enumerate(places)]
    for case in cases:
        case.parallel = (*case.parallel, "parallel.timeout=60")
    train_with(tiny, 2, cases)
    for case in cases:
        assert 1 in case.codes and "did not answer for parallel.timeout=60" in case.errors, case
    assert_they_go_on(tiny, cases)
    record_property("injected", len(cases))


def test_a_bad_number_on_one_process_or_all(tiny, record_property):
    """``stop``: all, before the step, with the same error; ``skip``: all skip this step only."""
    cases, kinds = [], ("nan loss", "nan gradient")
    for who, kind, guard in itertools.product(("one", "all"), kinds, ("stop", "skip")):
        case = struck(tiny, kind, who, "micro-batch", who == "all", fails=guard == "stop")
        case.name += f" {guard}"
        case.directory = tiny.root / case.name
        case.words = (*WORDS, f"guard={guard}")
        cases.append(case)
    many = train_with(tiny, 2, cases)
    for case in cases:
        lines = [line for line in metrics(many[case.name]) if "split" not in line]
        if case.fails:
            assert case.codes == [5, 5] and "step 4: " in case.errors, case
            assert lines[-1]["step"] == 3
        else:
            assert [line.get("skipped", 0) for line in lines] == [0, 0, 0, 1, 1, 1, 1, 1]
    record_property("injected", len(cases))


def test_a_jump_on_one_process_is_skipped_by_all(tiny, record_property):
    words = (*variant("sste"), "precision=fp64", "steps=70", "eval.every=0", "guard=spike")
    cases = []
    for index, parallel in enumerate(("fsdp", "ddp")):
        case = struck(tiny, "jump", "one", "micro-batch", index, number=2 * 67)
        case.name, case.words = f"jump {parallel}", words
        cases.append(case)
    many = train_with(tiny, 2, cases)
    for case in cases:
        lines = [line for line in metrics(many[case.name]) if "split" not in line]
        assert [line.get("skipped", 0) for line in lines] == [0] * 66 + [1] * 4
    record_property("injected", len(cases))
