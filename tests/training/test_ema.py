"""Averaged weights: their arithmetic, and that they leave training alone.

tests/runs/test_resume.py resumes runs with them.
"""

import pytest
import torch

from sparsepretrain.training import loop, validation
from sparsepretrain.training.ema import EMA
from support.tiny_runs import assert_equal_bits, final_state, metrics


def weights(t):
    return {name: p.detach().clone() for name, p in t.model.named_parameters()}


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.99996])
def test_the_average_is_the_weighted_mean_without_the_initial_weights(decay):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    ema = EMA(model, decay)
    history = []
    for _ in range(7):
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        history.append(model.weight.detach().double().clone())
        ema.update()
    shares = torch.tensor([decay ** (6 - i) for i in range(7)], dtype=torch.float64)
    expected = sum(s * w for s, w in zip(shares / shares.sum(), history, strict=True))
    assert torch.allclose(ema.averages["weight"].double(), expected, atol=1e-6)


@pytest.mark.parametrize("method", ["sste", "asp", "bimask"])
def test_evaluation_leaves_weights_and_averages_unchanged(tiny, method):
    t = tiny.build("ema=0.9", f"sparsity={method}")
    for _ in range(4):
        loop.train_step(t)
    before, averages = weights(t), {k: v.clone() for k, v in t.ema.averages.items()}
    buffers = {k: v.clone() for k, v in t.model.named_buffers()}
    validation.evaluate(t, "validation", 1, final=True)
    assert_equal_bits(weights(t), before)
    assert_equal_bits(t.ema.averages, averages)
    assert t.ema.updates == 4
    assert_equal_bits({k: v.clone() for k, v in t.model.named_buffers()}, buffers)


def test_averages_add_columns_and_a_failing_evaluation_puts_the_weights_back(tiny, monkeypatch):
    t = tiny.build("ema=0.9")
    for _ in range(3):
        loop.train_step(t)
    before = weights(t)
    both = validation.evaluate(t, "validation", 1, final=False)
    with t.ema.applied(t.sparsifier):
        inside = weights(t)
        projected = next(iter(t.sparsifier.layers.values()))
        seen = projected.operands.project(projected.weight).forward
        assert (seen == 0).float().mean() == pytest.approx(0.5, abs=0.01)
        ema, t.ema = t.ema, None
        averaged = validation.evaluate(t, "validation", 1, final=False)
    assert_equal_bits(inside, ema.averages)
    raw = validation.evaluate(t, "validation", 1, final=False)
    assert both == raw | {f"ema_{name}": value for name, value in averaged.items()}
    assert raw["loss"] != averaged["loss"]
    t.ema, observe, calls = ema, t.task.observe, []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no metrics")
        return observe(*args, **kwargs)

    monkeypatch.setattr(t.task, "observe", fail)
    with pytest.raises(RuntimeError, match="no metrics"):
        validation.evaluate(t, "validation", 1, final=False)
    assert_equal_bits(weights(t), before)


@pytest.mark.parametrize("method", ["sste", "asp"])
def test_training_is_bit_exact_with_and_without_ema(tiny, method):
    plain = tiny.train(f"sparsity={method}")
    averaged = tiny.train(f"sparsity={method}", "ema=0.9")
    assert averaged.code == 0 and "2:4 in all" in averaged.output

    lines = metrics(averaged.directory)
    added = [{k for k in line if k.startswith("ema_")} for line in lines]
    assert added == [{"ema_loss", "ema_perplexity"} if "split" in x else set() for x in lines]
    raw = [{k: v for k, v in x.items() if not k.startswith("ema_")} for x in lines]
    assert raw == metrics(plain.directory)
    left, right = (final_state(run.directory)["model"] for run in (plain, averaged))
    assert_equal_bits(left, right)


def test_resume_from_a_run_without_ema_starts_averaging(tiny):
    first = tiny.train()
    more = tiny.train("steps=8", "ema=0.9", f"resume={first.directory}")
    assert more.code == 0
    assert final_state(more.directory)["ema_updates"] == 2
