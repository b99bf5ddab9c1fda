"""Activation checkpointing changes memory, and nothing else."""

import copy

import pytest
import torch
from torch import nn

from sparsepretrain import config
from sparsepretrain.errors import ConfigError
from sparsepretrain.tasks import build_task
from sparsepretrain.training.assembly import build_model, sparsify_model
from sparsepretrain.training.recomputation import recompute_blocks

RECIPES = ("gpt2_nano", "bert_nano", "transformer_nano", "vit_nano", "mlp_nano")


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_every_recipe_are_bit_equal(recipe):
    run = config.load([f"model={recipe}", "sparsity=srste"])
    task, gradients = build_task(run), []
    for recomputes in (False, True):
        model = build_model(task, torch.device("cpu")).train()
        sparsify_model(run, task, model)
        if recomputes:
            recompute_blocks(model)
        torch.manual_seed(1)
        task.loss(model, task.example(2, torch.device("cpu")))[0].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        assert gradient is None or torch.equal(gradient, recomputed[name]), name
    assert sum(gradient is not None for gradient in plain.values()) > 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
        self.blocks = nn.ModuleList([block, copy.deepcopy(block)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_draws_repeat():
    torch.manual_seed(0)
    plain = Net()
    recomputed = copy.deepcopy(plain)
    recompute_blocks(recomputed)
    x = torch.randn(8, 6)
    saved = []
    for net in (plain, recomputed):
        torch.manual_seed(1)
        saved.append([])
        keep = lambda tensor, kept=saved[-1]: kept.append(tensor) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            net(x).square().sum().backward()
    for left, right in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    assert len(saved[1]) < len(saved[0])


def test_batch_norm_is_refused():
    with pytest.raises(ConfigError, match=r"^activation_checkpointing: .*BatchNorm"):
        recompute_blocks(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
