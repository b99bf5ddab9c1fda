"""Runs on disk that were never trained: a configuration, a checkpoint of perturbed weights."""

import io
from pathlib import Path
from typing import Any

import torch

from sparsepretrain import config
from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.export import export_run
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.tasks import build_task
from sparsepretrain.training.assembly import build_model, sparsify_model

SMALL = {
    "gpt2": ("model=gpt2_nano", "model.n_embd=64", "model.n_layer=2", "model.n_head=2"),
    "bert": ("model=bert_nano", "model.n_embd=32", "model.n_layer=2", "model.n_head=2"),
    "geglu": ("model=bert_geglu", "model.n_embd=32", "model.n_layer=1", "model.n_head=2"),
    "llama": (
        "model=llama_nano", "model.n_embd=32", "model.n_layer=2", "model.n_head=2",
        "model.n_inner=64",
    ),
    "moe": (
        "model=moe_nano", "model.n_embd=32", "model.n_layer=2", "model.n_head=2",
        "model.n_inner=32",
    ),
    "vit": ("model=vit_nano", "model.width=32", "model.depth=2", "model.heads=2"),
    "resnet": ("model=resnet_nano", "model.width=[8,8,16,16]", "model.stem=imagenet"),
    "marian": (
        "model=transformer_nano", "model.d_model=32", "model.ffn_dim=64",
        "model.encoder_layers=1", "model.decoder_layers=1", "model.attention_heads=2",
    ),
}  # fmt: skip


def write_run(root: Path, kind: str, *overrides: str) -> Path:
    """A run directory of a small model, see :func:`write_checkpoint`."""
    words = ["steps=4", "parallel.device=cpu", "tracker.mode=disabled", f"runs_dir='{root}'"]
    return write_checkpoint(config.load([*SMALL[kind], *words, *overrides]))


def write_checkpoint(run: Any, step: int = 3, seed: int = 1) -> Path:
    """The directory of ``run`` with a checkpoint after ``step`` steps.

    Weights, biases and norms are moved away from where frozen state was taken from them; ``seed``
    decides where to.
    """
    task = build_task(run)
    model = build_model(task, torch.device("cpu"))
    sparsifier = sparsify_model(run, task, model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier.attach(optimizer)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    for _ in range(step):
        optimizer.step()
    parts = {"step": step, "model": model.state_dict(), "sparsifier": sparsifier.state_dict()}
    parts |= {"fingerprint": None, "ema": None}
    directory = RunDirectory.of(run)
    text = freeze.to_yaml(run.plain)
    checkpoint.save(directory.checkpoints, step, parts, config=text, keep=checkpoint.Retention(9))
    directory.write(directory.config_file, text)
    return directory.path


def export(path: Path, **options: Any) -> tuple[Path, str]:
    """(directory, what was printed)."""
    out = io.StringIO()
    return export_run(path, console=Console(out), **options), out.getvalue()
