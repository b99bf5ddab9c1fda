"""GPT-2: parameter count, agreement with transformers, initialization, roles."""

import math
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import sparsepretrain as sp
from sparsepretrain import config
from sparsepretrain.models.bert import Bert
from sparsepretrain.models.gpt2 import GPT2, GPT2Options
from sparsepretrain.models.timm_image import TimmImage

TINY = {
    "name": "tiny", "family": "gpt2", "vocab_size": 50, "n_positions": 16, "n_embd": 16,
    "n_layer": 2, "n_head": 2, "n_inner": None, "ffn_factor": 1.0, "activation": "gelu_tanh",
    "bias": True, "dropout": 0.0,
}  # fmt: skip


def build(seed=0, **options):
    torch.manual_seed(seed)
    return GPT2.build(GPT2Options(**TINY | options))


@pytest.mark.parametrize(
    ("recipe", "count"),
    [("gpt2_124m", 124_373_760), ("gpt2_350m", 354_599_936),
     ("gpt2_774m", 773_582_080), ("gpt2_1558m", 1_556_840_000)],
)  # fmt: skip
def test_parameter_counts_equal_the_published_ones(recipe, count):
    run = config.load([f"model={recipe}"])
    with torch.device("meta"):
        model = GPT2.build(run.model)
    width, layers = run.model.n_embd, run.model.n_layer
    vocabulary, positions = run.model.vocab_size, run.model.n_positions
    norms = (2 * layers + 1) * width
    formula = (vocabulary + positions) * width + layers * 12 * width**2 + norms
    assert sum(p.numel() for p in model.parameters()) == formula == count
    assert all(p.is_meta for p in model.parameters())
    linears = [k for k, v in model.named_modules() if isinstance(v, nn.Linear) and k != "lm_head"]
    assert not any(isinstance(m, Conv1D) for m in model.modules())
    roles, hits = GPT2.roles(run.model), {}
    for role, per_block in (("ffn", 2), ("ffn_out", 1), ("attention", 2), ("all", 4)):
        hits[role] = [k for k in linears if any(fnmatchcase(k, p) for p in roles[role])]
        assert len(hits[role]) == per_block * layers
    if recipe == "gpt2_124m":
        coverage = sp.sparsify(model, "sste", targets=roles["ffn"]).coverage()
        assert [row.name for row in coverage.layers] == hits["ffn"]
        assert coverage.sparse_parameters == layers * 8 * width**2


def reference(model, bias):
    """transformers' own GPT-2 with our weights transposed back."""
    settings = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    settings._attn_implementation = "eager"
    other = GPT2LMHeadModel(settings).eval()
    convs = {k for k, v in other.named_modules() if isinstance(v, Conv1D)}
    ours = model.state_dict()
    state = {}
    for key, value in other.state_dict().items():
        if key in ours:
            transpose = key.removesuffix(".weight") in convs
            state[key] = ours[key].t() if transpose else ours[key]
        else:
            assert not bias and key.endswith("bias")
            state[key] = torch.zeros_like(value)
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("bias", [True, False])
def test_logits_and_gradients_equal_transformers(bias):
    model = build(bias=bias)
    with torch.no_grad():  # biases start at zero, which would prove nothing
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    other = reference(model, bias)
    x = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(0))
    ours, theirs = GPT2.logits(model, x), other(x).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    for left, right in zip(model.transformer.h, other.transformer.h, strict=True):
        own, expected = left.mlp.c_fc.weight.grad, right.mlp.c_fc.weight.grad
        torch.testing.assert_close(own.t(), expected, rtol=1e-3, atol=1e-6)


ACTIVATIONS = {
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x * torch.sigmoid(x),
}


def test_activations():
    vit = config.load(["model=vit_nano", "model.depth=1"]).model
    bert = config.load(["model=bert_nano", "model.n_layer=1"]).model
    x = torch.linspace(-4, 4, 101)
    for name, function in ACTIVATIONS.items():
        found = [build(activation=name, n_layer=1).transformer.h[0].mlp.act]
        with torch.device("meta"):
            block = Bert.build(replace(bert, activation=name)).bert.encoder.layer[0]
            found.append(block.intermediate.intermediate_act_fn)
            found.append(TimmImage.build(replace(vit, activation=name)).blocks[0].mlp.act)
        for module in found:
            torch.testing.assert_close(module(x), function(x), rtol=1e-5, atol=1e-6)


def test_initial_weights_have_the_stated_deviation():
    model = build(n_embd=128, n_layer=6, vocab_size=1000, bias=False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
            continue
        expected = 0.02 / math.sqrt(12) if name.endswith("c_proj.weight") else 0.02
        # standard errors: of a standard deviation σ/√(2n), of a mean σ/√n
        error = 5 * expected / math.sqrt(2 * parameter.numel())
        assert abs(float(parameter.detach().std()) - expected) < error, name
        assert abs(float(parameter.detach().mean())) < error * math.sqrt(2), name
    assert model.lm_head.weight is model.transformer.wte.weight
    for a, b in zip(build().parameters(), build().parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(build(seed=1).transformer.wte.weight, build().transformer.wte.weight)


def test_ffn_width_follows_n_inner_and_factor():
    assert build(n_inner=24, ffn_factor=0.5).transformer.h[0].mlp.c_fc.weight.shape == (12, 16)
    assert build(n_inner=24).transformer.h[0].mlp.c_fc.weight.shape == (24, 16)
