"""What --dry-run prints, and that it touches nothing."""

from __future__ import annotations

import io
import re

import pytest
import torch

from sparsepretrain import config
from sparsepretrain.errors import ConfigError
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.plan import dry_run


def show(*overrides):
    run, plain = config.load(["tracker.mode=disabled", "parallel.device=cpu", *overrides])
    out = io.StringIO()
    dry_run(run, plain, Console(out))
    return out.getvalue()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    yield
    assert not list(tmp_path.iterdir())


def test_the_published_run():
    text = show("model=gpt2_124m", "sparsity=sste", "sparsity.gamma=0.2")
    assert "sste 2:4: 24 layers, 56,623,104 of 124,373,760 parameters" in text
    assert len(re.findall(r"^transformer\.h\.\d+\.mlp\.c_\w+ ", text, re.M)) == 24
    assert "β·S(W) 2:4" in text and "MVUE(G) 2:4" in text
    assert "124,373,760 (124.4M)" in text
    assert "300,000 of 512 samples in 64 micro-batches; 157G tokens" in text
    # 6 per weight of a product (the embedding is one, as the output layer) and attention
    flops = float(re.search(r"FLOPs per token +│ ([\d.]+)M", text)[1]) * 1e6
    assert flops == pytest.approx(6 * (124_373_760 - 1024 * 768) + 12 * 12 * 768 * 1024, rel=0.03)


def test_sizes_of_the_recipes():
    for model, width, layers in (("350m", 1024, 24), ("774m", 1280, 36), ("1558m", 1600, 48)):
        weights = layers * (12 * width**2 + 2 * width) + width + (50304 + 1024) * width
        assert f"{weights:,} (" in show(f"model=gpt2_{model}"), model


def test_the_half_baseline_has_fewer_parameters():
    assert "853,120 (0.9M)" in show("sparsity=dense")
    assert "590,976 (0.6M)" in show("experiment=half")
    assert "256 × 128" in show("experiment=half") and "in 8 layers, dense;" in show(
        "experiment=half"
    )
    # the 124M model without half of its 24 FFN matrices
    assert f"{124_373_760 - 12 * 768 * 3072:,} (" in show("model=gpt2_124m", "experiment=half")


def test_simulated_fp8():
    text = show("precision=fp8_sim", "precision.dtype=bf16", "precision.recipe=reference")
    assert "fp8_sim reference: fprop e4m3×e4m3, dgrad and wgrad e5m2×e5m2; eval" in text
    assert "fp8_sim reference, bf16 elsewhere, cpu" in text
    assert "simulated fp8 has no peak to compare with" in text
    text = show("precision=fp8_sim", "sparsity=dense")
    assert "fp8_sim hybrid: fprop e4m3×e4m3, dgrad and wgrad e5m2×e4m3; eval" in text


def test_nothing_is_allocated(monkeypatch):
    made = []
    original = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, *a, **k: made.append(t) or original(t, *a, **k)
    )
    show()
    assert all(t.device.type == "meta" for t in made)


def test_memory_follows_the_micro_batch():
    def activations(micro):
        text = show("model.n_layer=8", f"batch.micro={micro}", "task.sequence_length=256")
        return float(re.search(r"([\d.]+) GiB activations", text)[1])

    assert activations(16) == pytest.approx(4 * activations(4), rel=0.1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.n_inner=66",), "sparsity.m = 4: layers"),
        (("sparsity.m=48", "sparsity.n=2"), "sparsity.m = 48: layers"),
        (("sparsity.targets=fnn",), "sparsity.targets: 'fnn' is neither an alias nor a glob (did"),
        (("sparsity.targets=['*.nowhere.*']",), "or convolution matches '*.nowhere.*'"),
        (("sparsity.targets=[lm_head.*, ffn]",), "or convolution matches 'lm_head.*'"),
        (("sparsity.targets=['*lm_head']",), "shares its weight"),
    ],
)  # fmt: skip
def test_refusals(overrides, words):
    with pytest.raises(ConfigError) as caught:
        show(*overrides)
    assert words in str(caught.value)
    assert all("\n" not in m and m.startswith("sparsity") for m in caught.value.messages)


@pytest.mark.parametrize(
    ("targets", "layers"), [("attention", 8), ("all", 16), ("['*.h.0.mlp.*']", 2)]
)
def test_targets(targets, layers):
    assert f"sste 2:4: {layers} layers" in show(f"sparsity.targets={targets}")
