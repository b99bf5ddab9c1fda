"""Bad input through the command: exit code, one line, no traceback, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepretrain.cli import main


@pytest.fixture
def refused(tiny, tmp_path, monkeypatch, capfd):
    """``refused(code, words, *overrides)``: the one line on stderr."""
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    for key in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(home))

    def check(code: int, words: list[str], *overrides: str, leaves=(), files=True):
        given = [
            o for o in tiny.overrides("runs_dir=runs", *overrides) if files or "files" not in o
        ]
        capfd.readouterr()
        assert main(["train", *given]) == code
        out, err = capfd.readouterr()
        lines = err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("sparsepretrain: "), err
        assert all(word in lines[0] for word in words), lines[0]
        assert "Traceback" not in out + err and len(lines[0]) < 400
        assert tuple(sorted(p.name for p in work.iterdir())) == leaves
        return lines[0]

    return check


def test_sequence_longer_than_positions(refused):
    words = ["config error", "task.sequence_length must be ≤ model.n_positions (256), got 512"]
    refused(2, words, "task.sequence_length=512")


def test_corpus_shorter_than_a_sequence(refused, tmp_path):
    (tmp_path / "short.txt").write_text("ten bytes.")
    words = ["data error", "tokens, but a sequence of 16 needs 17", "task.sequence_length"]
    refused(3, words, f"data.files=['{tmp_path / 'short.txt'}']")


def test_validation_shorter_than_a_sequence(refused, tmp_path):
    (tmp_path / "short.txt").write_text("x" * 100)
    words = ["data error", "validation.bin has 6 tokens", "data.validation"]
    refused(3, words, f"data.files=['{tmp_path / 'short.txt'}']", "data.validation=0.05")


def test_unwritable_run_directory(refused, tmp_path):
    (tmp_path / "file").write_text("")
    words = ["config error", "not writable", "runs_dir=DIR"]
    refused(2, words, f"runs_dir='{tmp_path / 'file'}'")


def test_damaged_tokens_are_made_again(tiny):
    run = tiny.load()
    from sparsepretrain.data import load

    file = load(run.data).directory / "train.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    outcome = tiny.train("steps=1")
    assert outcome.code == 0 and file.read_bytes() == whole
    (line,) = (line for line in outcome.output.splitlines() if line.startswith("warning"))
    assert "train.bin does not match its checksum: preparing" in line


def test_checkpoint_from_another_configuration(refused, tiny, tmp_path):
    directory = tiny.train("steps=2").directory
    words = ["checkpoint error", "comes from another configuration", "model.n_embd: 32 -> 64"]
    refused(4, words, f"resume='{directory}'", "model.n_embd=64")


def test_no_login(refused):
    words = ["config error", "tracker.mode=online needs a W&B login", "wandb login", "offline"]
    refused(2, words, "tracker.mode=online")


def test_empty_data_root(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    words = ["data error", "data.roots", "empty holds no .py file"]
    refused(3, words, "data=python_source", f"data.roots=['{tmp_path / 'empty'}']", files=False)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.n_inner=66", ["'transformer.h.0.mlp.c_proj': in_features = 66 is not a multiple"]),
        ("sparsity.targets=fnn", ["'fnn' is neither an alias nor a glob (did you mean 'ffn'?)"]),
        ("sparsity.targets=['*.x']", ["no linear layer or convolution matches '*.x'"]),
        ("parallel.device=cuda", ["parallel.device=cuda"]),
    ],
)  # fmt: skip
def test_layers(refused, tmp_path, monkeypatch, override, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(2, ["config error", *words], override)
    assert not (tmp_path / "cache").exists()  # known before data is prepared


def test_divergence(refused):
    line = refused(
        5, ["diverged", "step ", "; nothing was updated"], "optim.lr=1e30", "optim=sgd",
        "schedule=constant", "schedule.warmup=0", "clip=null", leaves=("runs",),
    )  # fmt: skip
    assert "loss is" in line or "gradient" in line


def test_the_published_run_without_its_data(tmp_path):
    """A fresh process, since libraries print warnings once: nothing may come before the line."""
    environment = {**os.environ, "SPARSEPRETRAIN_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "sparsepretrain", "train", "model=gpt2_124m", "sparsity=sste"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 3, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("sparsepretrain: data error: "), done.stderr
    assert "sparsepretrain prepare data=openwebtext" in lines[0]
    assert "data=python_source" in lines[0]
    assert done.stdout == "gpt2_124m: loading PyTorch and the model\n"
    assert not list(tmp_path.iterdir())
