"""The documented example of a user's own method, in the library and from the shell."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import registry
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity import Row
from support import ROOT
from support.small_loops import train
from support.sparse_cases import build

EXAMPLES = ROOT / "docs" / "examples"
PLUGIN = EXAMPLES / "my_method.py"


@pytest.fixture
def plugin(monkeypatch):
    others = {k: v for k, v in registry._registered["method"].items() if k != "mine"}
    monkeypatch.setitem(registry._registered, "method", others)
    modules = set(sys.modules)
    registry.load_plugin(str(PLUGIN))
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("sparsepretrain_plugin_"):
            del sys.modules[name]


def test_example_is_short():
    assert len(PLUGIN.read_text(encoding="utf-8").splitlines()) <= 33


@pytest.mark.parametrize("choice", ["magnitude", "random"])
def test_plugin_method_trains_and_densifies(plugin, choice):
    assert "mine" in sp.list_methods()
    model, optimizer, sparsifier = build("mine", {"choice": choice}, dtype=torch.float32)
    masks = {k: v.clone() for k, v in sparsifier.masks().items()}
    before = model.fc1.weight.detach().clone()
    train(model, optimizer, 0, 3, micro=4)
    assert all(torch.equal(v, masks[k]) for k, v in sparsifier.masks().items())
    assert sparsifier.metrics()["flip_rate"] == 0
    assert (masks["fc1"].view(-1, 4).sum(1) == 2).all()
    assert torch.equal(masks["fc1"], sp.kernels.nm_mask(before)) == (choice == "magnitude")
    other, _, handle = build("mine", {"choice": choice}, dtype=torch.float32, seed=5)
    other.load_state_dict(model.state_dict())
    handle.load_state_dict(sparsifier.state_dict())
    assert torch.equal(handle.masks()["fc1"], masks["fc1"])
    sp.densify(model)
    assert not model.fc1.weight[~masks["fc1"]].any() and type(model.fc1) is nn.Linear


def test_a_gradient_rule_that_would_never_run_is_refused(plugin, monkeypatch):
    cls = registry.get("method", "mine")
    monkeypatch.setattr(cls, "sparse_row", property(lambda self: Row(A=self.nm("M∘W"))))
    with pytest.raises(ConfigError, match="adjust_gradient_ would never run"):
        build("mine", {}, dtype=torch.float32)


@pytest.mark.slow
def test_plugin_method_trains_from_the_shell(tiny):
    overrides = tiny.overrides("sparsity=mine", "steps=3", f"plugins=['{PLUGIN}']")
    configs = ["--config-dir", str(EXAMPLES / "my_configs")]
    command = [sys.executable, "-m", "sparsepretrain", "train", *configs, *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mine 2:4" in done.stdout + done.stderr
    assert "2:4 in all" in done.stdout + done.stderr
