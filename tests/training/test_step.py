"""Loss and norm are read after the next optimizer step; records and errors stay exact."""

import copy

import pytest
import torch

from sparsepretrain.errors import DivergedError
from sparsepretrain.training import loop
from sparsepretrain.training.loop import train_step
from support.tiny_runs import assert_equal_bits, assert_same_run, metrics


def trained(t):
    """All that a step updates, without the step counters, which nothing saves after an error."""
    model = {k: v for k, v in t.model.state_dict().items() if k != "sparsity_counters"}
    return [model, t.optimizer.state_dict()["state"]]


QUIET = ("log.every=100", "log.layers_every=0", "eval.every=0", "checkpoint.every=100")


def updates_and_reads(t, steps):
    """Order of optimizer updates and of first readings, as (kind, number of the step)."""
    events, accepts = [], t.guard.accepts

    def noted(*args, step, **rest):
        events.append(("read", step))
        return accepts(*args, step=step, **rest)

    t.guard.accepts = noted
    t.optimizer.register_step_post_hook(lambda *_: events.append(("update", t.step + 1)))
    for _ in range(steps):
        train_step(t)
    return events


def test_loss_is_read_after_the_update(tiny):
    t = tiny.build(*QUIET, "steps=9")
    # the first step is recorded, so it is read at once
    assert updates_and_reads(t, 5) == [
        ("update", 1), ("read", 1), ("update", 2), ("update", 3), ("read", 2), ("update", 4),
        ("read", 3), ("update", 5), ("read", 4),
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["guard=skip", "guard=spike", "precision=fp16", "sparsity=step"])
def test_guards_and_step_read_before_the_update(tiny, word):
    t = tiny.build(*QUIET, "steps=9", word)
    kinds = [kind for kind, _ in updates_and_reads(t, 3)]
    assert kinds == ["read", "update"] * 3


@pytest.mark.parametrize("poisoned", ["the loss", "a gradient"])
def test_diverged_step_and_the_next_one_update_nothing_and_training_can_go_on(tiny, poisoned):
    t = tiny.build(*QUIET, "steps=20")
    for _ in range(2):
        train_step(t)
    before = copy.deepcopy(trained(t))
    weight = t.model.transformer.h[0].mlp.c_fc.weight
    if poisoned == "the loss":
        loss = t.gradients.loss
        t.gradients.loss = lambda batch: (loss(batch)[0] * float("nan"),)
    else:
        hook = weight.register_hook(lambda grad: grad * float("inf"))
    train_step(t)
    if poisoned == "the loss":
        t.gradients.loss = loss
    else:
        hook.remove()
    with pytest.raises(DivergedError, match=r"^step 3: .*nothing was updated") as caught:
        train_step(t)
    expected = "the loss is nan" if poisoned == "the loss" else "h.0.mlp.c_fc.weight"
    assert expected in str(caught.value)
    assert_equal_bits(before, trained(t))
    weights = weight.detach().clone()
    for _ in range(2):
        train_step(t)
    assert not torch.equal(weights, weight) and weight.isfinite().all()


@pytest.mark.parametrize("method", ["sste", "srste"])
def test_late_reading_is_bit_exact(tiny, monkeypatch, method):
    words = (f"sparsity={method}", "log.every=4", "eval.every=3", "checkpoint.every=5", "steps=12")
    late = tiny.train(*words).directory
    monkeypatch.setattr(loop, "_reads_late", lambda session: False)
    monkeypatch.setattr(tiny, "root", tiny.root / "early")
    early = tiny.train(*words).directory
    assert_same_run(late, early)


def test_a_diverged_last_step_reports_itself(tiny):
    """There is no next step that could report it."""
    t = tiny.build(*QUIET, "steps=2")
    train_step(t)
    t.model.transformer.h[0].mlp.c_fc.weight.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(DivergedError, match=r"^step 2: "):
        train_step(t)


@pytest.mark.parametrize("words", [("log.masks_every=1",), ("probe=all", "probe.lifetime.every=1")])
def test_diverged_step_writes_no_mask_and_no_probe_line(tiny, monkeypatch, words):
    words = (*QUIET, "steps=9", *words)
    step = loop.train_step

    def poisoned(t):
        if t.step == 2:
            weight = t.model.transformer.h[0].mlp.c_fc.weight
            weight.register_hook(lambda grad: grad * torch.nan)
        return step(t)

    monkeypatch.setattr(loop, "train_step", poisoned)
    with pytest.raises(DivergedError, match=r"^step 3: "):
        tiny.train(*words)
    directory = tiny.directory(*words)
    kept = [file.name for file in (directory / "masks").glob("*")]
    lines = directory / "probes.jsonl"
    kept += lines.read_text().splitlines() if lines.exists() else []
    assert kept and not any("00000003" in line or '"step": 3' in line for line in kept), kept


def test_events_are_recorded_with_the_numbers_of_their_step(tiny):
    words = ("sparsity=tsrste", "sparsity.refresh=3", "sparsity.dense_tail=0", "steps=9")
    few, every = (tiny.train(*words, *QUIET, f"log.every={n}").directory for n in (100, 1))
    lines, full = ({line["step"]: line for line in metrics(run)} for run in (few, every))
    events = [step for step in lines if step not in (0, 1, 9)]
    assert events
    for step in events:
        assert all(lines[step][key] == full[step][key] for key in ("loss", "grad_norm", "lr"))
