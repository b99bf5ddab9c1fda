"""Evaluating a checkpoint of transformers, sparse or not, against transformers' own loss."""

import io

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sparsepretrain.cli import main
from sparsepretrain.console import Console
from sparsepretrain.data.order import windows
from sparsepretrain.data.preparation import load
from sparsepretrain.training.evaluation import evaluate_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf", model


@torch.no_grad()
def test_the_loss_is_that_of_transformers(tiny, checkpoint, capsys):
    path, model = checkpoint
    words = ["task=causal_lm", "task.sequence_length=16", "data=text_files"]
    words += [f"data.files=['{tiny.corpus}/*.txt']", "data.validation=0.3", "parallel.device=cpu"]
    quiet, known = Console(io.StringIO()), [*words, "data.tokenizer=bytes"]
    found = evaluate_checkpoint(str(path), known, console=quiet)
    tokens = load(tiny.load().data)
    held_out = windows(tokens, "validation", 16, 0, complete=True)
    rows = torch.from_numpy(held_out.batch(0, range(held_out.count), held_out.count))
    logits, targets = model(input_ids=rows[:, :-1].clamp(min=0)).logits, rows[:, 1:]
    pairs = logits.flatten(0, 1), targets.flatten()
    expected = torch.nn.functional.cross_entropy(*pairs, ignore_index=-1)
    assert int((targets >= 0).sum()) == len(tokens.tokens["validation"]) - 1
    assert found["metrics"]["loss"] == pytest.approx(float(expected), rel=1e-5)
    pruned = evaluate_checkpoint(str(path), [*known, "sparsity=ste"], console=quiet)
    assert pruned["metrics"]["loss"] != found["metrics"]["loss"]
    assert main(["eval", str(path), *words]) == 2, "which tokenizer is not known"
    assert "tokenizer" in capsys.readouterr().err
