"""Observers see gradients and updates, and change neither the run nor its continuation."""

import pytest
import torch
from tiny_runs import assert_same_run, interrupted, metrics

from sparsepretrain.training import batches, loop, trainer
from sparsepretrain.training.observer import Observer


class Probe(Observer):
    """Norms of the gradient and of the update of every step, and which hook was called when."""

    def __init__(self):
        self.calls, self.gradients, self.updates = [], [], []

    def before_step(self, session):
        self.calls.append("before")
        self.weights = [p.detach().clone() for p in session.model.parameters()]

    def after_backward(self, session):
        self.calls.append("gradients")
        self.gradients.append([p.grad.clone() for p in session.model.parameters()])

    def after_step(self, session, values):
        self.calls.append(f"step {session.step}")
        pairs = zip(session.model.parameters(), self.weights, strict=True)
        self.updates.append([p.detach() - w for p, w in pairs])

    def at_log(self, session, *, per_layer):
        self.calls.append("log")
        return {"probe": float(norm(self.gradients[-1]))}


def norm(tensors):
    return torch.nn.utils.get_total_norm(tensors)


@pytest.fixture
def observed(monkeypatch):
    """Every session that the trainer builds has a probe; yields them."""
    probes, build = [], trainer.build_session

    def build_session(*args, **options):
        session = build(*args, **options)
        probes.append(Probe())
        session.observers.append(probes[-1])
        return session

    monkeypatch.setattr(trainer, "build_session", build_session)
    return probes


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_observers_get_unscaled_unclipped_gradients(tiny, precision):
    words = ("optim=sgd", "optim.weight_decay=0", "optim.momentum=0", "clip=0.25", "batch.micro=2")
    t = tiny.build(*words, "sparsity=dense", f"precision={precision}")
    probe = Probe()
    t.observers.append(probe)
    values = loop.train_step(t)
    assert probe.calls == ["before", "gradients", "step 1"]
    gradients, updates = probe.gradients[0], probe.updates[0]
    assert float(norm(gradients)) == values.grad_norm > 0.25
    share = 0.25 / values.grad_norm
    for update, gradient in zip(updates, gradients, strict=True):
        assert torch.allclose(update, -values.lr * share * gradient, atol=1e-6)


def test_observers_are_called_for_skipped_steps(tiny):
    t = tiny.build("precision=fp16", "precision.init_scale=1e30")
    probe = Probe()
    t.observers.append(probe)
    loop.train_step(t)
    assert probe.calls == ["before", "gradients", "step 1"] and not t.updated
    assert not any(update.any() for update in probe.updates[0])


def test_a_run_is_the_same_with_an_observer_and_continues_exactly(tiny, stop_after, observed):
    words = ("batch.micro=2", "ema=0.9", "log.every=2", "model.dropout=0.1")
    again = interrupted(tiny, stop_after, (1, 3), *words)
    assert [len(probe.gradients) for probe in observed] == [1, 2, 3]
    lines = [line for line in metrics(again) if "split" not in line]
    seen = [float(norm(gradients)) for probe in observed for gradients in probe.gradients]
    assert [line["probe"] for line in lines] == [seen[line["step"] - 1] for line in lines]
    whole = tiny.train(*words, "runs_dir=" + str(tiny.root / "whole")).directory
    assert_same_run(whole, again)


def test_micro_batches_go_to_the_device_one_ahead(tiny, monkeypatch):
    t = tiny.build("batch.micro=1", "eval.batches=3")
    calls, move, loss = [], batches.to_device, t.task.loss

    def to_device(batch, device, dtype=None):
        calls.append("move")
        return move(batch, device)

    def seen(model, batch):
        calls.append("use")
        return loss(model, batch)

    monkeypatch.setattr(batches, "to_device", to_device)
    monkeypatch.setattr(t.task, "loss", seen)
    loop.train_step(t)
    assert calls == ["move", *["move", "use"] * 3, "use"]
    calls.clear()
    loop.evaluate(t, "validation", 3, final=False)
    assert calls == ["move", *["move", "use"] * 2, "use"]
