"""Methods that learn masks of weights that stay: the law of MaskPro, and what each promises."""

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import nm_mask
from sparsepretrain.sparsity.clock import Clock
from sparsepretrain.sparsity.layer_state import LayerState
from support.small_loops import train
from support.small_models import Net, draw
from support.sparse_cases import LEARNED, build, sparsify
from support.tiny_runs import assert_equal_bits

PATTERNS = [(2, 4), (1, 4), (3, 4), (2, 6), (4, 4)]
every_pattern = pytest.mark.parametrize(("n", "m"), PATTERNS)


def ordered_draws(logits, n):
    """All ordered draws of n entries without replacement, and log p of each, with a graph."""
    for order in itertools.permutations(range(len(logits)), n):
        left = list(range(len(logits)))
        log_p = torch.zeros((), dtype=logits.dtype)
        for chosen in order:
            log_p = log_p + logits[chosen] - logits[left].logsumexp(0)
            left.remove(chosen)
        yield order, log_p


def maskpro_layer(logits, n, m, seed=0):
    """Method and state of a layer (rows, columns) with these logits."""
    model = nn.Sequential(nn.Linear(logits.shape[1], logits.shape[0], bias=False).double())
    sparsifier = sp.sparsify(model, "maskpro", targets="0", n=n, m=m, seed=seed)
    state = model[0].sparsity
    with torch.no_grad():
        state.logits.copy_(logits)
    return sparsifier, state


@every_pattern
def test_drawn_masks_have_the_probabilities_of_draws_without_replacement(n, m):
    logits = draw(m) * 1.5
    rows = 20_000
    sparsifier, state = maskpro_layer(logits.repeat(rows, 1), n, m)
    mask = sparsifier.method.project_in_training(torch.ones(rows, m).double(), state).mask
    assert (mask.sum(1) == n).all()
    expected = {}
    for order, log_p in ordered_draws(logits, n):
        kept = tuple(sorted(order))
        expected[kept] = expected.get(kept, 0.0) + float(log_p.exp())
    assert sum(expected.values()) == pytest.approx(1.0)
    for kept, p in expected.items():
        row = torch.zeros(m, dtype=torch.bool).scatter_(0, torch.tensor(kept), True)
        share = float((mask == row).all(1).double().mean())
        error = math.sqrt(max(0.0, p * (1 - p)) / rows)
        assert abs(share - p) < 5 * error + 1e-12, (kept, share, p)


@every_pattern
def test_the_policy_gradient_is_that_of_the_probability_of_the_draw(n, m):
    """And so unbiased: the mean over all draws is the gradient of the expected loss."""
    logits = draw(64, m)
    sparsifier, state = maskpro_layer(logits, n, m)
    method = sparsifier.method
    difference = torch.tensor(0.75, dtype=torch.float64)
    state.tracker.fill_(0.25)
    drawn = method.project_in_training(torch.ones_like(logits), state).mask
    found = method.policy_gradient(state.logits.detach(), state, difference)
    assert float(state.tracker) == pytest.approx(0.99 * 0.25 + 0.01 * 0.75)
    for row, mask, gradient in zip(logits, drawn, found, strict=True):
        leaf = row.clone().requires_grad_()
        matches = []
        for order, log_p in ordered_draws(leaf, n):
            if set(order) == set(mask.nonzero().flatten().tolist()):
                (expected,) = torch.autograd.grad(log_p, leaf)
                matches.append(torch.allclose(gradient, 0.5 * expected, rtol=0, atol=1e-12))
        assert sum(matches) >= 1


def test_the_mean_of_the_policy_gradient_is_the_gradient_of_the_expected_loss():
    """Losses of all masks of a group, averaged over draws and written out."""
    n, m, rows = 2, 4, 40_000
    logits = draw(m)
    losses = {
        kept: float(v) for kept, v in zip(itertools.combinations(range(m), n), draw(6), strict=True)
    }
    leaf = logits.clone().requires_grad_()
    mean = sum(p.exp() * losses[tuple(sorted(o))] for o, p in ordered_draws(leaf, n))
    (expected,) = torch.autograd.grad(mean, leaf)
    sparsifier, state = maskpro_layer(logits.repeat(rows, 1), n, m)
    method = sparsifier.method
    mask = method.project_in_training(torch.ones(rows, m).double(), state).mask
    unit = torch.ones((), dtype=torch.float64)
    scores = method.policy_gradient(state.logits.detach(), state, unit)  # ∇ log p
    loss = torch.tensor([losses[tuple(row.nonzero().flatten().tolist())] for row in mask])
    products = scores * loss[:, None]
    error = (products.mean(0) - expected).abs()
    assert (error < 5 * products.std(0) / math.sqrt(rows)).all()


STRONG = {"maskllm": {"prior": 50.0}}
"""Options with which training begins exactly from the mask that it is given."""
EXPLORING = {"maskpro": {"logit": 1.0}, "maskllm": {"prior": 0.0}}


def learned(method):
    """Names of the Parameters of a net that the method trains."""
    ends = {"maskpro": "sparsity.logits", "maskllm": "sparsity.gates", "proxsparse": "weight"}
    return {f"{layer}.{ends[method]}" for layer in ("fc1", "fc2")}


@torch.no_grad()
def learn(model, method, scores):
    """Let the first layer have learned that the largest of these positive scores are kept."""
    state = model.fc1.sparsity
    if method == "maskpro":
        state.logits.copy_(scores)
    elif method == "proxsparse":
        model.fc1.weight.copy_(-scores)
    else:
        groups = scores.view(len(scores), -1, 4)
        for index, kept in enumerate(itertools.combinations(range(4), 2)):
            state.gates[..., index] = groups[..., kept].sum(-1)


@pytest.mark.parametrize("method", LEARNED)
def test_weights_are_frozen_and_masks_are_learned(method):
    model, optimizer, sparsifier = build(method)
    before = {k: v.clone() for k, v in model.named_parameters()}
    assert {k for k, v in model.named_parameters() if v.requires_grad} == learned(method)
    train(model, optimizer, 0, 3)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) is not (name in learned(method)), name
    assert sparsifier.completed_steps == 3
    assert str(sparsifier.prove()).startswith("2:4 in all")
    for name, weight in sparsifier.dense_state_dict().items():
        assert ((weight == 0) | (weight == before[name])).all(), name


@pytest.mark.parametrize("method", LEARNED)
def test_evaluation_export_and_flips_use_the_most_probable_mask(method):
    model, _optimizer, sparsifier = build(method, STRONG.get(method))
    weight = model.fc1.weight.detach().clone()
    first = sparsifier.masks()["fc1"]
    assert torch.equal(first, nm_mask(weight)), "training begins from the largest magnitudes"
    scores = draw(*weight.shape).abs()
    learn(model, method, scores)
    sparsifier.refresh()
    mask = nm_mask(scores)
    assert torch.equal(sparsifier.masks()["fc1"], mask)
    model.eval()
    x = draw(2, 16)
    y = model(x)
    dense = sparsifier.dense_state_dict()
    assert torch.equal(dense["fc1.weight"], weight * mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.densify(model)
    assert torch.equal(model(x), y) and torch.equal(model.fc1.weight, weight * mask)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("method", [name for name in LEARNED if name != "proxsparse"])
def test_training_draws_anew_in_each_step_and_once_for_all_forwards_of_it(method, stored):
    model, optimizer, sparsifier = build(method, EXPLORING[method])
    if stored:
        sparsifier.store_operands(torch.float64)
    x = draw(4, 16)
    drawn = []
    for step in range(3):
        with torch.no_grad():
            outputs = [model.train()(x), model(x)]
        assert torch.equal(*outputs)
        drawn.append(outputs[0])
        train(model, optimizer, step, step + 1)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("stored", [False, True])
def test_the_first_masks_stay_what_losses_are_compared_with(stored):
    model, optimizer, sparsifier = build("maskpro", {"logit": 1.0})
    if stored:
        sparsifier.store_operands(torch.float64)
    x = draw(4, 16)
    begun = []
    for step in range(3):
        with torch.no_grad():
            drawn = model.train()(x)
            with sparsifier.first_masks():
                begun.append(model(x))
            assert torch.equal(drawn, model(x)), "drawn masks are back"
        train(model, optimizer, step, step + 1)
    assert torch.equal(begun[0], begun[2])


def test_both_losses_see_the_same_draws_of_torch():
    model, _, sparsifier = build("maskpro", {"logit": 50.0})  # draws are the first mask
    torch.manual_seed(3)
    drawn = []

    def loss():
        drawn.append(torch.rand(5))
        return model(draw(4, 16)).square().mean()

    sparsifier.policy_step(loss)
    assert torch.equal(*drawn)
    assert all(not p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("method", [name for name in LEARNED if name != "proxsparse"])
def test_given_masks_are_begun_from(method):
    model, _, sparsifier = build(method, STRONG.get(method))
    given = {name: nm_mask(draw(*layer.weight.shape)) for name, layer in sparsifier.layers.items()}
    sparsifier.keep_masks(given)
    for name, mask in sparsifier.masks().items():
        assert torch.equal(mask, given[name])
    if method == "maskpro":
        assert torch.equal(model.fc1.sparsity.logits.detach(), 7.0 * given["fc1"])


def test_a_method_without_a_first_mask_takes_none():
    _, _, sparsifier = build("proxsparse")
    with pytest.raises(ConfigError, match="proxsparse has no mask that is fixed from the start"):
        sparsifier.keep_zeros()


def test_misuse_is_named():
    _model, optimizer, _sparsifier = build("maskpro")
    with pytest.raises(ConfigError, match=r"call sparsifier.policy_step\(loss_of_batch\)"):
        optimizer.step()
    _, _, other = build("ste")
    with pytest.raises(ConfigError, match="ste learns from a backward"):
        other.policy_step(lambda: torch.zeros(()))
    for method in LEARNED:
        with pytest.raises(ConfigError, match="window must be the whole run"):
            sparsify(Net(), method, window={"start": 0.5})


@pytest.mark.parametrize("method", LEARNED)
def test_copies_and_state_dicts(method):
    model, optimizer, _sparsifier = build(method)
    train(model, optimizer, 0, 3)
    twin = copy.deepcopy(model)
    other, _, its = build(method, seed=1)
    other.load_state_dict(model.state_dict())
    assert its.completed_steps == 3
    assert_equal_bits(other.state_dict(), model.state_dict())
    x = draw(2, 16)
    for each in (twin, other):
        assert torch.equal(each.train()(x), model.train()(x))
        assert torch.equal(each.eval()(x), model.eval()(x))


def test_draws_of_a_transposed_weight_are_by_position():
    """A Conv1D (in, out) draws what the Linear (out, in) draws."""
    logits = draw(8, 12)
    method, state = maskpro_layer(logits, 2, 4)[0].method, None
    masks = []
    for dim, stored in ((1, logits), (0, logits.t().contiguous())):
        state = LayerState(Clock(5, stored.device), "layer", 0, stored, dim)
        state.add_tensors(method.initial_state(stored, state))
        with torch.no_grad():
            state.logits.copy_(stored)
        mask = method.project_in_training(torch.ones_like(stored), state).mask
        masks.append(mask if dim == 1 else mask.t())
    assert torch.equal(*masks)


@pytest.mark.parametrize("method", LEARNED)
def test_a_model_on_the_meta_device_gets_the_first_masks_of_its_weights(method):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(16, 8))
    weights = {key: value.clone() for key, value in whole.state_dict().items()}
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(16, 8))
        sparsifier = sp.sparsify(empty, method, targets=["*"], total_steps=10)
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for key in ("weight", "bias"):
            getattr(empty[0], key).copy_(weights[f"0.{key}"])
    sparsifier.reset()
    sp.sparsify(whole, method, targets=["*"], total_steps=10)
    x = torch.randn(4, 16)
    assert torch.equal(empty.eval()(x), whole.eval()(x)) and sparsifier.prove().holds
