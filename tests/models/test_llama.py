"""Llama: sizes, agreement with transformers, roles, runs on documents."""

import math
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import sparsepretrain as sp
from sparsepretrain import config
from sparsepretrain.errors import ConfigError
from sparsepretrain.models.llama import Llama, LlamaOptions
from sparsepretrain.training.plan import check
from support.tiny_runs import assert_same_run, interrupted

TINY = {
    "name": "tiny", "family": "llama", "vocab_size": 50, "n_positions": 16, "n_embd": 16,
    "n_layer": 2, "n_head": 2, "n_inner": 48, "ffn_factor": 1.0, "activation": "silu",
    "rms_norm_eps": 1e-6, "dropout": 0.0,
}  # fmt: skip
LLAMA = ["model=llama_nano", "model.n_inner=40"]


def build(seed=0, **options):
    torch.manual_seed(seed)
    return Llama.build(LlamaOptions(**TINY | options))


def tokens():
    return torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("size", "width", "inner", "layers", "millions"),
    [("60m", 512, 1376, 8, 58), ("130m", 768, 2048, 12, 134),
     ("350m", 1024, 2736, 24, 368), ("1b", 2048, 5464, 24, 1340)],
)  # fmt: skip
def test_sizes_have_the_published_parameters(size, width, inner, layers, millions):
    run = config.load([f"model=llama_{size}"])
    with torch.device("meta"):
        model = Llama.build(run.model)
    count = sum(p.numel() for p in model.parameters())
    block = 4 * width**2 + 3 * width * inner + 2 * width
    assert count == 2 * run.model.vocab_size * width + layers * block + width
    assert round(count / 1e6) == millions
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    linears = [k for k, v in model.named_modules() if isinstance(v, nn.Linear) and k != "lm_head"]
    for role, per_block in (("ffn", 3), ("ffn_out", 1), ("attention", 4), ("all", 7)):
        hits = [k for k in linears if any(fnmatchcase(k, p) for p in Llama.roles(run.model)[role])]
        assert len(hits) == per_block * layers


@pytest.mark.parametrize(
    "method",
    [
        name if name in ("sste", "tsrste", "bimask") else pytest.param(name, marks=pytest.mark.slow)
        for name in sp.list_methods()
    ],
)
def test_every_method_fits_every_size(method):
    for size in ("60m", "350m"):  # widths that need padding, and others
        check(config.load([f"model=llama_{size}", f"sparsity={method}"]))


def test_a_width_that_the_pattern_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"5461 is not a multiple of 4"):
        check(config.load(["model=llama_1b", "model.n_inner=5461", "sparsity=ste"]))


def test_logits_and_gradients_equal_transformers():
    model = build()
    settings = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, rms_norm_eps=1e-6, use_cache=False,
    )  # fmt: skip
    settings._attn_implementation = "eager"
    other = LlamaForCausalLM(settings)
    other.load_state_dict(model.state_dict())
    ours, theirs = Llama.logits(model, tokens()), other(tokens()).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-7)


def test_a_sparse_model_exports_to_the_stock_class_with_equal_logits():
    model = build()
    sp.sparsify(model, "sste", targets=Llama.roles(None)["all"])
    expected = Llama.logits(model.eval(), tokens())
    stock = Llama.stock(sp.densify(model), None, None)
    assert type(stock) is LlamaForCausalLM
    torch.testing.assert_close(stock(tokens()).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["labels", "spans"])
def test_headed_models_export_to_the_stock_classes(head):
    options = LlamaOptions(**TINY)
    torch.manual_seed(0)
    model = Llama.build_headed(options, head, 2).eval()
    mask = torch.ones(3, 16, dtype=torch.bool)
    expected = Llama.scores(model, tokens(), mask, mask)
    stock = Llama.stock(model, options, head)
    if head == "labels":
        found = stock(tokens()[:1]).logits  # several rows need a padding token
        expected = expected[:1]
    else:
        out = stock(tokens())
        found = torch.stack([out.start_logits, out.end_logits], dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["sste", "tsrste"])
def test_resume_is_bit_exact_on_documents_with_muon_and_wsd(tiny, stop_after, method):
    overrides = [*LLAMA, f"sparsity={method}", "task.documents=true", "optim=muon", "schedule=wsd"]
    straight = tiny.train(*overrides, "name=straight").directory
    assert_same_run(straight, interrupted(tiny, stop_after, (2, 3), *overrides))


def test_initial_loss_is_that_of_a_uniform_guess():
    model = build()
    logits = Llama.logits(model, tokens())[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, tokens()[:, 1:].flatten())
    assert abs(loss.item() - math.log(50)) < 0.1
