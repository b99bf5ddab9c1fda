"""Windows in, token-exact loss out."""

from __future__ import annotations

import pytest
import torch

from sparsepretrain.errors import DataError
from sparsepretrain.training.build import build_task


@pytest.fixture
def task(tiny):
    task = build_task(tiny.load()[0])
    task.open_data(("train", "validation"))
    return task


CPU = torch.device("cpu")


def test_targets_are_the_next_tokens(task):
    batch = task.batch("train", 3, range(4), 4)
    assert batch["tokens"].shape == batch["targets"].shape == (4, 16)
    assert batch["tokens"].dtype == torch.int64
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert task.count(batch) == 64


def test_micro_batches_are_parts_of_the_global_batch(task):
    whole = task.batch("train", 5, range(4), 4)["tokens"]
    parts = [task.batch("train", 5, range(i, i + 1), 4)["tokens"] for i in range(4)]
    assert torch.equal(whole, torch.cat(parts))


def test_loss_is_a_sum_in_fp32(task):
    torch.manual_seed(0)
    model = task.build_model().eval()
    batch = task.batch("train", 0, range(4), 4)
    total, count = task.loss(model, batch)
    logits = model(input_ids=batch["tokens"]).logits
    rows = logits.double().log_softmax(-1).gather(2, batch["targets"].unsqueeze(-1))
    assert count == 64 and total.dtype == torch.float32
    assert total.item() == pytest.approx(-rows.sum().item(), rel=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert task.loss(model, batch)[0].dtype == torch.float32


def test_no_look_ahead(task):
    torch.manual_seed(0)
    model = task.build_model().eval()
    tokens = task.batch("train", 0, range(2), 4)["tokens"]
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    a, b = (model(input_ids=t).logits for t in (tokens, changed))
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])


def test_example_has_the_shapes_of_a_batch(task):
    batch, example = task.batch("train", 0, range(3), 4), task.example(3, CPU)
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        k: (v.shape, v.dtype) for k, v in example.items()
    }


def test_only_the_splits_asked_for_have_to_be_long_enough(tiny):
    task = build_task(tiny.load("data.validation=0.0")[0])
    task.open_data(("train",))
    assert task.samples("train") > 100
    with pytest.raises(DataError, match="validation"):
        task.open_data(("train", "validation"))
