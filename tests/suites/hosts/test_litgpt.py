"""litgpt's pre-training through docs/examples/hosts/litgpt_pretrain.py: steps, resume, export."""

import importlib
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]
litgpt = pytest.importorskip("litgpt")
pytest.importorskip("litgpt.data")
pytest.importorskip("litgpt.args")
StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
SCRIPT = Path(__file__).parents[3] / "docs/examples/hosts/litgpt_pretrain.py"
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 64}


class Draws(litgpt.data.DataModule):
    """The same tokens in each run; litgpt takes up where it was."""

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size, self.length = batch_size, max_seq_length

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(0, 64, (64, 17), generator=generator)
        return StatefulDataLoader(rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader


@pytest.fixture
def pretrain(monkeypatch):
    """litgpt's module as the script leaves it, and its sparsifiers; undone afterwards."""
    from litgpt import pretrain

    importlib.reload(pretrain)  # the test of the examples has replaced its functions
    for name in ("initialize_weights", "instantiate_torch_optimizer"):
        monkeypatch.setattr(pretrain, name, getattr(pretrain, name))
    monkeypatch.setattr(sys, "argv", ["litgpt", "pythia-14m"])  # which it writes beside checkpoints
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # a minute on a CPU
    return pretrain, runpy.run_path(str(SCRIPT))["sparsifiers"]


def train(pretrain, out, steps, resume=False):
    pretrain.setup(
        "pythia-14m",
        model_config=litgpt.Config(name="tiny", **SIZES),
        out_dir=out,
        precision="32-true",
        data=Draws(),
        resume=resume,
        train=litgpt.args.TrainArgs(
            save_interval=2, log_interval=1, global_batch_size=4, micro_batch_size=2,
            max_tokens=steps * 4 * 16, max_norm=1.0, lr_warmup_steps=2,
        ),
        eval=litgpt.args.EvalArgs(interval=100, max_iters=1, initial_validation=False),
        devices=1,
        logger_name="csv",
    )  # fmt: skip


def test_a_run_is_sparse_resumes_bit_exactly_and_hands_over(pretrain, tmp_path, monkeypatch):
    module, sparsifiers = pretrain
    monkeypatch.chdir(tmp_path)
    train(module, tmp_path / "whole", 4)
    (handle,) = sparsifiers
    assert handle.completed_steps == 4 and handle.prove().holds
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole/step-00000002", half / "step-00000002")
    train(module, half, 4, resume="auto")
    again = sparsifiers[-1]
    assert again is not handle and again.completed_steps == 4
    dense, its_dense = handle.dense_state_dict(), again.dense_state_dict()
    assert all(torch.equal(its_dense[key], value) for key, value in dense.items())
    plain = litgpt.GPT(litgpt.Config(name="tiny", **SIZES))
    plain.load_state_dict(dense)  # strict
    x = torch.arange(8)[None]
    torch.testing.assert_close(plain.eval()(x), handle._state.root.eval()(x))
