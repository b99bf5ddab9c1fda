"""Adapters of peft on sparse layers: masked, merged to N:M, and the same function."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.kernels import nonzeros_per_group
from sparsepretrain.sparsity.adapters import MaskedAdapter

peft = pytest.importorskip("peft")

BASES = {
    "asp": {"at": 0.0},
    "slope": {},
    "ste": {},
    "srste": {},
    "tsrste": {"dense_tail": 0.0},
    "bimask": {},
}
CONFIGS = {"lora": peft.LoraConfig, "loha": peft.LoHaConfig, "lokr": peft.LoKrConfig}
STEPS = 3


class Net(nn.Module):
    def __init__(self, kind="linear"):
        super().__init__()
        torch.manual_seed(0)
        made = {"linear": nn.Linear, "conv1d": lambda i, o: Conv1D(o, i)}[kind]
        self.up = made(16, 32)
        self.down = made(32, 16)
        for layer in (self.up, self.down):
            nn.init.normal_(layer.weight, std=0.3)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.relu(self.down(torch.relu(self.up(x)))))


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
NAMES = ["up", "down"]


def sparsify(model, method, **more):
    options = {"total_steps": 10, **BASES.get(method, {}), **more}
    return sp.sparsify(model, method, targets=["*up*", "*down*"], **options)


def adapted(model, kind="lora", **more):
    options = {"fan_in_fan_out": isinstance(model.up, Conv1D)} if kind == "lora" else {}
    config = CONFIGS[kind](r=2, target_modules=NAMES, **options, **more)
    return peft.get_peft_model(model, config)


def train(model, handle, steps=STEPS):
    """Train the adapters only, as peft leaves it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    handle.attach(optimizer)
    model.train()
    for _ in range(steps):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def require_nm(model, n=2, m=4):
    for name in NAMES:
        layer = model.get_submodule(name)
        dim = 0 if isinstance(layer, Conv1D) else 1
        assert (nonzeros_per_group(layer.weight, m, dim=dim) <= n).all(), name
        assert (layer.weight == 0).any()


@pytest.mark.parametrize("layer", ["linear", "conv1d"])
@pytest.mark.parametrize("order", ["sparsify first", "peft first"])
@pytest.mark.parametrize("method", BASES)
def test_merged_lora_is_nm_and_the_same_function(method, order, layer):
    model = Net(layer)
    if order == "sparsify first":
        handle = sparsify(model, method)
        wrapped = adapted(model)
    else:
        wrapped = adapted(model)
        handle = sparsify(wrapped, method)
    start = wrapped.eval()(X).detach()
    wrapped = train(wrapped, handle)
    before = wrapped(X).detach()
    assert not torch.allclose(before, start, atol=1e-3)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(X), before)
    dense = sp.densify(merged)
    torch.testing.assert_close(dense(X), before)
    require_nm(dense)


@pytest.mark.parametrize("kind", ["loha", "lokr"])
@pytest.mark.parametrize("method", ["asp", "slope", "ste"])
def test_other_adapters_with_a_delta_weight_merge_too(method, kind):
    model = Net()
    handle = sparsify(model, method)
    wrapped = train(adapted(model, kind), handle)
    before = wrapped(X).detach()
    dense = sp.densify(wrapped.merge_and_unload())
    torch.testing.assert_close(dense(X), before)
    require_nm(dense)


@pytest.mark.parametrize("method", ["asp", "slope", "ste"])
def test_adapters_start_at_the_function_of_the_sparse_model(method):
    model = Net()
    handle = sparsify(model, method)
    before = model.eval()(X).detach()
    wrapped = adapted(model)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    handle.attach(torch.optim.AdamW(trained))
    torch.testing.assert_close(wrapped.eval()(X), before)


@pytest.mark.parametrize("method", ["asp", "slope", "ste"])
def test_unmerged_adapters_compute_what_they_did(method):
    model = Net()
    handle = sparsify(model, method)
    plain = model.eval()(X).detach()
    wrapped = train(adapted(model), handle)
    before = wrapped(X).detach()
    for safe in (False, True):
        wrapped.merge_adapter(safe_merge=safe)
        torch.testing.assert_close(wrapped(X), before)
        wrapped.unmerge_adapter()
        torch.testing.assert_close(wrapped(X), before)
        with wrapped.disable_adapter():
            torch.testing.assert_close(wrapped(X), plain)


@pytest.mark.parametrize("method", ["asp", "slope", "ste"])
def test_stored_operands_follow_a_merge(method):
    model = Net()
    handle = sparsify(model, method)
    wrapped = train(adapted(model), handle)
    handle.store_operands()
    before = wrapped(X).detach()
    wrapped.merge_adapter()
    torch.testing.assert_close(wrapped(X), before)
    wrapped.unmerge_adapter()
    torch.testing.assert_close(wrapped(X), before)


def test_merging_nothing_changes_nothing():
    """A layer that only has another adapter, and a merge that is refused because of NaN."""
    model = Net()
    handle = sparsify(model, "ste")
    wrapped = adapted(model, init_lora_weights=False)
    wrapped.add_adapter("up only", peft.LoraConfig(r=2, target_modules=["up"]))
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    handle.attach(torch.optim.AdamW(trained))
    weight = model.down.base_layer.weight.detach().clone()
    wrapped.merge_adapter(["up only"])
    assert torch.equal(model.down.base_layer.weight, weight)
    assert model.down.merge_mask is None
    wrapped.unmerge_adapter()
    with torch.no_grad():
        model.down.lora_B["default"].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        model.down.merge(safe_merge=True, adapter_names=["default"])
    assert model.down.merge_mask is None
    assert torch.equal(model.down.base_layer.weight, weight)


def test_a_variant_that_is_added_later_is_refused():
    model = Net()
    handle = sparsify(model, "asp")
    wrapped = train(adapted(model), handle)
    wrapped.add_adapter("dora", peft.LoraConfig(r=2, target_modules=NAMES, use_dora=True))
    wrapped.set_adapter("dora")
    with pytest.raises(ConfigError, match="DoRA"):
        wrapped(X)


def test_two_adapters_merge_one_after_the_other():
    model = Net()
    handle = sparsify(model, "ste")
    wrapped = adapted(model, init_lora_weights=False)
    wrapped.add_adapter(
        "second", peft.LoraConfig(r=4, target_modules=NAMES, init_lora_weights=False)
    )
    wrapped.base_model.set_adapter(["default", "second"])
    wrapped = train(wrapped, handle)
    before = wrapped(X).detach()
    dense = sp.densify(wrapped.merge_and_unload())
    torch.testing.assert_close(dense(X), before)
    require_nm(dense)


def test_saved_adapters_are_masked_without_an_optimizer(tmp_path):
    model = Net()
    handle = sparsify(model, "slope")
    wrapped = train(adapted(model), handle)
    before = wrapped(X).detach()
    wrapped.save_pretrained(tmp_path)
    fresh = Net()
    sparsify(fresh, "slope")
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    assert sp.mask_adapters(loaded) == 2
    assert sp.mask_adapters(loaded) == 2  # again: nothing changes
    torch.testing.assert_close(loaded(X), before)
    dense = sp.densify(loaded.merge_and_unload())
    torch.testing.assert_close(dense(X), before)
    require_nm(dense)


def test_adapters_of_a_densified_model_keep_its_zeros():
    model = Net()
    handle = sparsify(model, "ste")
    wrapped = train(adapted(model), handle)
    before = wrapped(X).detach()
    sp.densify(wrapped)
    torch.testing.assert_close(wrapped(X), before)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(X), before)
    require_nm(merged)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_compute_the_same(way):
    model = Net()
    handle = sparsify(model, "asp")
    wrapped = train(adapted(model), handle)
    before = wrapped(X).detach()
    other = copy.deepcopy(wrapped) if way == "deepcopy" else pickle.loads(pickle.dumps(wrapped))
    torch.testing.assert_close(other(X), before)
    assert sum(isinstance(module, MaskedAdapter) for module in other.modules()) == 2
    dense = sp.densify(other.merge_and_unload())
    torch.testing.assert_close(dense(X), before)
    require_nm(dense)


def test_dropout_and_bias_of_lora_stay():
    """Against the formula, where dropout is drawn in the same order."""
    model = Net()
    handle = sparsify(model, "asp")
    wrapped = adapted(model, lora_dropout=0.5, lora_bias=True, init_lora_weights=False)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    handle.attach(torch.optim.AdamW(trained))
    layer = wrapped.base_model.model.up
    with torch.no_grad():
        layer.lora_B["default"].bias.normal_()
        torch.manual_seed(3)
        got = layer.train()(X)
        torch.manual_seed(3)
        low_rank = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        delta = low_rank * layer.scaling["default"] * handle.masks()["up"]
        expected = layer.base_layer(X) + nn.functional.dropout(X, 0.5) @ delta.t()
        expected += layer.lora_B["default"].bias * layer.scaling["default"]
    torch.testing.assert_close(got, expected)
    before = wrapped.eval()(X).detach()
    dense = sp.densify(wrapped.merge_and_unload())
    torch.testing.assert_close(dense(X), before)


def test_gradients_of_the_factors_are_those_of_the_masked_product():
    model = Net().double()
    handle = sparsify(model, "asp")
    wrapped = adapted(model, init_lora_weights=False).double()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    handle.attach(torch.optim.AdamW(trained))
    layer = wrapped.base_model.model.up
    x = X.double()
    layer(x).square().sum().backward()
    low, high = (f["default"].weight for f in (layer.lora_A, layer.lora_B))
    mask = handle.masks()["up"]
    with torch.no_grad():
        grad = (2 * layer(x)).t() @ x * mask * layer.scaling["default"]
        torch.testing.assert_close(low.grad, high.t() @ grad)
        torch.testing.assert_close(high.grad, grad @ low.t())


def test_autocast_keeps_its_dtype():
    model = Net()
    handle = sparsify(model, "slope")
    wrapped = train(adapted(model), handle)
    with torch.autocast("cpu", torch.bfloat16):
        layer = wrapped.base_model.model.up
        assert layer(X).dtype == torch.bfloat16
    torch.testing.assert_close(layer(X.bfloat16().float()), layer(X), rtol=0.05, atol=0.05)


def test_adapters_that_stay_dense_branches_are_left_alone():
    model = Net()
    handle = sparsify(model, "asp")
    wrapped = adapted(model, init_lora_weights=False).eval()
    before = wrapped(X).detach()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    handle.attach(torch.optim.AdamW(trained), mask_adapters=False)
    assert torch.equal(wrapped(X), before)
    assert not any(isinstance(module, MaskedAdapter) for module in wrapped.modules())


@pytest.mark.parametrize("case", ["sste", "vera", "ia3"])
def test_adapters_that_cannot_merge_to_nm_are_named(case):
    model = Net()
    handle = sparsify(model, "sste" if case == "sste" else "asp")
    if case in ("vera", "ia3"):
        config = peft.VeraConfig(r=2, target_modules=["up"])
        if case == "ia3":
            config = peft.IA3Config(target_modules=["up"], feedforward_modules=["up"])
        wrapped = peft.get_peft_model(model, config)
    else:
        wrapped = adapted(model)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    with pytest.warns(SparsePretrainWarning, match="merging it changes the outputs"):
        handle.attach(torch.optim.AdamW(trained))


@pytest.mark.parametrize("method", ["dense", "sdgp", "act24"])
def test_adapters_of_layers_with_dense_weights_are_plain(method):
    model = Net()
    handle = sparsify(model, method)
    wrapped = adapted(model, init_lora_weights=False).eval()
    before = wrapped(X).detach()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        handle.attach(torch.optim.AdamW(trained))
    torch.testing.assert_close(wrapped(X), before)
    torch.testing.assert_close(wrapped.merge_and_unload()(X), before)


def test_several_adapters_in_one_batch_are_refused():
    model = Net()
    handle = sparsify(model, "asp")
    wrapped = train(adapted(model), handle)
    with pytest.raises(ConfigError, match="adapter_names"):
        wrapped.base_model.model.up(X, adapter_names=["default"] * 8)


def test_dense_phases_see_dense_adapters():
    model = Net()
    handle = sparsify(model, "asp", at=0.5)
    wrapped = adapted(model, init_lora_weights=False).eval()
    before = wrapped(X).detach()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    handle.attach(torch.optim.AdamW(trained))
    torch.testing.assert_close(wrapped(X), before)


def test_globs_of_layers_leave_the_factors_of_adapters_dense():
    wrapped = adapted(Net())
    handle = sp.sparsify(wrapped, "ste", targets=["*up*", "*down*"])
    assert set(handle.layers) == {f"base_model.model.{name}.base_layer" for name in NAMES}
