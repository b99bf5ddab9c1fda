"""Observers see unscaled gradients and the updates, of skipped steps too."""

import pytest
import torch

from sparsepretrain.training import loop
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


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_observers_get_unscaled_unclipped_gradients(tiny, precision):
    words = ("optim=sgd", "optim.weight_decay=0", "optim.momentum=0", "clip=0.25", "batch.micro=2")
    t = tiny.build(*words, "sparsity=dense", f"precision={precision}")
    probe = Probe()
    t.observers.append(probe)
    values = loop.train_step(t)
    assert probe.calls == ["before", "gradients", "step 1"]
    gradients, updates = probe.gradients[0], probe.updates[0]
    assert float(torch.nn.utils.get_total_norm(gradients)) == values.grad_norm > 0.25
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
