"""``replay_every``: the same run, and a bit that is wrong in a gradient is noticed before the step.

In several processes: tests/dist/test_controls.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_runs import assert_equal_bits, assert_same_run, final_state, metrics

from sparsepretrain import kernels, sparsifier_of
from sparsepretrain.errors import SparsePretrainError
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.training.gradients import Gradients

TWICE = "replay_every=2"
WORDS = ("batch.micro=2", "model.dropout=0.1")
IMAGES = (
    "model=resnet_nano", "model.width=[8,8,8,16]", "batch.size=8", "batch.micro=4", "steps=4",
    "eval.batches=1", "log.every=1", "checkpoint.every=2", "workers=0", "tracker.mode=disabled",
)  # fmt: skip


@pytest.fixture
def flip(monkeypatch):
    """``flip(4, 3)``: in the fourth gradient that is computed, this bit of an entry is wrong."""
    reduce, calls = Gradients.reduce, itertools.count(1)

    def arm(call, bit):
        def wrong(own):
            reduce(own)
            if next(calls) == call:
                weight = dict(own.loss.named_parameters())["model.transformer.h.0.mlp.c_fc.weight"]
                weight.grad.view(torch.int32)[3, 5] ^= 1 << bit

        monkeypatch.setattr(Gradients, "reduce", wrong)

    return arm


def test_a_replayed_step_repeats_its_draws_and_masks_and_changes_nothing(tiny, monkeypatch):
    expected = tiny.train(*WORDS, "name=once").directory
    passes, mvue, reduce = [[]], kernels.mvue, Gradients.reduce

    def drawing(*args, **options):
        passes[-1].append(mvue(*args, **options).clone())
        return passes[-1][-1]

    def reduced(own):
        reduce(own)
        passes[-1] += sparsifier_of(own.loss.model).masks().values()
        passes.append([])

    monkeypatch.setattr(kernels, "mvue", drawing)
    monkeypatch.setattr(Gradients, "reduce", reduced)
    assert_same_run(expected, tiny.train(*WORDS, TWICE, "name=twice").directory)
    once, first, again, after = passes[:4]
    assert len(first) > 4 and len(passes) == 9 + 1
    assert_equal_bits(first, again)
    assert not torch.equal(once[0], first[0]) and not torch.equal(first[0], after[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_running_statistics_take_a_batch_once(tiny, monkeypatch, precision):
    runs = f"runs_dir='{tiny.root / 'runs'}'"
    monkeypatch.setattr(tiny, "overrides", lambda *more: [*more, runs])
    words = (*IMAGES, f"precision={precision}", "parallel.device=cpu")
    expected = tiny.train(*words, "name=once").directory
    assert_same_run(expected, tiny.train(*words, TWICE, "name=twice").directory)


@pytest.mark.parametrize("bit", [0, 23, 31])
def test_a_wrong_bit_stops_before_the_step(tiny, flip, bit):
    flip(5, bit)  # 1; 2 and 3 of step 2; 4; 5 and 6 of step 4
    told = r"step 4, computed twice: the gradient of .*c_fc.weight differs; nothing was updated"
    with pytest.raises(SparsePretrainError, match=told) as caught:
        tiny.train(*WORDS, TWICE)
    assert caught.value.exit_code == 1
    directory = tiny.directory(*WORDS, TWICE)
    assert metrics(directory)[-1]["step"] == 3 and final_state(directory)["step"] == 2


def test_a_step_that_is_computed_once_hides_it(tiny, flip):
    flip(5, 0)
    assert tiny.train(*WORDS).code == 0


def test_draws_of_no_micro_batch_are_noticed(tiny, monkeypatch):
    place, calls = Sparsifier.micro_batch, itertools.count()
    monkeypatch.setattr(
        Sparsifier, "micro_batch", lambda own, index, **rest: place(own, next(calls), **rest)
    )
    with pytest.raises(SparsePretrainError, match="step 2, computed twice: the gradient of"):
        tiny.train(*WORDS, TWICE)
