"""Run directories that version 0.1 stopped at step 4 of 8 go on bit for bit."""

import io
import tarfile
from pathlib import Path

import pytest
from tiny_runs import metrics

from sparsepretrain import config
from sparsepretrain.config import freeze
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.evaluation import evaluate_checkpoint
from sparsepretrain.training.trainer import train

ARCHIVE = Path(__file__).with_name("old_runs.tar.xz")
"""<identity>-s0/ of every run: configuration, checkpoint of step 4, and the record of all steps."""
RUNS = {
    "45835084-s0": (["sparsity=sste"], 5.506562118346874),
    "7ce73ebd-s0": (
        ["sparsity=tsrste", "sparsity.refresh=2", "sparsity.dense_tail=0.2"],
        5.507031540458019,
    ),
    "c7896e4f-s0": (["sparsity=asp"], 5.506609537280523),
    "c808c7b9-s0": (["sparsity=mdgf", "sparsity.until=0.75"], 5.506385672550935),
}
"""Overrides, and validation loss at step 4 as version 0.1 evaluated it.

``asp`` has pruned by then; ``tsrste`` is dense and ``mdgf`` binary from step
6 on."""
SETTINGS = """
data=text_files data.files=['corpus.txt'] data.validation=0.3 model.n_embd=8 model.n_layer=1
model.n_head=1 task.sequence_length=8 batch.size=4 batch.micro=4 eval.every=4 eval.batches=1
log.every=1 log.layers_every=2 checkpoint.every=4 schedule.warmup=2 steps=8 tracker.mode=disabled
parallel.device=cpu runs_dir=runs name=old
"""


SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python 3.11 has it from its fourth patch on, and 3.14 does it anyway."""
COMPARED = {"loss", "lr", "grad_norm", "density", "sparse", "flip_rate", "mask_decay"}


@pytest.fixture
def old_runs(tmp_path, prepared_cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(prepared_cache))
    lines = (f"line {j}: {j * j % 97} sheep, {j * 7 % 89} goats" for j in range(200))
    Path("corpus.txt").write_text("\n".join(lines))
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall("runs", **SAFELY)


def test_they_are_evaluated_and_go_on(old_runs):
    printed = io.StringIO()
    out = Console(printed)
    exact = True
    for name, (_, loss) in RUNS.items():
        for dense in (False, True):
            checkpoint = f"runs/old/{name}/checkpoints/step_00000004"
            result = evaluate_checkpoint(checkpoint, dense=dense, out=Path("eval"), console=out)
            assert result["metrics"]["loss"] == pytest.approx(loss, rel=1e-5, abs=0)
            exact &= result["metrics"]["loss"] == loss
    # another processor sums in another order, which one of five forwards shows; else every bit is
    # the same
    rounding = 0 if exact else 1e-5
    for name, (overrides, _) in RUNS.items():
        run = config.load([*SETTINGS.split(), *overrides])
        directory = freeze.run_directory(run)
        assert directory == Path("runs/old") / name
        expected = metrics(directory)
        assert train(run, out) == 0
        got = metrics(directory)
        assert [(r["step"], r.get("split")) for r in got] == [
            (r["step"], r.get("split")) for r in expected
        ]
        for new, old in zip(got, expected, strict=True):
            for key in COMPARED & old.keys():
                about = (name, old["step"], key)
                assert new[key] == pytest.approx(old[key], rel=rounding, abs=0), about
    assert printed.getvalue().count("(step 4)") == len(RUNS)
