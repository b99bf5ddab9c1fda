"""Orders of channels, and their folding into the layers before."""

import itertools

import pytest
import torch
import transformers

from sparsepretrain.models._families import roles_of
from sparsepretrain.pruning.layers import linear_layers, matrix_of
from sparsepretrain.pruning.permutation import best_order, folds_of, retained, try_fold
from support.families import small_config


@pytest.mark.parametrize("n, m, width", [(2, 4, 64), (1, 4, 32), (4, 8, 64), (2, 4, 4)])
def test_orders_are_permutations_that_keep_no_less(n, m, width):
    score = torch.rand(16, width) * torch.rand(width).exp()
    order = best_order(score, n, m)
    assert sorted(order.tolist()) == [*range(width)]
    assert retained(score[:, order], n, m) >= retained(score, n, m)


def test_large_channels_of_one_group_are_spread():
    score = torch.full((5, 16), 0.1)
    score[:, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    order = best_order(score, 1, 4)
    assert retained(score[:, order], 1, 4) == pytest.approx(5 * 10.0)


def test_orders_are_close_to_the_best_of_all():
    """Of eight channels there are 35 ways to make two groups of four."""
    torch.manual_seed(0)
    for _ in range(20):
        score = torch.rand(6, 8) ** 3
        every = [
            retained(score[:, [*first, *(c for c in range(8) if c not in first)]], 2, 4)
            for first in itertools.combinations(range(8), 4)
        ]
        own = retained(score[:, best_order(score, 2, 4)], 2, 4)
        assert retained(score, 2, 4) <= own <= max(every) + 1e-6
        assert own > min(every) + 0.5 * (max(every) - min(every))


FOLDING = {
    "llama": {"self_attn.o_proj", "mlp.down_proj"},
    "gpt2": {"attn.c_proj", "mlp.c_proj"},
    "opt": {"self_attn.out_proj", "fc2"},
    "gpt_neox": {"attention.dense", "mlp.dense_4h_to_h"},
    "phi3": {"self_attn.o_proj", "mlp.down_proj"},
    "qwen2": {"self_attn.o_proj", "mlp.down_proj"},
    "bloom": {"self_attention.dense", "mlp.dense_4h_to_h"},
}


@pytest.mark.parametrize("family", FOLDING)
def test_folded_orders_leave_logits_equal(family):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config(family)).double().eval()
    for parameter in model.parameters():  # biases and norms are not trivial
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    tokens = torch.arange(24).view(2, 12) % 64
    names = linear_layers(model)
    roles = roles_of(names)
    name = next(n for n in names if any(c.isdigit() for c in n))
    prefix = name[: next(i for i, c in enumerate(name) if c.isdigit()) + 1]
    layers = linear_layers(model.get_submodule(prefix))

    @torch.no_grad()
    def logits():
        return model(input_ids=tokens).logits

    before = logits()
    folded = set()
    for fold in folds_of(layers, roles, model.config, 4):
        score = matrix_of(layers[fold.consumer]).abs()
        orders = fold.orders(score, 2, 4)
        matrix = matrix_of(layers[fold.consumer]).clone()
        order = try_fold(fold, layers, orders, logits, 1e-9)
        assert order is not None, fold
        assert torch.equal(matrix_of(layers[fold.consumer]), matrix[:, order])
        assert not torch.equal(order, torch.arange(len(order)))
        folded.add(fold.consumer)
    assert folded == FOLDING[family]
    assert (logits() - before).abs().max() < 1e-12 * before.abs().max()


def test_a_fold_that_changes_the_function_is_undone():
    """A norm on the inner axis, with weights of its own, depends on the order."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config("llama")).double().eval()
    block = model.model.layers[0]
    norm = torch.rand(block.mlp.down_proj.in_features, dtype=torch.float64)
    block.mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0] * norm,))
    layers = linear_layers(block)
    weights = {name: matrix_of(layer).clone() for name, layer in layers.items()}
    folds = folds_of(layers, roles_of(linear_layers(model)), model.config, 4)
    fold = next(f for f in folds if f.consumer == "mlp.down_proj")
    orders = torch.randperm(fold.size)[None]

    @torch.no_grad()
    def output():
        return model(input_ids=torch.arange(12)[None]).logits

    assert try_fold(fold, layers, orders, output, 1e-9) is None
    assert all(torch.equal(matrix_of(layers[name]), weights[name]) for name in layers)


def test_a_fold_that_no_output_proves_is_undone():
    """As of an expert that the first batch does not reach."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config("llama")).eval()
    layers = linear_layers(model.model.layers[0])
    weights = {name: matrix_of(layer).clone() for name, layer in layers.items()}
    fold = next(folds_of(layers, roles_of(linear_layers(model)), model.config, 4))
    orders = torch.stack([torch.randperm(fold.size) for _ in range(fold.parts)])
    for nothing in (torch.zeros(0), torch.zeros(3)):
        assert try_fold(fold, layers, orders, lambda empty=nothing: empty, 1e-4) is None
        assert all(torch.equal(matrix_of(layers[name]), weights[name]) for name in layers)
