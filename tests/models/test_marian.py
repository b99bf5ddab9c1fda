"""Transformer-base on Marian's classes: sizes, initial weights, masks and the search."""

import dataclasses
import itertools

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

import sparsepretrain as sp
from sparsepretrain import config
from sparsepretrain.models.marian import Marian, MarianOptions

TINY = MarianOptions(
    name="tiny", family="marian", vocab_size=40, max_position_embeddings=32, d_model=32,
    encoder_layers=2, decoder_layers=2, attention_heads=4, ffn_dim=48, ffn_factor=1.0,
    activation="relu", dropout=0.1, attention_dropout=0.0, activation_dropout=0.0,
)  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Marian.build(TINY)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(1, 40, (3, 8), generator=generator)
    mask = torch.arange(8) < torch.tensor([[5], [8], [3]])
    previous = torch.randint(1, 40, (3, 8), generator=generator)
    return source, mask, previous


def parameters(options):
    """From the formulas: attention 4(d² + d), FFN 2df + d + f, LayerNorm 2d."""
    d, f = options.d_model, int(options.ffn_width)
    attention, ffn, norm = 4 * (d * d + d), 2 * d * f + d + f, 2 * d
    encoder = attention + ffn + 2 * norm
    decoder = 2 * attention + ffn + 3 * norm
    layers = options.encoder_layers * encoder + options.decoder_layers * decoder
    return options.vocab_size * d + layers


def test_transformer_base_has_61_million_parameters():
    """6 · 3,152,384 + 6 · 4,204,032 + 32768 · 512 (one embedding; the sinusoids are constants)."""
    options = config.load(["model=transformer_base"]).model
    with torch.device("meta"):
        built = Marian.build(options)
    total = sum(p.numel() for p in built.parameters())
    assert total == parameters(options) == 18_914_304 + 25_224_192 + 16_777_216 == 60_915_712


def test_one_embedding_and_constant_positions(model):
    shared = model.model.shared.weight
    assert model.lm_head.weight is shared
    assert model.model.encoder.embed_tokens.weight is shared
    assert model.model.decoder.embed_tokens.weight is shared
    assert not model.final_logits_bias.any()
    for stack in (model.model.encoder, model.model.decoder):
        assert "embed_positions.weight" in dict(stack.named_buffers())
        table = stack.embed_positions.weight
        assert table[0].tolist() == [0.0] * 16 + [1.0] * 16
        torch.testing.assert_close(table[3, :2], torch.tensor([3.0, 3 / 10000 ** (2 / 32)]).sin())
    assert all(p.requires_grad for p in model.parameters())


def test_initial_weights_are_fairseqs():
    torch.manual_seed(0)
    wide = dataclasses.replace(TINY, d_model=128, ffn_dim=512, vocab_size=500)
    built = Marian.build(wide)
    assert built.model.shared.weight.std().item() == pytest.approx(128**-0.5, rel=0.02)
    layer = built.model.decoder.layers[1]
    uniform = (6 / (128 + 512)) ** 0.5
    assert layer.fc1.weight.abs().max().item() == pytest.approx(uniform, rel=0.01)
    assert layer.fc2.weight.std().item() == pytest.approx(uniform / 3**0.5, rel=0.02)
    square = (6 / 256) ** 0.5
    assert layer.encoder_attn.out_proj.weight.abs().max().item() == pytest.approx(square, rel=0.01)
    halved = layer.encoder_attn.q_proj.weight.abs().max()
    assert halved.item() == pytest.approx(square / 2**0.5, rel=0.01)
    assert not layer.fc1.bias.any() and not layer.self_attn.k_proj.bias.any()
    torch.manual_seed(0)
    again = Marian.build(wide).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in built.state_dict().items())


@pytest.mark.parametrize(
    ("role", "count"),
    [("ffn", 2 * 4), ("ffn_out", 4), ("attention", 4 * (2 + 2 * 2)), ("all", 8 + 24)],
)
def test_roles_select_layers(model, role, count):
    sparsifier = sp.sparsify(model, "ste", targets=Marian.roles(TINY)[role])
    assert len(sparsifier.layers) == count
    assert not any("embed" in name or "lm_head" in name for name in sparsifier.layers)


def test_masked_logits_equal_transformers(model, batch):
    """Our attention without built masks against the class as it comes, in its eager form."""
    source, mask, previous = batch
    plain = MarianMTModel(MarianConfig(**model.config.to_dict())).eval()
    plain.config._attn_implementation = "eager"
    plain.load_state_dict(model.state_dict())
    expected = plain(input_ids=source, attention_mask=mask.long(), decoder_input_ids=previous)
    torch.testing.assert_close(Marian.logits(model.eval(), *batch), expected.logits)


def test_masks_need_no_device_synchronization(batch):
    """On the meta device a look would fail; on a GPU it would wait."""
    with torch.device("meta"):
        model = Marian.build(TINY)
    logits = Marian.logits(model, *(part.to("meta") for part in batch))
    assert logits.shape == (3, 8, 40)


def scored(model, source, mask, tokens):
    """Log-probability of the hypothesis ``tokens`` of one row."""
    previous = torch.tensor([[0, *tokens[:-1]]])
    logp = Marian.logits(model, source, mask, previous).log_softmax(-1)[0]
    return sum(logp[i, token].item() for i, token in enumerate(tokens))


def sharpened(options=TINY):
    """A model whose choices are not ties: large weights."""
    torch.manual_seed(3)
    model = Marian.build(options).eval()
    with torch.no_grad():
        model.model.shared.weight.mul_(1.5)
        for layer in model.model.decoder.layers:
            layer.encoder_attn.v_proj.weight.mul_(4)
            layer.fc2.weight.mul_(3)
    return model


@torch.no_grad()
@pytest.mark.parametrize("method", ["dense", "sste"])
def test_greedy_search_takes_the_best_token_each_time(batch, method):
    """On sparse layers too, with the cache of keys and values against whole forwards."""
    model = sharpened()
    sp.sparsify(model, method, targets=Marian.roles(TINY)["all"], total_steps=10)
    source, mask, _ = batch
    model.eval()
    end = 0
    found = Marian.generate(model, source, mask, end=end, length=6, beams=1, length_penalty=1.0)
    for row, hypothesis in enumerate(found):
        tokens = [end]
        while len(tokens) < 7 and (len(tokens) == 1 or tokens[-1] != end):
            own = source[row : row + 1], mask[row : row + 1], torch.tensor([tokens])
            tokens.append(int(Marian.logits(model, *own)[0, -1].argmax()))
        assert hypothesis == [token for token in tokens if token != end]


@torch.no_grad()
@pytest.mark.parametrize("penalty", [0.0, 3.0])
def test_exhaustive_beam_finds_the_best_hypothesis(batch, penalty):
    """Vocabulary 6, at most 3 tokens: all hypotheses can be listed."""
    model = sharpened(dataclasses.replace(TINY, vocab_size=6))
    source, mask, _ = batch
    source = source % 5 + 1
    found = Marian.generate(model, source, mask, end=0, length=3, beams=36, length_penalty=penalty)
    words = range(1, 6)
    finished = [(*w, 0) for n in range(3) for w in itertools.product(words, repeat=n)]
    every = finished + list(itertools.product(words, repeat=3))
    for row in range(2):
        one, other = source[row : row + 1], mask[row : row + 1]
        score = {h: scored(model, one, other, h) / len(h) ** penalty for h in every}
        best = max(score, key=score.__getitem__)
        assert tuple(found[row]) == tuple(t for t in best if t), (found[row], best)


def test_generate_respects_length_and_end_and_leaves_the_model_unchanged(model, batch):
    source, mask, previous = batch
    model.eval()
    before = Marian.logits(model, source, mask, previous)
    name = model.config._attn_implementation
    for beams in (1, 4):
        limits = {"end": 39, "length": 5, "beams": beams, "length_penalty": 0.0}
        found = Marian.generate(model, source, mask, **limits)
        assert any(found) and all(len(h) <= 5 and 39 not in h for h in found)
    assert model.config._attn_implementation == name
    torch.testing.assert_close(Marian.logits(model, source, mask, previous), before)
