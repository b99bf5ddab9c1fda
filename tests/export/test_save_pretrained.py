"""Saving live sparse models for other libraries."""

import copy
import json
import warnings

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.export import save_onnx
from sparsepretrain.export.audit import audit
from support.families import small_config
from support.small_models import Net

OPTIONS = {
    "ste": {},
    "sste": {},
    "tsrste": {},
    "bimask": {},
    "asp": {"at": 0.0},
    "slope": {"adapters": {"rank": 4, "start": 0.0}},
    "sdgp": {},
    "dense": {},
}


def gpt2():
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(small_config("gpt2")).eval()


def sparsify(model, method):
    return sp.sparsify(model, method, targets=["*.mlp.*"], total_steps=10, **OPTIONS[method])


@pytest.mark.parametrize("method", OPTIONS)
def test_the_dense_state_dict_is_that_of_the_densified_model(method):
    model = gpt2()
    handle = sparsify(model, method)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = handle.dense_state_dict()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # folded adapters
        dense = sp.densify(copy.deepcopy(model)).state_dict()
    assert state.keys() == dense.keys()
    assert all(torch.equal(state[key], dense[key]) for key in dense)


@pytest.mark.parametrize("method", ["sste", "slope"])
def test_a_saved_model_loads_elsewhere_with_equal_logits(tmp_path, method):
    model = gpt2()
    sparsify(model, method)
    tokens = torch.arange(32)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        sp.save_pretrained(model, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    about = json.loads((tmp_path / "sparsity.json").read_text())
    assert about["method"] == method and len(about["layers"]) == 4
    if method == "sste":
        weight = loaded.transformer.h[0].mlp.c_fc.weight
        assert ((weight != 0).unflatten(0, (-1, 4)).sum(1) <= 2).all()


def test_the_files_say_which_layer_has_which_pattern(tmp_path):
    model = gpt2()
    patterns = {"*h.0.mlp.c_fc": "1:4", "*h.1.mlp.c_fc": "dense"}
    handle = sp.sparsify(model, "srste", targets=["*.mlp.*"], patterns=patterns)
    block = "transformer.h.{}.mlp.{}".format
    for directory, saved in (("whole", model), ("part", model.transformer)):
        sp.save_pretrained(saved, tmp_path / directory)
        about = json.loads((tmp_path / directory / "sparsity.json").read_text())
        start = "" if saved is model else "transformer."
        names = [block(*pair).removeprefix(start) for pair in ((0, "c_fc"), (0, "c_proj"))]
        assert about["pattern"] == "1:4+2:4"
        assert about["patterns"]["1:4"] == names[:1] and names[1] in about["patterns"]["2:4"]
        assert about["dense"] == [block(1, "c_fc").removeprefix(start)]
        assert not audit(tmp_path / directory).findings
    inputs = {"input_ids": torch.arange(32)[None]}
    found = save_onnx(LogitsOf(model), tmp_path / "model.onnx", inputs)
    assert {name.removeprefix("model.") for name in found} == set(handle.layers)


class LogitsOf(nn.Module):
    """A container of a model that returns nothing but logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids, use_cache=False).logits


def test_a_layer_with_two_names_is_under_both():
    model = nn.ModuleDict({"a": nn.Linear(16, 16)})
    model["b"] = model["a"]
    handle = sp.sparsify(model, "ste", targets=["a"])
    state = handle.dense_state_dict()
    assert set(state) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert torch.equal(state["a.weight"], state["b.weight"])
    assert (state["b.weight"] == 0).float().mean() == 0.5


def test_save_pretrained_of_transformers_warns_once(tmp_path):
    model = gpt2()
    sparsify(model, "ste")
    with pytest.warns(SparsePretrainWarning, match=r"sparsepretrain\.save_pretrained") as caught:
        model.save_pretrained(tmp_path / "a")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        model.save_pretrained(tmp_path / "b")
        model.state_dict()
        other = gpt2()
        sparsify(other, "dense").attach(torch.optim.SGD(other.parameters(), lr=0.1))
        other.save_pretrained(tmp_path / "c")


@pytest.mark.parametrize("function", ["save_state", "get_state_dict", "save_model"])
def test_accelerate_is_warned_of_where_it_collects_dense_weights(tmp_path, function):
    model = gpt2()
    sparsify(model, "ste")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SparsePretrainWarning)
        if function == "save_state":
            accelerator.save_state(tmp_path)  # training goes on from it
        elif function == "save_model":
            accelerator.save_model(model, tmp_path)
        else:
            model.save_pretrained(tmp_path, state_dict=accelerator.get_state_dict(model))
    ours = [str(w.message) for w in caught if w.category is SparsePretrainWarning]
    assert len(ours) == (function != "save_state")
    assert all(text.startswith(f"{function} takes the stored weights") for text in ours)


def test_a_model_without_save_pretrained_names_the_state_dict(tmp_path):
    model = Net()
    with pytest.raises(ConfigError, match="the model is not sparse"):
        model.save_pretrained = lambda *_, **__: None
        sp.save_pretrained(model, tmp_path)
    del model.save_pretrained
    with pytest.raises(ConfigError, match=r"Net has no save_pretrained.*dense_state_dict"):
        sp.save_pretrained(model, tmp_path)


@pytest.mark.parametrize("given", ["part", "container"])
def test_names_are_those_of_the_model_that_is_saved(tmp_path, given):
    model = gpt2()
    container = nn.Module()
    container.model = model
    sp.sparsify(model.transformer if given == "part" else container, "sste", targets=["*.mlp.*"])
    sp.save_pretrained(model, tmp_path)
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_modules_named_like_ours_and_second_handles_are_kept_apart():
    model = nn.ModuleDict({"sparsity": nn.Linear(8, 8), "a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    first = sp.sparsify(model, "ste", targets=["a"])
    second = sp.sparsify(model, "sste", targets=["b"])
    expected = {f"{name}.{kind}" for name in model for kind in ("weight", "bias")}
    for handle in (first, second):
        dense = handle.dense_state_dict()
        assert dense.keys() == expected
        assert all((dense[f"{name}.weight"] == 0).double().mean() == 0.5 for name in "ab")


@pytest.mark.parametrize("what", ["model", "blocks"])
def test_names_of_compiled_modules_are_those_of_the_model(tmp_path, what):
    model = gpt2()
    sparsify(model, "ste")
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    if what == "blocks":
        for i, block in enumerate(model.transformer.h):
            model.transformer.h[i] = torch.compile(block, backend="eager")
    compiled = torch.compile(model, backend="eager") if what == "model" else model
    sp.save_pretrained(compiled, tmp_path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, expected)
    about = json.loads((tmp_path / "sparsity.json").read_text())
    assert all(loaded.get_submodule(name) is not None for name in about["layers"])


def test_adapters_of_peft_are_merged_first(tmp_path):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), adapter)
    sparsify(model, "ste")
    with pytest.raises(ConfigError, match=r"PeftModel.* adapters .* merge_and_unload first"):
        sp.save_pretrained(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    sp.save_pretrained(model.merge_and_unload(), tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    fc = loaded.transformer.h[0].mlp.c_fc.weight
    assert float((fc == 0).float().mean()) == 0.5


@pytest.mark.parametrize(
    ("method", "options", "steps", "pattern"),
    [
        ("sdgf", {"until": 0.5}, 3, "3:4"),
        ("sdgf", {"until": 0.2}, 3, "2:4"),
        ("mdgf", {"until": 0.5}, 3, None),
        ("asp", {"at": 0.5}, 3, None),
        ("asp", {"at": 0.2}, 3, "2:4"),
    ],
)
def test_the_pattern_is_that_of_the_written_weights(tmp_path, method, options, steps, pattern):
    model = gpt2()
    handle = sp.sparsify(model, method, targets=["*.mlp.*"], total_steps=10, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle.attach(optimizer)
    model.train()
    for _ in range(steps):
        model(torch.arange(16)[None]).logits.square().mean().backward()
        optimizer.step()
    sp.save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "sparsity.json").read_text())["pattern"] == pattern


@pytest.mark.parametrize("wrap", [lambda m: m.transformer, lambda m: m])
def test_the_layers_have_the_names_of_the_saved_model(tmp_path, wrap):
    model = gpt2()
    sp.sparsify(model, "ste", targets=["*.mlp.*"])
    part = wrap(model)
    sp.save_pretrained(part, tmp_path)
    layers = json.loads((tmp_path / "sparsity.json").read_text())["layers"]
    loaded = type(part).from_pretrained(tmp_path)
    assert len(layers) == 4
    for name in layers:
        assert not loaded.get_submodule(name).weight.all()
