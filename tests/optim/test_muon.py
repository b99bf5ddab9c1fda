"""Muon for the matrices of blocks and AdamW for the rest, in runs and in anybody's loop."""

import copy

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError
from sparsepretrain.optim.muon import MuonAdamW, block_matrices
from support.tiny_runs import assert_equal_bits, assert_same_run, final_state, interrupted

COEFFICIENTS = 3.4445, -4.7750, 2.0315
MUON = ["optim=muon", "optim.lr=2e-3"]


class Net(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 12, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def loss_of(net, step):
    torch.manual_seed(50 + step)
    tokens = torch.randint(12, (4, 8))
    return nn.functional.cross_entropy(net(tokens).flatten(0, 1).double(), tokens.roll(1).flatten())


def orthogonalized(matrix, steps=5):
    """Newton-Schulz iterations x ← a·x + (b·G + c·G²)·x with G = x·xᵀ, in bf16 like torch."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x.bfloat16() / x.bfloat16().norm()
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def split(net):
    """Matrices of the blocks, and the other parameters."""
    matrices = block_matrices(net)
    return [[p for p in net.parameters() if (p in matrices) == kind] for kind in (True, False)]


def muon_adamw(net, lr=0.02, **muon):
    matrices, others = split(net)
    groups = [
        {"params": matrices, "weight_decay": 0.1, "matrices": True},
        {"params": others, "weight_decay": 0.0},
    ]
    muon = {"lr": lr, "adjust_lr_fn": "match_rms_adamw"} | muon
    return MuonAdamW(groups, muon, {"lr": lr / 4, "betas": (0.9, 0.95), "eps": 1e-8})


def train(net, optimizers, first, last):
    for step in range(first, last):
        loss_of(net, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_matrices_are_the_linear_layers_of_blocks():
    net = Net()
    names = {name for name, p in net.named_parameters() if p in block_matrices(net)}
    assert names == {f"blocks.{i}.{k}.weight" for i in (0, 1) for k in (0, 2)}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("adjust", "factor"),
    [("match_rms_adamw", lambda a, b: 0.2 * max(a, b) ** 0.5),
     ("original", lambda a, b: max(1, a / b) ** 0.5)],
)  # fmt: skip
def test_steps_follow_the_published_formula(nesterov, adjust, factor):
    """To fp64 rounding, given the iterations in bf16."""
    net = Net().double()
    optimizer = muon_adamw(net, nesterov=nesterov, adjust_lr_fn=adjust)
    momentum = {p: torch.zeros_like(p) for p in block_matrices(net)}
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        before = {p: p.detach().clone() for p in momentum}
        gradients = {p: p.grad.clone() for p in momentum}
        optimizer.step()
        for p, buffer in momentum.items():
            buffer.lerp_(gradients[p], 1 - 0.95)
            update = gradients[p].lerp(buffer, 0.95) if nesterov else buffer
            torch.testing.assert_close(
                optimizer.state[p]["momentum_buffer"], buffer, rtol=0, atol=1e-15
            )
            expected = before[p] * (1 - 0.02 * 0.1)
            expected -= 0.02 * factor(*p.shape) * orthogonalized(update).double()
            torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-15)


def test_other_tensors_are_those_of_adamw_at_their_own_rate():
    net = Net()
    optimizer = muon_adamw(net)
    _, others = split(net)
    copies = [p.detach().clone().requires_grad_() for p in others]
    adamw = torch.optim.AdamW(copies, lr=0.005, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        for own, other in zip(copies, others, strict=True):
            own.grad = other.grad.clone()
        optimizer.step()
        adamw.step()
        for own, other in zip(copies, others, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)
    assert [g.get("lr_scale", 1.0) for g in optimizer.param_groups] == [1.0, 0.25]


def test_a_loaded_state_continues_to_the_same_bits():
    net, straight = Net(), Net()
    optimizer = muon_adamw(net)
    train(net, [optimizer], 0, 3)
    resumed = copy.deepcopy(net)
    other = muon_adamw(resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(resumed, [other], 3, 6)
    train(straight, [muon_adamw(straight)], 0, 6)
    assert_equal_bits(resumed.state_dict(), straight.state_dict())


def test_masked_decay_enters_the_momentum():
    """SR-STE under Muon: the buffer holds the gradient with the decay of pruned weights."""
    net = Net()
    plain = copy.deepcopy(net)
    sparsifier = sp.sparsify(net, "srste", targets=["*.0"], decay=0.5)
    optimizer = muon_adamw(net)
    sparsifier.attach(optimizer)
    layer = net.blocks[0][0]
    weight, mask = layer.weight.detach().clone(), sparsifier.masks()["blocks.0.0"]
    sp.sparsify(plain, "ste", targets=["*.0"]).attach(torch.optim.SGD(plain.parameters(), lr=0.0))
    for model in (net, plain):
        loss_of(model, 0).backward()
    optimizer.step()
    gradient = plain.blocks[0][0].weight.grad + 0.5 * weight * ~mask
    found = optimizer.state[layer.weight]["momentum_buffer"]
    torch.testing.assert_close(found, 0.05 * gradient, rtol=1e-5, atol=1e-9)


def test_decoupled_decay_changes_the_weight_after_the_update():
    def after_a_step(method, **options):
        net = Net()
        sparsifier = sp.sparsify(net, method, targets=["*.0"], **options)
        optimizer = muon_adamw(net)
        sparsifier.attach(optimizer)
        mask = sparsifier.masks()["blocks.0.0"]
        loss_of(net, 0).backward()
        optimizer.step()
        return net.blocks[0][0].weight.detach(), mask

    decayed, mask = after_a_step("srste", decay=0.5, decay_on="weight")
    plain, _ = after_a_step("ste")
    torch.testing.assert_close(decayed, torch.where(mask, plain, plain * (1 - 0.02 * 0.5)))


def test_two_optimizers_of_a_loop_are_attached_together(recwarn):
    found = []
    for together in (True, False):
        net = Net()
        sparsifier = sp.sparsify(net, "srste", targets=["blocks.*"], decay=0.1)
        matrices, others = split(net)
        muon = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
        adamw = {"lr": 0.005, "betas": (0.9, 0.95), "weight_decay": 0.0}
        apart = [torch.optim.AdamW(others, **adamw), torch.optim.Muon(matrices, **muon)]
        optimizers = [muon_adamw(net)] if together else apart
        sparsifier.attach(*optimizers)
        train(net, optimizers, 0, 4)
        assert sparsifier.completed_steps == 4
        found.append([p.detach() for p in net.parameters()])
    assert_equal_bits(*found)
    assert not recwarn.list


def test_sparse_weights_in_two_optimizers_are_refused():
    net = Net()
    sparsifier = sp.sparsify(net, "ste", targets=["*"])
    matrices, others = split(net)
    with pytest.raises(ConfigError, match="one optimizer"):
        sparsifier.attach(torch.optim.Muon(matrices), torch.optim.AdamW(others))


@pytest.mark.parametrize("method", ["sste", "tsrste", "slope"])
def test_resume_is_bit_exact_with_muon(tiny, stop_after, method):
    overrides = [*MUON, f"sparsity={method}", "ema=0.9"]
    straight = tiny.train(*overrides, "name=straight")
    assert straight.code == 0
    assert_same_run(straight.directory, interrupted(tiny, stop_after, (2, 3), *overrides))
    state = final_state(straight.directory)["optimizer"]
    kinds = {name.rpartition("|")[2] for name in state}
    assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [(["optim=muon", "sparsity=step"], "step"),
     (["optim=muon", "parallel=fsdp"], "optim"),
     (["optim=muon", "optim.ns_steps=0"], "optim.ns_steps"),
     (["optim=muon", "optim.adjust_lr_fn=rms"], "optim.adjust_lr_fn")],
)  # fmt: skip
def test_impossible_settings_are_refused_by_key(tiny, overrides, key):
    with pytest.raises(ConfigError, match=key):
        tiny.train(*overrides)
