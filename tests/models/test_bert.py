"""BERT and the gated BERT: sizes, agreement with other implementations, roles, options."""

import math
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.bert import modeling_bert

from sparsepretrain import registry

SIZES = {
    "vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24,
    "ffn_factor": 1.0, "layer_norm_eps": 1e-12, "dropout": 0.0,
}  # fmt: skip
FAMILIES = ["bert", "bert_geglu"]


def options(family, **changes):
    changes = {"activation": "gelu", **changes} if family == "bert" else changes
    return registry.get("model", family).Options(name="x", family=family, **SIZES | changes)


def build(family, **changes):
    """A model none of whose parameters is at its initial zero or one."""
    torch.manual_seed(0)
    model = registry.get("model", family).build(options(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tokens():
    return torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_select_layers(family):
    model, roles = build(family), registry.get("model", family).roles(options(family))
    linears = {k: m for k, m in model.named_modules() if isinstance(m, nn.Linear)}
    hits = {
        role: {k for k in linears if any(fnmatchcase(k, p) for p in patterns)}
        for role, patterns in roles.items()
    }
    assert hits["ffn"] | hits["attention"] == hits["all"] and not hits["ffn"] & hits["attention"]
    shapes = {tuple(linears[k].weight.shape) for k in hits["ffn"]}
    assert shapes == ({(24, 16), (16, 24)} if family == "bert" else {(24, 16), (16, 12)})
    assert len(hits["ffn"]) == 4
    assert hits["ffn_out"] == {k for k in hits["ffn"] if linears[k].out_features == 16}
    assert len(hits["attention"]) == (8 if family == "bert" else 4)
    heads = {"cls.predictions.transform.dense", "cls.predictions.decoder", "decoder"}
    assert set(linears) - hits["all"] <= heads


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_some_positions_are_those_of_all(family):
    recipe, model, x = registry.get("model", family), build(family), tokens()
    everything = model(x).logits if family == "bert" else model.decoder(model.encoder(x))
    assert everything.shape == (3, 12, 50)
    places = torch.tensor([0, 5, 12, 35])
    some = recipe.logits(model, x, places)
    torch.testing.assert_close(some, everything.flatten(0, 1)[places])
    assert recipe.logits(model, x, places[:0]).shape == (0, 50)
    hidden = recipe.encode(model, x)
    assert hidden.shape == (3, 12, 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_sees_both_sides_but_no_padding(family):
    recipe, model, x = registry.get("model", family), build(family), tokens()
    mask = torch.ones_like(x)
    mask[:, 8:] = 0
    changed = x.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 50
    plain, other = recipe.encode(model, x), recipe.encode(model, changed)
    assert not torch.allclose(plain[:, 0], other[:, 0])
    padded, same = recipe.encode(model, x, mask), recipe.encode(model, changed, mask)
    torch.testing.assert_close(padded[:, :8], same[:, :8])
    short = recipe.encode(model, x[:, :8])
    torch.testing.assert_close(padded[:, :8], short)


def test_bert_is_transformers_bert(tmp_path):
    model, x = build("bert"), tokens()
    model.save_pretrained(tmp_path)
    options = {"output_loading_info": True, "attn_implementation": "eager"}
    theirs, report = modeling_bert.BertForMaskedLM.from_pretrained(tmp_path, **options)
    assert not any(report.values()) and theirs.config.architectures == ["BertForMaskedLM"]
    assert theirs.config.hidden_act == "gelu"
    torch.testing.assert_close(model(x).logits, theirs.eval()(x).logits, rtol=1e-4, atol=1e-4)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def plain_gated_bert(state, x, heads, layers):
    """The architecture again, from its description, without modules."""

    def norm(h, name):
        centered = h - h.mean(-1, keepdim=True)
        h = centered / (centered.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return h * state[f"{name}.weight"] + state[f"{name}.bias"]

    length, width = x.shape[1], state["encoder.norm.weight"].numel()
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    pe = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    h = state["encoder.embedding.tokens.weight"][x] + state["encoder.embedding.scale"] * pe
    h = norm(h, "encoder.embedding.norm")
    for layer in range(layers):
        name = f"encoder.layers.{layer}"
        y = norm(h, f"{name}.norm1") @ state[f"{name}.attention.qkv.weight"].t()
        query, key, value = y.split(width, -1)
        out = torch.zeros_like(h)
        size = width // heads
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(size)
            out[..., part] = scores.softmax(-1) @ value[..., part]
        h = h + out @ state[f"{name}.attention.proj.weight"].t()
        y = norm(h, f"{name}.norm2") @ state[f"{name}.ffn.dense_in.weight"].t()
        half = y.shape[-1] // 2
        y = y[..., :half] * F.gelu(y[..., half:], approximate="tanh")
        h = h + y @ state[f"{name}.ffn.dense_out.weight"].t()
    return norm(h, "encoder.norm") @ state["encoder.embedding.tokens.weight"].t()


def test_gated_bert_equals_a_reference_implementation():
    model, x = build("bert_geglu"), tokens()
    plain = plain_gated_bert(model.state_dict(), x, heads=2, layers=2)
    torch.testing.assert_close(model.decoder(model.encoder(x)), plain, rtol=1e-4, atol=1e-4)
    assert model.decoder.weight is model.encoder.embedding.tokens.weight
    assert not any("bias" in k for k in model.state_dict() if "norm" not in k)
    assert "sinusoids" not in str(list(model.state_dict()))


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_have_the_stated_deviation(family):
    torch.manual_seed(1)
    sizes = options(family, vocab_size=1000, n_embd=64, n_inner=256)
    model = registry.get("model", family).build(sizes)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            error = 5 * 0.02 / math.sqrt(2 * parameter.numel())
            assert abs(parameter.std().item() - 0.02) < error, name
        elif "scale" in name:
            assert parameter.item() == 1 / 8
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


def test_gated_bert_drops_out_in_training_only():
    model, x = build("bert_geglu", dropout=0.3), tokens()
    recipe = registry.get("model", "bert_geglu")
    assert torch.equal(recipe.encode(model, x), recipe.encode(model, x))
    model.train()
    assert not torch.equal(recipe.encode(model, x), recipe.encode(model, x))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("bert", {"n_head": 3}), ("bert", {"ffn_factor": 0.33}), ("bert", {"ffn_factor": 0.0}),
     ("bert_geglu", {"n_inner": 25}), ("bert_geglu", {"n_embd": 15, "n_head": 3})],
)  # fmt: skip
def test_bad_options_are_refused(family, changes):
    assert not list(options(family).problems())
    assert [k for k, _ in options(family, **changes).problems()] == [next(iter(changes))]
