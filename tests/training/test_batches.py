"""Batches made ahead are the batches; errors of a worker are those of the task."""

import json
import multiprocessing
import os

import pytest
import torch

from sparsepretrain.errors import DataError
from sparsepretrain.tasks import build_task
from sparsepretrain.training.batches import TrainingBatches, split_requests, stream

CPU = torch.device("cpu")


@pytest.fixture
def task(tiny):
    task = build_task(tiny.load())
    task.open_data(("train", "validation"))
    return task


def test_workers_make_the_same_batches_in_the_same_order(task, monkeypatch):
    # a child of a study has this start method, which pickles what a worker gets
    forkserver = multiprocessing.get_context("forkserver")
    default = multiprocessing.context._default_context
    monkeypatch.setattr(default, "_actual_context", forkserver)
    task.opened = lambda: None
    here, there = (TrainingBatches(task, 4, 2, CPU, workers, range(2)) for workers in (0, 2))
    for step in (0, 1, 2, 7, 8, 3):  # a jump is what a resume asks for
        mine, theirs = here.step(step), there.step(step)
        assert len(mine) == len(theirs) == 2
        assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(mine, theirs, strict=True))
    there.close()


def test_error_of_a_worker_is_raised_unchanged_and_ends_the_workers(task, monkeypatch):
    def batch(split, step, positions, size):
        raise DataError("photo.jpg does not decode")

    monkeypatch.setattr(task, "batch", batch)
    with pytest.raises(DataError, match=r"^photo.jpg does not decode$") as kept:
        next(stream(task, split_requests("train", 4, 2, None), CPU, 2))
    # a kept error holds its frames, as a traceback that is printed at exit does
    assert kept.value and not multiprocessing.active_children()


def test_killed_worker_is_a_data_error(task, monkeypatch):
    monkeypatch.setattr(task, "batch", lambda *request: os._exit(9))
    with pytest.raises(DataError, match="lower workers"):
        next(stream(task, split_requests("train", 4, 2, None), CPU, 1))


def test_waiting_for_data_is_recorded(tiny):
    lines = (tiny.train("steps=2").directory / "metrics.jsonl").read_text().splitlines()
    waits = [wait for line in lines if (wait := json.loads(line).get("data_wait")) is not None]
    assert waits and all(0 <= wait < 1 for wait in waits) and any(waits)


@pytest.mark.parametrize(
    ("samples", "micro", "batches", "sizes"),
    [(10, 4, None, [4, 4, 2]), (10, 4, 9, [4, 4]), (10, 4, 1, [4]), (3, 8, None, [3]),
     (3, 8, 2, [3])],
)  # fmt: skip
def test_requests_of_a_split(samples, micro, batches, sizes):
    requests = split_requests("validation", samples, micro, batches)
    assert [len(r.positions) for r in requests] == sizes
    assert [i for r in requests for i in r.positions] == list(range(sum(sizes)))


def test_micro_batches_of_different_sizes_have_disjoint_noise(tiny):
    t = tiny.build()
    state = next(iter(t.sparsifier.layers.values())).sparsity
    t.sparsifier.micro_batch(2)
    assert state.key_at((0, 2), 0, 10).offset == 20
    t.sparsifier.micro_batch(2, capacity=64)
    assert state.key_at((0, 2), 0, 10, per=4).offset == 32, "room for 16 groups each"
