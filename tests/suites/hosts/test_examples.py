"""The scripts of docs/examples/hosts, as they are: each trains and hands over 2:4 weights."""

import runpy
from pathlib import Path

import pytest
import torch

import sparsepretrain as sp
from sparsepretrain.kernels import nm_mask

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]
PLACE = Path(__file__).parents[3] / "docs/examples/hosts"
SCRIPTS = sorted(file.stem for file in PLACE.glob("*.py"))
CONFIGURES = {"torchtitan_config": "sparse_debug", "litgpt_pretrain": "initialize_weights"}
"""Scripts that configure a host, which test_torchtitan.py and test_litgpt.py run."""


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Return a function that runs a script in an empty directory and returns its globals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda name: runpy.run_path(str(PLACE / f"{name}.py"))


def test_every_script_is_tested():
    assert set(CONFIGURES) < set(SCRIPTS)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in CONFIGURES])
def test_scripts_train_and_hand_over_sparse_weights(name, ran):
    names = ran(name)
    model = names.get("module", names["model"]) if "model" in names else names["module"]
    handle = sp.sparsifier_of(getattr(model, "module", model))
    assert handle.completed_steps == names.get("steps", 8 if name == "nanochat_model" else 4)
    assert handle.prove().holds
    dense = handle.dense_state_dict()
    for layer_name, layer in handle.layers.items():
        weight = dense[f"{layer_name}.weight"]
        assert torch.equal(weight, weight * nm_mask(weight, dim=layer.in_dim)), layer_name
    for file in Path().glob("sparse.pt*"):
        saved = torch.load(file)
        assert saved.keys() == dense.keys()


@pytest.mark.parametrize(("name", "attribute"), CONFIGURES.items())
def test_configuring_scripts_run(name, attribute, ran):
    assert callable(ran(name)[attribute])
