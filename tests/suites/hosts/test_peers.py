"""Other libraries of sparse training: the same masks on the same weights, the same losses.

They sparsify the weight of the forward, by magnitude; methods beyond that exist here only.
"""

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError

pytestmark = pytest.mark.hosts
STEPS = 6


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=generator) for _ in range(STEPS)]


def losses(model, optimizer, data):
    found = []
    for x in data:
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def weights(model):
    return [layer.weight for layer in (model[0], model[2])]


def groups(model, **more):
    own = weights(model)
    rest = [p for p in model.parameters() if all(p is not w for w in own)]
    return [{"params": own, **more}, {"params": rest}]


def test_torchaos_prune_optimizer_is_ste():
    """It projects after each step, so its first step is dense; it keeps the masters."""
    pat = pytest.importorskip("torchao.prototype.pat.optim")
    theirs, ours = net(), net()
    prox = {"prox_type": "NMSparseConstraint", "group_type": "KElementGrouper"}
    settings = {**prox, "k": 4, "n_nonzero": 2}
    base = torch.optim.AdamW(groups(theirs, **settings), lr=1e-2)
    optimizer = pat.PruneOptimizer(base, warmup_steps=0)
    handle = sp.sparsify(ours, "ste", targets="*", total_steps=STEPS, window={"start": 1 / STEPS})
    own = torch.optim.AdamW(groups(ours), lr=1e-2)
    handle.attach(own)
    assert losses(ours, own, batches()) == losses(theirs, optimizer, batches())
    dense = handle.dense_state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(dense[key], value), key


@pytest.mark.parametrize("at", [0.0])
def test_model_optimizers_sparse_magnitude_is_asp(at):
    sparsity = pytest.importorskip("modelopt.torch.sparsity.weight_sparsity")
    theirs, ours = net(), net()
    theirs = sparsity.sparsify(theirs, "sparse_magnitude")
    handle = sp.sparsify(ours, "asp", targets="*", at=at)
    masks = handle.masks()
    for name, mask in masks.items():
        assert torch.equal(mask, theirs.get_submodule(name)._weight_mask.bool()), name
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    own = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    handle.attach(own)
    assert losses(ours, own, batches()) == losses(theirs, optimizer, batches())
    dense = handle.dense_state_dict()
    for name in masks:
        assert torch.equal(dense[f"{name}.weight"], theirs.get_submodule(name).weight), name


def test_layers_of_other_sparsity_libraries_are_named():
    """Their weight is computed, or no plain tensor."""
    sparsity = pytest.importorskip("modelopt.torch.sparsity")
    model = sparsity.sparsify(net(), "sparse_magnitude")
    with pytest.raises(ConfigError, match=r"computes its weight from another one .*exclude"):
        sp.sparsify(model, "ste", targets=["*"])


def test_quantized_layers_are_named():
    quantization = pytest.importorskip("torchao.quantization")
    model = net()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ConfigError, match=r"'0' has a weight of the class .*: dequantize it, or"):
        sp.sparsify(model, "ste", targets=["*"])
