"""Hugging Face's models and loops: Conv1D, save_pretrained, Trainer, Accelerate."""

import pytest
import torch
from torch import nn

import sparsepretrain as sp

transformers = pytest.importorskip("transformers")
FFN = ["*.mlp.c_fc", "*.mlp.c_proj"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def tokens(seed=0, batch=4):
    return torch.randint(50, (batch, 16), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", ["srste", "sste"])
def test_conv1d_equals_linear(method):
    """The group axis is in_features, which Conv1D stores first."""
    conv, linear = gpt2(), gpt2()
    for block in linear.transformer.h:
        for name in ("c_fc", "c_proj"):
            old = getattr(block.mlp, name)
            new = nn.Linear(*old.weight.shape)
            with torch.no_grad():
                new.weight.copy_(old.weight.t())
                new.bias.copy_(old.bias)
            setattr(block.mlp, name, new)
    handles = []
    for model in (conv, linear):
        handles.append(sp.sparsify(model, method, targets=FFN))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handles[-1].attach(optimizer)
        for step in range(2):
            model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, mask in handles[0].masks().items():
        weight = handles[0].layers[name].weight
        assert mask.shape == weight.shape
        assert (mask.view(-1, 4, mask.shape[1]).sum(1) <= 2).all()
        assert (mask.t() == handles[1].masks()[name]).float().mean() > 0.999
        torch.testing.assert_close(weight.t(), handles[1].layers[name].weight, rtol=1e-4, atol=1e-5)
    assert handles[0].metrics()["density"] == pytest.approx(handles[1].metrics()["density"])
    row = handles[0].coverage().layers[0]
    assert (row.kind, row.in_features, row.out_features) == ("Conv1D", 16, 64)


def test_conv1d_width_is_checked_along_in_features():
    model = nn.Sequential(transformers.pytorch_utils.Conv1D(8, 6))  # 6 in, 8 out
    with pytest.raises(ValueError, match="in_features = 6"):
        sp.sparsify(model, "ste", targets="*")


def test_save_pretrained_keeps_the_logits(tmp_path):
    model = gpt2().eval()
    sp.sparsify(model, "sste", targets=FFN)
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path / "sparse")
    sp.densify(model)
    torch.testing.assert_close(model(tokens()).logits, expected, rtol=0, atol=1e-6)
    model.save_pretrained(tmp_path / "dense")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "dense").eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    assert type(loaded.transformer.h[0].mlp.c_fc).__name__ == "Conv1D"
    assert ((loaded.transformer.h[0].mlp.c_fc.weight != 0).view(4, 4, 64).sum(1) <= 2).all()
