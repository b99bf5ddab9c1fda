"""What goes wrong around ``attach`` is said: it was forgotten, or the weights are sharded."""

import copy
import warnings

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from support.small_loops import said
from support.small_models import Net
from support.sparse_cases import sparsify


def train(model, optimizer, steps=3):
    for _ in range(steps):
        x = torch.randn(8, 16, dtype=torch.float64)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["plain", "fused", "closure"])
def test_forgotten_attach_warns_once(kind, recwarn):
    """Fused optimizers do not bump the version of a weight; a loop may drop the handle at once."""
    model = Net()
    sparsify(model, "srste")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused")
    if kind == "closure":
        for _ in range(2):
            optimizer.step(lambda: model(torch.ones(4, 16).double()).sum().backward())
    train(model, optimizer)
    (message,) = said(recwarn)
    assert "'fc1' (srste)" in message
    assert "sparsifier.attach(optimizer)" in message
    assert recwarn[0].filename == __file__, "points at the loop"


def test_correct_loops_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        model, other = Net(), Net()
        handle = sparsify(model, "srste")
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()  # changes nothing: some frameworks do this to initialize
        train(other, torch.optim.SGD(other.parameters(), lr=0.1))  # holds no sparse weight
        handle.attach(optimizer)
        train(model, optimizer)
        handle.detach()  # on purpose
        train(model, optimizer)
        sparsify(other, "ste")
        sp.densify(other)
        train(other, torch.optim.SGD(other.parameters(), lr=0.1))


def test_only_the_unattached_model_of_two_warns(recwarn):
    first, second = Net(), Net()
    handle, _ = sparsify(first, "ste"), sparsify(second, "sste")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    handle.attach(optimizer)
    train(nn.Sequential(first), optimizer)
    assert said(recwarn) == [], "no gradient has reached the second"
    train(second, optimizer)
    assert len(said(recwarn)) == 1 and "(sste)" in said(recwarn)[0]


def test_sharded_weights_are_refused(mesh):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    sharded, model = Net(), Net()
    before = copy.deepcopy(model)
    fully_shard(sharded, mesh=mesh)
    words = "'fc1' and 1 more layers is sharded"
    with pytest.raises(ConfigError, match=words):
        sparsify(sharded, "sste")
    assert type(sharded.fc1) is nn.Linear
    handle = sparsify(model, "sste")
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=words):
        handle.attach(torch.optim.AdamW(model.parameters()))
    before.fc2.weight = nn.Parameter(distribute_tensor(before.fc2.weight.detach(), mesh))
    with pytest.raises(ConfigError, match="'fc2' is sharded"):
        sparsify(before, "ste")
    assert sparsify(before, "ste", targets="fc1").layers.keys() == {"fc1"}, "the others may be"


def test_replaced_layers_are_named():
    model = Net()
    sparsifier = sparsify(model, "srste")
    model.fc1 = nn.Linear(16, 32, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (lambda: sparsifier.attach(optimizer), sparsifier.metrics, sparsifier.masks):
        with pytest.raises(ConfigError, match=r"fc1; sparsifier_of"):
            call()
    again = sp.sparsifier_of(model)
    again.attach(optimizer)
    train(model, optimizer)
    assert list(again.layers) == ["fc2"] and again.completed_steps == 3


COMPUTED = {
    "pruned": lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", amount=0.5),
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("attached", [False, True])
def test_a_weight_that_is_computed_since_sparsify_is_named(kind, attached):
    model = Net()
    handle = sparsify(model, "srste")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attached:
        handle.attach(optimizer)
    COMPUTED[kind](model.fc1)
    with pytest.raises(ConfigError, match=r"the weight of 'fc1' is computed from another tensor"):
        if attached:
            train(model, optimizer)
        else:
            handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_deepspeed_is_refused_by_name():
    inner = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1"})
    outer = type("Wrapper", (), {})()
    outer.optimizer = inner()
    for optimizer in (inner(), outer):
        with pytest.raises(ConfigError, match=r"DeepSpeed is not supported.*FSDP2"):
            sparsify(Net(), "ste").attach(optimizer)
