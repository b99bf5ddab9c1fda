"""Task ``regression``, source ``teacher``: samples that depend on nothing but their number."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from sparsepretrain import config
from sparsepretrain.cli import main
from sparsepretrain.data.sources.teacher import BLOCK, normals
from sparsepretrain.errors import ConfigError
from sparsepretrain.tasks import build_task
from sparsepretrain.training.assembly import build_model
from support.tiny_runs import TRAINING, Tiny, assert_same_run, interrupted

TINY = (
    "experiment=claims_regression", *TRAINING, "model.n_embd=16", "model.n_inner=32",
    "data.held_out=256", "batch.size=64", "batch.micro=32", "eval.every=3",
)  # fmt: skip
CPU = torch.device("cpu")


def opened(*overrides):
    task = build_task(config.load([*TINY, *overrides]))
    task.open_data(("train", "validation"))
    return task


class Small(Tiny):
    """Small runs of the regression task."""

    def overrides(self, *more):
        return [*TINY, f"runs_dir='{self.root / 'runs'}'", *more]


def test_samples_are_a_function_of_seed_and_number():
    task = opened("seed=3")
    whole = task.batch("train", 5, range(300), 300)
    parts = [task.batch("train", 5, range(i, i + 25), 300) for i in range(0, 300, 25)]
    for key in ("inputs", "targets"):
        assert whole[key].dtype == torch.float32
        assert torch.equal(whole[key], torch.cat([part[key] for part in parts]))
    # sample 1500 of the run, whatever the batch is
    one = opened("seed=3").batch("train", 1500, [0], 1)
    assert torch.equal(one["targets"][0], whole["targets"][0])
    again = task.batch("train", 0, [4 * BLOCK + 2, 1, 4 * BLOCK], 1024)
    first = task.batch("train", 0, range(5 * BLOCK), 1024)
    assert torch.equal(again["inputs"], first["inputs"][[4 * BLOCK + 2, 1, 4 * BLOCK]])
    assert len(torch.unique(first["inputs"], dim=0)) == 5 * BLOCK


def test_seeds_change_the_training_data_and_nothing_held_out():
    one, two = opened("seed=1"), opened("seed=2")
    assert not torch.equal(*(t.batch("train", 0, range(8), 8)["inputs"] for t in (one, two)))
    held_out = [t.batch("validation", 0, range(256), 256) for t in (one, two)]
    assert torch.equal(held_out[0]["targets"], held_out[1]["targets"])
    test = one.batch("test", 0, range(256), 256)
    assert not torch.equal(test["inputs"], held_out[0]["inputs"])
    assert one.fingerprint == two.fingerprint
    other = opened("seed=1", "data.teacher_seed=9")
    assert other.fingerprint != one.fingerprint
    x, y = (t.batch("train", 0, range(8), 8) for t in (one, other))
    assert torch.equal(x["inputs"], y["inputs"]) and not torch.equal(x["targets"], y["targets"])


def test_inputs_are_normal_and_targets_have_unit_variance():
    task = opened("data.held_out=8192")
    batch = task.batch("validation", 0, range(8192), 8192)
    assert float(batch["targets"].var(correction=0)) == pytest.approx(1, abs=1e-4)
    x = batch["inputs"].numpy()
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01
    assert abs((x**4).mean() - 3) < 0.1  # and not only two moments of it
    correlations = np.corrcoef(x.T) - np.eye(32)
    assert np.abs(correlations).max() < 0.06  # 5 / √8192
    assert np.array_equal(normals(1, 2, 7, (3, 5)), normals(1, 2, 0, (10, 5))[7:])


def test_teacher_equals_residual_mlp_with_doubled_weights():
    """The same function as ``residual_mlp``, up to rounding and the scale of the targets."""
    run = config.load(["experiment=claims_regression", "data.held_out=256"])
    task = build_task(run)
    task.open_data(("validation",))
    model = build_model(task, CPU).double()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    order = [linear[0], *linear[1:-1], linear[-1]]
    for layer, weight in zip(order, task._source._weights, strict=True):
        ratio = float(layer.weight.detach().std()) / weight.std()
        assert layer.weight.shape == weight.T.shape and ratio == pytest.approx(0.5, rel=0.1)
        layer.weight.data.copy_(torch.from_numpy(weight.T.copy()))
    batch = task.batch("validation", 0, range(64), 256)
    with torch.no_grad():
        y = model(batch["inputs"].double())
    scale = float((y * batch["targets"]).sum() / batch["targets"].square().sum())
    assert torch.allclose(y / scale, batch["targets"].double(), atol=1e-5)


def test_the_loss_is_the_mean_squared_error():
    task = opened()
    model, batch = build_model(task, CPU), task.batch("train", 0, range(12), 64)
    total, count = task.loss(model, batch)
    expected = nn.functional.mse_loss(model(batch["inputs"]), batch["targets"])
    assert count == 12 and total.item() / 12 == pytest.approx(expected.item())
    with torch.no_grad():
        observed = task.observe(model, batch, final=True)
    assert list(task.metrics([observed])) == ["loss"]


def test_resume_is_bit_exact(tmp_path, stop_after):
    words = ("sparsity=sste", "seed=7")
    whole = Small(tmp_path / "whole", tmp_path).train(*words)
    assert whole.code == 0 and "samples" in whole.output and "perplexity" not in whole.output
    parts = interrupted(Small(tmp_path, tmp_path), stop_after, (3,), *words)
    assert_same_run(whole.directory, parts)


def test_eval_report_and_prepare(tmp_path, capsys):
    run = Small(tmp_path, tmp_path).train("sparsity=ste").directory
    assert main(["prepare", "data=teacher"]) == 0
    assert "nothing to prepare" in capsys.readouterr().out
    assert main(["eval", str(run), "split=test"]) == 0
    result = json.loads((run / "eval.jsonl").read_text())
    assert result["samples"] == 256 and set(result["metrics"]) == {"loss"}
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "samples" in text and "perplexity" not in text and "nats" not in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.inputs=16", "model.inputs=32"), "model.inputs must equal data.inputs"),
        (("data=python_source",), "data=python_source"),
        (("model.ffn_factor=0.001",), "model.ffn_factor"),
    ],
)
def test_bad_options_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config.load([*TINY, *overrides])


def test_epochs_and_attention_targets_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="data=teacher has no epochs"):
        opened().samples("train")
    with pytest.raises(ConfigError, match="attention"):
        Small(tmp_path, tmp_path).train("sparsity.targets=attention")
