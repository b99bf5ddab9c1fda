"""Probes measure what they say, and change neither a run nor its continuation."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsepretrain.errors import ConfigError
from sparsepretrain.training import loop
from sparsepretrain.training.observer import Observer
from sparsepretrain.training.probes.estimator import (
    Estimator,
    EstimatorOptions,
    gradients,
    health,
)
from sparsepretrain.training.session import Setup
from support.tiny_runs import assert_equal_bits, final_state, interrupted, metrics

EVERY = tuple(f"probe.{n}.every=2" for n in ("descent", "scale", "lifetime", "estimator"))
ALL = ("probe=all", *EVERY, "probe.estimator.draws=2")
EXACT = ("batch.micro=2", "optim.lr=0.02", "clip=1000")


def lines(directory):
    found = map(json.loads, (directory / "probes.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time"} for line in found]


def probed(t, steps):
    """The lines of so many steps."""
    found = []
    t.log_probe = found.append
    for _ in range(steps):
        loop.train_step(t)
    return found


@pytest.mark.parametrize(
    ("method", "own", "stops"), [("sste", {"scale", "estimator"}, (3,)), ("srste", set(), ())]
)
def test_a_run_is_the_same_with_probes_and_continues_exactly(tiny, stop_after, method, own, stops):
    words = ("batch.micro=2", "ema=0.9", "model.dropout=0.1", f"sparsity={method}")
    without = tiny.train(*words).directory
    assert not (without / "probes.jsonl").exists()
    whole = tiny.train(*words, *ALL, "name=whole").directory
    again = interrupted(tiny, stop_after, stops, *words, *ALL) if stops else whole
    assert again != without, "what is asked for is measured"
    for directory in {whole, again}:
        assert metrics(directory) == metrics(without)
        state = final_state(directory)
        assert state["observers"].pop("lifetime")["layers"]
        assert_equal_bits(state, final_state(without))
    assert lines(whole) == lines(again)
    assert {line["probe"] for line in lines(whole)} == {"descent", "lifetime"} | own
    assert {line["step"] for line in lines(whole)} == {2, 4, 6}


def test_generators_and_running_statistics_are_left_alone(tiny):
    t = tiny.build("probe=descent", "probe.descent.every=1", "model.dropout=0.1")
    seen = []

    class Before(Observer):
        def after_step(self, session, values):
            session.model.register_buffer("statistic", torch.zeros(()))
            session.model.register_forward_pre_hook(lambda m, x: m.statistic.add_(1) and None)
            seen.append((torch.get_rng_state(), np.random.get_state()[1]))

    t.observers.insert(0, Before())
    assert len(probed(t, 1)) == 1
    assert torch.equal(torch.get_rng_state(), seen[0][0]) and not t.model.statistic
    assert (np.random.get_state()[1] == seen[0][1]).all()


@pytest.mark.parametrize("method", ["dense", "ste", "sste"])
def test_descent_probe_equals_fp64_formulas(tiny, method):
    none = ("sparsity.mvue=none",) if method == "sste" else ()
    t = tiny.build(*EXACT, *none, f"sparsity={method}", "probe=descent", "probe.descent.every=1")
    (_, line) = probed(t, 2)
    t = tiny.build(*EXACT, *none, f"sparsity={method}")
    loop.train_step(t)
    model, masks = copy.deepcopy(t.model).double(), t.sparsifier.masks()
    batches = t.batches.again(1)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    items = sum(map(t.task.count, batches))

    def loss(**layers):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(layers[name])
        return sum(t.task.loss(model, batch)[0] for batch in batches) / items

    base = loss(**before)
    base.backward()
    gradients = {k: p.grad.clone() for k, p in model.named_parameters()}
    loop.train_step(t)
    after = {k: p.detach().double() for k, p in t.model.named_parameters()}
    predicted = sum(((after[k] - before[k]) * gradients[k]).sum() for k in before)
    assert line["predicted"] == pytest.approx(float(predicted), rel=1e-4)
    for epsilon in (1.0, 0.1, 0.01):
        moved = {k: before[k] + epsilon * (after[k] - before[k]) for k in before}
        change = float((loss(**moved) - base).detach())
        # losses of fp32 differ by a few units in the last place
        assert line[f"actual_{epsilon:g}"] == pytest.approx(change, rel=1e-3, abs=2e-6)
    held = dict(after)
    for name, layer in t.sparsifier.layers.items():
        weight = after[f"{name}.weight"]
        if method == "sste":  # of what lies below the second largest S takes nothing more
            magnitude = weight.abs().unflatten(layer.sparsity.dim, (-1, 4))
            low = magnitude.sort(layer.sparsity.dim + 1)[0].select(layer.sparsity.dim + 1, 1)
            low = low.repeat_interleave(4, layer.sparsity.dim)
            weight = weight.sign() * (weight.abs() - low).clamp(min=0)
        if method != "dense":
            held[f"{name}.weight"] = weight * masks[name]
    change = float((loss(**held) - base).detach())
    assert line["weights_only"] == pytest.approx(change, rel=1e-3, abs=2e-6)
    assert (line["weights_only"] == line["actual_1"]) == (method == "dense")


def test_scale_probe_equals_fp64_formula(tiny):
    t = tiny.build(*EXACT, "sparsity.beta=l1", "probe=scale", "probe.scale.every=2")
    (line,) = probed(t, 2)
    for name, layer in t.sparsifier.layers.items():
        weight = layer.weight.detach().double().movedim(layer.sparsity.dim, -1)
        weight = weight.unflatten(-1, (-1, 4))
        low = weight.abs().sort(-1)[0][..., 1:2]
        soft = weight.sign() * (weight.abs() - low).clamp(min=0)
        best = float((weight * soft).sum() / soft.square().sum())
        assert line[f"best/{name}"] == pytest.approx(best, rel=1e-5)
        assert line[f"beta/{name}"] == float(layer.sparsity.beta) != pytest.approx(best, rel=1e-3)


def test_lifetime_probe_equals_counts_of_the_masks(tiny):
    words = ("sparsity=ste", "optim.lr=0.05", "probe=lifetime", "probe.lifetime.every=4")
    t = tiny.build(*words, "probe.lifetime.bins=2", "steps=12")
    masks, gaps = [], []

    class Masks(Observer):
        def before_step(self, session):
            masks.append({k: m.numpy() for k, m in session.sparsifier.masks().items()})
            weights = {k: layer.weight.detach() for k, layer in session.sparsifier.layers.items()}
            gaps.append({k: grouped(k, w.abs().numpy()) for k, w in weights.items()})

    def grouped(name, values):
        dim = t.sparsifier.layers[name].sparsity.dim
        return np.moveaxis(values, dim, -1).reshape(-1, 4)

    t.observers.append(Masks())
    line = probed(t, 9)[1]
    assert line["step"] == 8
    counts, ages, flips, gap = dict.fromkeys(("deaths", "births", "resurrections"), 0), [], [], []
    for name in masks[0]:
        m = np.stack([grouped(name, step[name]) for step in masks[:9]])  # after 0 … 8 steps
        for k in range(1, 9):
            born = m[k] & ~m[k - 1]
            if k > 4:
                counts["deaths"] += (m[k - 1] & ~m[k]).sum()
                counts["births"] += born.sum()
                counts["resurrections"] += (born & m[: k - 1].any(0)).sum()
        changed = m[1:] != m[:-1]
        last = np.where(changed.any(0), 8 - changed[::-1].argmax(0), 0)
        ages += list(8 - last[m[8]])
        flips.append(changed.any(-1))
        magnitudes = np.sort(gaps[4][name], -1)
        ranks = np.argsort(np.argsort(magnitudes[:, 2] - magnitudes[:, 1], kind="stable"))
        gap.append(ranks * 2 // len(ranks))
    entries = sum(step.size for step in masks[0].values())
    for key, value in counts.items():
        assert line[key] == pytest.approx(value / entries / 4) and value
    for share in (10, 50, 90):
        assert line[f"age_{share}"] == np.quantile(ages, share / 100, method="inverted_cdf")
    flips, gap = np.concatenate(flips, 1), np.concatenate(gap)
    assert line["restless"] == pytest.approx((flips[4:].sum(0) > 1).mean())
    assert line["untouched"] == pytest.approx(1 - flips.any(0).mean())
    for k in (0, 1):
        assert line[f"flips_gap_{k}"] == pytest.approx(flips[4:, gap == k].mean())
    assert line["flips_gap_0"] > line["flips_gap_1"]


def test_estimator_health_measures_bias_and_variance():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    size = exact.square().sum()
    for bias in (0.0, 0.5):
        found = []
        for _ in range(400):
            noise = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)
            found.append(health("wgrad", exact, (1 + bias) * exact + 0.3 * noise))
        squares = torch.tensor([one["wgrad_bias"] for one in found])
        variances = torch.tensor([one["wgrad_variance"] for one in found])
        assert abs(squares.mean() - bias**2) < 4 * squares.std() / 20
        assert abs(variances.mean() - 0.09 * 30 / size) < 4 * variances.std() / 20
    assert health("wgrad", torch.zeros(2, 2), noise[:, :2, :2]) == {}


def test_estimator_probe_sees_the_gradients_of_the_step(tiny):
    t = tiny.build("probe=estimator", "probe.estimator.every=1", "probe.estimator.draws=300")
    probe, found = next(o for o in t.observers if o.name == "estimator"), {}

    class Gradients(Observer):
        def after_backward(self, session):
            layer = session.sparsifier.layers[probe._name]
            x, grad = probe._seen
            clock = (session.step, 0)
            assert torch.equal(gradients(layer, x, grad, clock)[1], layer.weight.grad)
            exact = gradients(layer, x, grad, clock, exact=True)[1]
            by_hand = grad.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
            by_hand = by_hand.t() if layer.sparsity.dim == 0 else by_hand
            assert torch.allclose(exact.double(), by_hand, atol=1e-7)
            found[probe._name] = probe._seen

    t.observers.insert(0, Gradients())
    lines = probed(t, 2)
    assert [line["layer"] for line in lines] == list(t.sparsifier.layers) == list(found)
    for line in lines:
        assert {*line} == {"step", "probe", "layer", "wgrad_variance", "wgrad_bias"}
        assert line["wgrad_variance"] > 0.1 and abs(line["wgrad_bias"]) < 0.02


def test_sdgp_estimator_reports_bias_without_variance(tiny):
    t = tiny.build("sparsity=sdgp", "probe=estimator", "probe.estimator.every=1")
    (line,) = probed(t, 1)
    assert {*line} == {"step", "probe", "layer", "dgrad_variance", "dgrad_bias"}
    assert line["dgrad_variance"] == pytest.approx(0, abs=1e-12) and line["dgrad_bias"] > 0.01


def test_estimator_probe_refuses_compiled_runs():
    session = SimpleNamespace(setup=Setup(compiled="blocks"))
    with pytest.raises(ConfigError, match="compile=none"):
        Estimator(EstimatorOptions(), session)
