"""Runs on images: every method on linear layers and convolutions, resume, workers, bad input."""

import pytest

from sparsepretrain import registry
from sparsepretrain.cli import main
from sparsepretrain.errors import ConfigError
from support.tiny_runs import TRAINING, assert_same_run, metrics

COMMON = (*TRAINING, "batch.size=8", "batch.micro=8", "eval.batches=2", "workers=0")
VIT = ("model=vit_nano", "model.width=16", "model.depth=1", "model.heads=2")
RESNET = ("model=resnet_nano", "model.width=[8,8,8,16]")
SMALL = {"vit": VIT, "resnet": RESNET}
METHODS = [name for name in registry.names("method") if not name.startswith("mine_")]


@pytest.fixture
def train(tiny, monkeypatch):
    """``train("vit", …)``: a small run on digits."""

    def start(model, *overrides, runs="runs"):
        where = f"runs_dir='{tiny.root / runs}'"
        monkeypatch.setattr(tiny, "overrides", lambda *more: [*COMMON, *SMALL[model], *more, where])
        return tiny.train(*overrides)

    return start


@pytest.mark.parametrize(
    ("model", "method"), [*(("resnet", method) for method in METHODS), ("vit", "sste")]
)
@pytest.mark.filterwarnings("ignore:StepAdamW switched")
def test_every_method_trains(train, model, method):
    if "convolution" not in registry.get("method", method).layer_kinds and model == "resnet":
        with pytest.raises(ConfigError, match=method):
            train(model, f"sparsity={method}", "sparsity.targets=all")
        return
    outcome = train(model, f"sparsity={method}", "sparsity.targets=all")
    assert outcome.code == 0, outcome.output
    lines = metrics(outcome.directory)
    evaluations = [line for line in lines if "split" in line]
    assert [line["step"] for line in evaluations] == [0, 4, 6]
    assert all(0 <= line["top1"] <= line["top5"] <= 100 for line in evaluations)
    assert len([line for line in lines if "split" not in line]) == 6
    assert "validation top1" in outcome.output and "images" in outcome.output


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("vit", ("model.drop_path=0.3", "task.mixup=0.8", "task.cutmix=1.0", "batch.micro=4")),
        pytest.param(
            "vit",
            ("workers=1", "optim=lion", "sparsity=tsrste", "sparsity.refresh=2"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "resnet", ("sparsity=srste", "optim=sgd", "batch.micro=4"), marks=pytest.mark.slow
        ),
        ("resnet", ("workers=1", "model.drop_path=0.2", "task.mixup=0.2")),
    ],
    ids=["vit", "vit-worker-lion", "resnet", "resnet-worker"],
)
def test_resume_is_bit_exact(train, stop_after, model, overrides):
    """With batch norm's running statistics, drop path, mixing, and batches made ahead."""
    whole = train(model, *overrides, runs="plain")
    stop_after(3)
    assert train(model, *overrides).code == 143
    stop_after(-1)
    again = train(model, *overrides)
    assert again.code == 0
    assert_same_run(whole.directory, again.directory)


def test_a_broken_image_ends_the_run_with_one_line(tmp_path, monkeypatch, capfd):
    from PIL import Image

    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / split / name / f"{i}.png")
    (tmp_path / "train/a/2.png").write_bytes(b"broken")
    words = ["train", *COMMON, *VIT, "data=image_folder", f"data.root='{tmp_path}'"]
    words += [f"runs_dir='{tmp_path / 'runs'}'", "eval.batches=0"]
    for workers in (0, 1):
        assert main([*words, "model.classes=2", f"workers={workers}"]) == 3
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and "train/a/2.png" in said and "cannot be read" in said
    assert main([*words, "model.classes=1"]) == 3
    assert "model.classes=1" in capfd.readouterr().err
