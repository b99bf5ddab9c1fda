"""Two processes with what most recipes lack: BatchNorm, loss scaling, a compiled model, probes."""

import pytest

from sparsepretrain.runs import record
from support.ranks import Case, train_with, variant
from support.tiny_runs import metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

IMAGES = (
    "model=resnet_nano", "model.width=[8,8,8,16]", "batch.size=16", "batch.micro=4", "steps=6",
    "eval.every=3", "eval.batches=2", "log.every=1", "workers=0", "tracker.mode=disabled",
)  # fmt: skip


def losses(directory, *, split=None):
    return [line["loss"] for line in metrics(directory) if line.get("split") == split]


def apart(left, right):
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def test_running_statistics_are_those_of_all_processes(tiny, monkeypatch):
    """Training losses are those of one process; evaluations use the mean of the statistics."""
    runs, words = f"runs_dir='{tiny.root / 'runs'}'", (*IMAGES, "precision=fp64", "sparsity=srste")
    monkeypatch.setattr(tiny, "overrides", lambda *more: [*more, runs])
    one = tiny.train(*words, "parallel.device=cpu").directory
    (two,) = train_with(tiny, 2, [Case("images", words)]).values()
    assert apart(losses(one), losses(two)) <= 1e-12
    assert 0 < apart(losses(one, split="validation"), losses(two, split="validation")) < 0.2


@pytest.mark.parametrize(
    ("words", "gate"),
    [
        ((*variant("srste"), "precision=fp16", "steps=6"), 1e-3),
        ((*variant("srste"), "compile=model", "steps=4"), 2e-6),
    ],
    ids=["fp16", "compile"],
)
def test_losses_are_those_of_one_process(tiny, words, gate):
    (two,) = train_with(tiny, 2, [Case("case", words)]).values()
    assert apart(losses(tiny.train(*words).directory), losses(two)) <= gate


def test_probes_measure_what_they_measure_in_one_process(tiny):
    words = (*variant("sste"), "probe=all", "precision=fp64", "steps=20")
    (two,) = train_with(tiny, 2, [Case("case", words)]).values()
    one = tiny.train(*words).directory
    mine, theirs = (record.read(run / "probes.jsonl") for run in (one, two))
    assert len(mine) == len(theirs) >= 8
    for a, b in zip(mine, theirs, strict=True):
        del a["time"], b["time"]
        names = [key for key, value in b.items() if isinstance(value, str)]
        assert [a.pop(name) for name in names] == [b.pop(name) for name in names]
        assert a == pytest.approx(b)
