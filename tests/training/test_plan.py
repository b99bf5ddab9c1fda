"""What --dry-run prints, and that it touches nothing."""

import gc
import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparsepretrain import config
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError, SparsePretrainError
from sparsepretrain.sparsity.coverage import collapsed
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.plan import bytes_per_entry, dry_run
from sparsepretrain.training.validation import evaluate
from sparsepretrain.training.world import World


def show(*overrides):
    run = config.load(["tracker.mode=disabled", "parallel.device=cpu", *overrides])
    out = io.StringIO()
    dry_run(run, Console(out))
    return out.getvalue()


def on_gpu(monkeypatch, gib=80):
    """Dry runs are those of a machine with an H100."""
    properties = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(World, "single", lambda device: World(torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(here / "cache"))
    yield
    assert not list(here.iterdir())


def test_the_published_run():
    text = show("model=gpt2_124m", "sparsity=sste", "sparsity.gamma=0.2")
    assert "sste 2:4: 24 layers, 56,623,104 of 124,373,760 parameters" in text
    rows = re.findall(r"^transformer\.h\.0–11\.mlp\.(c_\w+)  ×12 ", text, re.M)
    assert rows == ["c_fc", "c_proj"]
    assert "β·S(W) 2:4" in text and "MVUE(G) 2:4" in text
    assert "124,373,760 (124.4M)" in text
    assert "300,000 of 512 samples in 64 micro-batches; 157G tokens" in text
    # 6 per weight of a product (the embedding is one, as the output layer) and attention
    flops = float(re.search(r"FLOPs per token +│ ([\d.]+)M", text)[1]) * 1e6
    assert flops == pytest.approx(6 * (124_373_760 - 1024 * 768) + 12 * 12 * 768 * 1024, rel=0.03)


def test_the_half_baseline_has_fewer_parameters():
    assert "853,120 (0.9M)" in show("sparsity=dense")
    half = show("experiment=half")
    assert all(words in half for words in ("590,976 (0.6M)", "256 × 128", "in 8 layers, dense;"))
    # the 124M model without half of its 24 FFN matrices
    assert f"{124_373_760 - 12 * 768 * 3072:,} (" in show("model=gpt2_124m", "experiment=half")


@pytest.mark.parametrize(
    ("words", "row"),
    [
        ((), r"auto: none \(about 0:03 of training; blocks from 3:00 on\)"),
        (("model=gpt2_124m",), r"auto: blocks \(about \d+d [\d:]+ of training; blocks"),
        (("probe=descent", "steps=10000000"), r"auto: none \(probes need blocks that are not"),
        (("compile=blocks",), None),
    ],
)
def test_automatic_compilation_on_a_gpu(words, row, monkeypatch):
    assert "auto:" not in show(*words)
    on_gpu(monkeypatch)
    text = show(*words)
    assert re.search(f"compile +│ {row}", text) if row else "auto:" not in text


# two layers, because a plan takes time for each
BF16 = ("model=gpt2_124m", "model.n_layer=2", "precision=bf16")


@pytest.mark.parametrize(
    ("words", "gib", "row"),
    [
        (BF16, 40, r"8 → 64 fits: weights are cast and gradients summed 8 times less often"),
        (BF16, 20, r"8 → 32 fits: weights are cast and gradients summed 4 times less often"),
        ((*BF16, "parallel=ddp", "parallel.nproc=32"), 80, r"8 → 16 fits"),
        (
            (*BF16, "parallel=ddp", "parallel.nproc=6", "batch.size=72", "batch.micro=4"),
            80,
            "4 → 12",
        ),
        ((*BF16, "parallel=fsdp", "parallel.nproc=8"), 80, r"8 → 64 fits"),
        ((*BF16, "batch.size=24", "batch.micro=6"), 6, r"6 → 8 fits.* 1.33 times less"),
        ((*BF16, "activation_checkpointing=true"), 40, r"8 → 64 fits"),
        (("batch.micro=2",), 80, r"2 → 16 fits: gradients are summed 8 times less often"),
        ((*BF16, "precision=fp8_sim", "precision.dtype=bf16"), 80, r".*; fp8 scales change"),
        (("model=resnet_nano", "batch.micro=8"), 80, r"8 → 64 .*; batches of BatchNorm change"),
    ],
)
def test_a_larger_micro_batch_is_proposed_if_it_fits(words, gib, row, monkeypatch):
    on_gpu(monkeypatch, gib)
    text = " ".join(show(*words).replace("│", " ").split())
    assert re.search(f"batch.micro {row}", text)
    used, of = map(float, re.search(r"estimate ([\d.]+) [GM]iB of ([\d.]+) GiB", text).groups())
    assert of == gib and ("MiB of" in text or used <= 0.8 * gib)


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        (BF16, 8),  # nothing larger fits
        pytest.param((*BF16, "batch.micro=512"), 80, marks=pytest.mark.slow),  # already too large
        (("batch.micro=16",), 80),  # one micro-batch per step
        ((*BF16, "batch.size=64", "parallel=ddp", "parallel.nproc=8"), 80),
        ((*BF16, "batch.size=26", "batch.micro=13"), 12),  # 26 does not fit, nothing between
    ],
)
def test_no_micro_batch_is_proposed_that_does_not_fit_or_divide(words, gib, monkeypatch):
    on_gpu(monkeypatch, gib)
    assert "→" not in show(*words)


def test_no_micro_batch_is_proposed_on_a_cpu():
    assert "→" not in show(*BF16)


def test_simulated_fp8():
    text = show("precision=fp8_sim", "precision.dtype=bf16", "precision.recipe=reference")
    assert "fp8_sim reference: fprop e4m3×e4m3, dgrad and wgrad e5m2×e5m2; eval" in text
    assert "fp8_sim reference, bf16 elsewhere, cpu" in text
    assert "no peak is known for this device and precision" in text
    text = show("precision=fp8_sim", "sparsity=dense")
    assert "fp8_sim hybrid: fprop e4m3×e4m3, dgrad and wgrad e5m2×e4m3; eval" in text


def test_nothing_is_allocated(monkeypatch):
    made = []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a, **k: made.append(t) or to(t, *a, **k))
    show("model=gpt2_124m")
    assert all(t.device.type == "meta" or t.numel() <= 512**2 for t in made)


def test_equal_layers_share_a_row():
    names = ["s.0.b.0.fc", "s.0.b.1.fc", "s.1.b.0.fc", "s.1.b.2.fc", "head", "x.7.fc"]
    rows = [row for row, _ in collapsed([[name, "4 × 4"] for name in names])]
    assert rows == ["s.0.b.0–1.fc  ×2", "s.1.b.0,2.fc  ×2", "head", "x.7.fc"]
    assert collapsed([["h.0.fc", "4 × 4"], ["h.1.fc", "8 × 4"]])[1] == ["h.1.fc", "8 × 4"]


SLOW = [pytest.param(m, marks=pytest.mark.slow) for m in ("slope", "sste", "tsrste", "step")]


@pytest.mark.filterwarnings("ignore:StepAdamW switched")
@pytest.mark.parametrize("method", ["dense", "bimask", *SLOW])
def test_memory_is_what_training_keeps(tiny, method):
    """Against every tensor that a run of this method brings into being."""

    def alive():
        found = (t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
        return {t.untyped_storage()._cdata: t for t in found if t.device.type == "cpu"}

    phases = {"step": ["sparsity.clipping=[0.0,0.0]"], "tsrste": ["sparsity.refresh=1"]}
    words = [f"sparsity={method}", "precision=bf16", "optim.weight_decay=0", "steps=40"]
    words += phases.get(method, [])
    train_step(tiny.build(*words))  # makes the constants that all models share
    gc.collect()
    before = alive()
    t = tiny.build(*words)
    for _ in range(2):
        train_step(t)
    evaluate(t, "validation", 1, final=False)
    t.optimizer.zero_grad()
    gc.collect()
    stored = method != "dense"  # autocast drops its casts after each forward
    weights = {id(layer.weight) for layer in t.sparsifier.layers.values()}
    entries = sum(layer.weight.numel() for layer in t.sparsifier.layers.values())
    states = (s for state in t.optimizer.state.values() for s in state.values())
    moments = {s.untyped_storage()._cdata for s in states if isinstance(s, torch.Tensor)}
    others = {p.untyped_storage()._cdata for p in t.model.parameters() if id(p) not in weights}
    now = alive()
    new = now.keys() - before.keys() - moments - others
    kept = sum(now[key].untyped_storage().nbytes() for key in new)
    each, other = bytes_per_entry(t.run, t.sparsifier)
    expected = each.weight + each.operands * stored + each.masks
    assert kept / entries == pytest.approx(expected, rel=0.05)
    assert (*each[:2], *other[:2]) == (4, 4, 4, 4) and other[3:] == (2, 0)
    assert [each.moments, other.moments] == pytest.approx([8, 8], rel=0.01)


@pytest.mark.parametrize(("method", "most"), [("sste", 1.02), ("tsrste", 1.04), ("slope", 1.09)])
def test_a_sparse_run_needs_little_more_than_a_dense_one(method, most):
    text = show("model=gpt2_124m", f"sparsity={method}")
    assert 1 <= float(re.search(r"([\d.]+) times as much as a dense run", text)[1]) <= most


def test_small_runs_have_small_units():
    text = show("model.n_embd=32", "model.n_layer=1", "batch.micro=1")
    sparse = r"[\d.]+ KiB sparse weights \([\d.]+ bytes per weight\)"
    assert re.search(rf"estimate +│ [\d.]+ KiB: {sparse}, [\d.]+ KiB others", text)
    assert re.search(r"[\d.]+ [KM]iB activations per micro-batch \(1\)", text)
    assert "of 16 samples in 16 micro-batches;" in text
    assert "of 16 samples in 1 micro-batch;" in show("batch.micro=16")


def test_memory_follows_the_micro_batch():
    def activations(micro):
        text = show("model.n_layer=8", f"batch.micro={micro}", "task.sequence_length=256")
        number, unit = re.search(r"([\d.]+) (\wiB) activations", text).groups()
        return float(number) * {"M": 1, "G": 1024}[unit[0]]

    assert activations(16) == pytest.approx(4 * activations(4), rel=0.1)


def test_recomputed_blocks_keep_their_inputs():
    text = show("model.n_layer=8", "batch.micro=4", "activation_checkpointing=true")
    number = float(re.search(r"([\d.]+) MiB activations", text)[1])
    run = config.load(["model.n_layer=8"])
    inputs = 8 * 4 * 4 * run.task.sequence_length * run.model.n_embd / 2**20
    plain = show("model.n_layer=8", "batch.micro=4")
    assert inputs < number < 0.6 * float(re.search(r"([\d.]+) MiB activations", plain)[1])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.n_inner=66",), "sparsity.m = 4: layers"),
        (("sparsity.m=48", "sparsity.n=2"), "sparsity.m = 48: layers"),
        (("sparsity.targets=fnn",), "sparsity.targets: 'fnn' is no alias, layer or glob (did"),
        (("sparsity.targets=['*.nowhere.*']",), "or convolution matches '*.nowhere.*'"),
        (("sparsity.targets=[lm_head.*, ffn]",), "or convolution matches 'lm_head.*'"),
        (("sparsity.targets=['*lm_head']",), "shares its weight"),
        (("sparsity.targets=lm_head",), "shares its weight"),  # a layer by its name
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


def test_what_a_process_holds():
    words = ("model=gpt2_124m", "precision=bf16", "batch.size=512", "batch.micro=8")
    text = show(*words, "parallel=fsdp", "parallel.nproc=8")
    numbers, blocks, width, mib = 124_373_760, 7_079_424, 2, 2**20
    assert "1/8 of the above" in text
    assert f"{width * blocks / mib:.2f} MiB for a block" in text
    assert f"{width * (numbers - 12 * blocks) / mib:.2f} MiB gathered for the whole forward" in text
    assert f"{4 * numbers / mib:.2f} MiB gradients, which parallel.reduce_each" in text
    each = show(*words, "parallel=fsdp", "parallel.nproc=8", "parallel.reduce_each=true")
    assert "which parallel" not in each
    assert "memory per process" not in show(*words, "parallel=ddp", "parallel.nproc=8")
    two = show(*words, "sparsity=bimask", "parallel=fsdp", "parallel.nproc=8")
    assert f"{width * (blocks + 56_623_104 / 12) / mib:.2f} MiB for a block" in two


@pytest.mark.parametrize("method", ["dense", "sste"])
def test_size_of_a_checkpoint(tiny, method):
    words = (f"sparsity={method}", "steps=2", "ema=0.9")
    files = (tiny.train(*words).directory / "checkpoints" / "step_00000002").glob("*.safetensors")
    out = io.StringIO()
    dry_run(tiny.load(*words), Console(out))
    number, unit = re.search(r"checkpoint +│ ([\d.]+) ([KM])iB", out.getvalue()).groups()
    size = float(number) * {"K": 2**10, "M": 2**20}[unit]
    assert size == pytest.approx(sum(file.stat().st_size for file in files), rel=0.15)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["init.mask=nope"], ConfigError, "init.mask=nope: there is no such file, and no such"),
        (
            ["sparsity=sste", "init.mask=../masks.safetensors"],
            ConfigError,
            "sste has no mask that is",
        ),
        (["init.path=nowhere"], SparsePretrainError, "nowhere"),
    ],
)
def test_what_a_run_would_start_from_is_looked_for(words, error, message):
    Path("../masks.safetensors").touch()
    method = [] if "sparsity=sste" in words else ["sparsity=asp", "sparsity.at=0"]
    with pytest.raises(error, match=message):
        show("experiment=smoke", *method, *words)
