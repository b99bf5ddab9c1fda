"""Windows in, token-exact loss out."""

import math

import pytest
import torch

from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.tasks import build_task
from sparsepretrain.training.batches import split_requests
from sparsepretrain.training.validation import evaluate


@pytest.fixture
def task(tiny):
    task = build_task(tiny.load())
    task.open_data(("train", "validation"))
    return task


CPU = torch.device("cpu")


def test_targets_are_the_next_tokens(task):
    batch, example = task.batch("train", 3, range(4), 4), task.example(4, CPU)
    forms = [{k: (v.shape, v.dtype) for k, v in part.items()} for part in (batch, example)]
    assert forms[0] == forms[1]
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert task.count(batch) == 64
    parts = [task.batch("train", 3, range(i, i + 1), 4)["tokens"] for i in range(4)]
    assert torch.equal(batch["tokens"], torch.cat(parts))


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


def test_only_the_splits_asked_for_have_to_be_long_enough(tiny):
    task = build_task(tiny.load("data.validation=0.0"))
    task.open_data(("train",))
    assert task.samples("train") > 100
    with pytest.raises(DataError, match="validation"):
        task.open_data(("train", "validation"))


def test_a_whole_split_counts_every_token_once(tiny):
    """Every target but the first token, whatever the micro-batch; the mean is the plain one."""
    t = tiny.build("batch.micro=4", "data.validation=0.05")
    stream = t.task._windows["validation"]._tokens
    t.model.eval()
    seen, mean, perplexity = [], [], []
    for micro in (4, 1):
        t.run.batch.micro = micro
        requests = split_requests("validation", t.task.samples("validation"), micro, None)
        batches = [t.task.batch(*request) for request in requests]
        seen.append(sum(map(t.task.count, batches)))
        values = evaluate(t, "validation", None, final=True)
        mean.append(values["loss"])
        perplexity.append(values["perplexity"])
    assert seen == [len(stream) - 1] * 2
    assert mean[0] == pytest.approx(mean[1], rel=1e-6)
    assert perplexity[0] == pytest.approx(math.exp(mean[0]), rel=1e-9)
    total, count = 0.0, 0
    for batch in batches:  # one window each, cut instead of padded
        kept = int((batch["targets"] >= 0).sum())
        tokens, targets = (batch[key][:, :kept] for key in ("tokens", "targets"))
        with torch.no_grad():
            rows = t.model(input_ids=tokens).logits.double().log_softmax(-1)
        total -= rows.gather(2, targets.unsqueeze(-1)).sum().item()
        count += kept
    assert count == seen[0] and total / count == pytest.approx(mean[0], rel=1e-6)


def test_perplexity_of_a_diverged_model_is_infinite(task):
    values = task.metrics([{"loss": (1e6, 1)}])
    assert values == {"loss": 1e6, "perplexity": math.inf}


def test_padding_behind_documents_does_not_count(tiny):
    task = build_task(tiny.load("task.documents=true", "task.sequence_length=64"))
    task.open_data(("train", "validation"))
    torch.manual_seed(0)
    model = task.build_model().eval()
    size = task.samples("train")
    batch = task.batch("train", 0, range(size), size)
    assert batch["tokens"].min() >= 0 and batch["targets"].shape == (size, 64)
    assert task.count(batch) == int((batch["targets"] >= 0).sum())
    total, count = task.loss(model, batch)
    logits = model(input_ids=batch["tokens"]).logits[batch["targets"] >= 0].double()
    targets = batch["targets"][batch["targets"] >= 0]
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    assert count == len(targets) and total.item() == pytest.approx(expected.item(), rel=1e-5)


def test_documents_are_not_drawn_with_replacement(tiny):
    with pytest.raises(ConfigError, match=r"task\.replacement"):
        tiny.load("task.documents=true", "task.replacement=true")
