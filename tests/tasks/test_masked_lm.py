"""Masks follow from (seed, split, step, position); only masked tokens count."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsepretrain.cli import main
from sparsepretrain.data.encoding import train_bpe, train_wordpiece
from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.tasks import build_task
from sparsepretrain.tasks.masked_lm import Masking, selected
from sparsepretrain.training.loop import train_step
from support.tiny_runs import assert_same_run, interrupted, metrics

BERT = ("model=bert_nano", "model.n_inner=64")
GATED = ("model=bert_geglu", "model.n_inner=64", "model.vocab_size=260", "task.sequence_length=16",
         "data.tokenizer=bytes", "precision=fp32", "schedule=constant", "schedule.warmup=2",
         "clip=0.5", "model.n_embd=32", "model.n_layer=1", "model.n_head=2")  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture
def task(tiny):
    return opened(tiny)


def opened(tiny, *more):
    task = build_task(tiny.load(*BERT, *more))
    task.open_data(("train", "validation"))
    return task


def masking(probability=0.15, mask=0.8, random=0.1, special=(0,), vocab=100):
    options = SimpleNamespace(probability=probability, mask_fraction=mask, random_fraction=random)
    return Masking(options, vocab, special, vocab)


def test_masks_have_the_configured_fractions():
    rows = np.random.default_rng(0).integers(1, 100, (400, 128))
    tokens, places, targets = masking().apply(rows, 3, "train", 7, range(400))
    assert len(places) == 400 * 19 == len(np.unique(places))
    assert (rows.reshape(-1)[places] == targets).all()
    untouched = np.ones(rows.size, dtype=bool)
    untouched[places] = False
    assert (tokens.reshape(-1)[untouched] == rows.reshape(-1)[untouched]).all()
    made = tokens.reshape(-1)[places]
    masked, kept = made == 100, made == targets
    changed = ~masked & ~kept
    # binomial, n = 7600: five standard errors; a hundredth of the random tokens is the old one
    for part, expected in ((masked, 0.8), (changed, 0.099), (kept, 0.101)):
        assert part.mean() == pytest.approx(expected, abs=5 * np.sqrt(0.25 / len(places)))
    assert set(made[changed]) == set(range(1, 100)), "every ordinary token, and no special one"
    # every place is as likely: 400 · 19 / 128 = 59.4 ± 7.1 times each
    per_place = np.bincount(places % 128, minlength=128)
    assert per_place.min() > 59.4 - 5 * 7.1 and per_place.max() < 59.4 + 5 * 7.1


@pytest.mark.parametrize(("mask", "random"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_fractions_of_zero_and_one(mask, random):
    rows = np.random.default_rng(0).integers(1, 100, (20, 64))
    chosen = masking(mask=mask, random=random)
    tokens, places, targets = chosen.apply(rows, 0, "train", 0, range(20))
    made = tokens.reshape(-1)[places]
    assert (made == 100).all() == bool(mask)
    assert mask or random or (made == targets).all()
    assert not random or 0 < (made == targets).mean() < 0.1


def test_special_tokens_are_never_selected_and_one_token_always_is():
    rows = np.zeros((3, 32), dtype=np.int64)
    rows[0, 5] = 7  # one ordinary token, which is selected
    rows[1] = 9
    tokens, places, targets = masking().apply(rows, 0, "train", 0, range(3))
    assert places[0] == 5 and targets[0] == 7
    assert len(places) == 1 + 5 and (places[1:] // 32 == 1).all(), "none of the empty sample"
    assert (tokens[2] == 0).all()
    assert [selected(0.15, n) for n in (0, 1, 9, 10, 128)] == [0, 1, 1, 2, 19]


def test_masks_do_not_depend_on_micro_batches(task):
    whole = task.batch("train", 5, range(4), 4)
    assert whole["tokens"].shape == (4, 16) and whole["tokens"].dtype == torch.int64
    parts = [task.batch("train", 5, [i], 4) for i in range(4)]
    assert torch.equal(whole["tokens"], torch.cat([p["tokens"] for p in parts]))
    assert torch.equal(whole["targets"], torch.cat([p["targets"] for p in parts]))
    places = [p["positions"] + 16 * i for i, p in enumerate(parts)]
    assert torch.equal(whole["positions"], torch.cat(places))
    again, example = task.batch("train", 5, range(4), 4), task.example(4, CPU)
    assert all(torch.equal(whole[k], again[k]) for k in whole)
    shapes = {k: (v.shape, v.dtype) for k, v in example.items()}
    assert shapes == {k: (v.shape, v.dtype) for k, v in whole.items()}


def test_masks_differ_between_steps_splits_and_seeds():
    rows = np.random.default_rng(0).integers(1, 100, (4, 64))

    def places(*key):
        seed, split, step = key
        return tuple(masking().apply(rows, seed, split, step, range(4))[1])

    keys = [(0, "train", 0), (0, "train", 1), (1, "train", 0), (0, "validation", 0),
            (0, "validation", 1), (2**63 - 1, "train", 0)]  # fmt: skip
    assert len({places(*key) for key in keys}) == len(keys)
    rows[:] = rows[0]
    same = masking().apply(rows, 0, "train", 0, range(4))[1].reshape(4, -1) % 64
    assert len({tuple(row) for row in same}) == 4, "positions have masks of their own"


def test_held_out_masks_are_the_same_for_every_seed(tiny):
    one, other = opened(tiny, "seed=1"), opened(tiny, "seed=2")
    for split, equal in (("validation", True), ("train", False)):
        left, right = (t.batch(split, 0, range(4), 4) for t in (one, other))
        assert torch.equal(left["tokens"], right["tokens"]) == equal
        same = left["positions"].shape == right["positions"].shape
        assert (same and torch.equal(left["positions"], right["positions"])) == equal


def test_only_selected_tokens_count(task):
    torch.manual_seed(0)
    model = task.build_model().eval()
    batch = task.batch("validation", 0, range(4), 4)
    total, count = task.loss(model, batch)
    assert count == task.count(batch) == 4 * 2 and total.dtype == torch.float32
    logits = model(batch["tokens"]).logits.flatten(0, 1)[batch["positions"]]
    rows = logits.double().log_softmax(-1)[torch.arange(count), batch["targets"]]
    assert total.item() == pytest.approx(-rows.sum().item(), rel=1e-5)
    with torch.no_grad():
        seen = task.observe(model, batch, final=False)
    right = (logits.argmax(-1) == batch["targets"]).double().mean()
    values = task.metrics([seen])
    assert values["accuracy"] == pytest.approx(100 * right.item())
    assert values["perplexity"] == pytest.approx(np.exp(values["loss"]))
    with torch.autocast("cpu", torch.bfloat16):
        assert task.loss(model, batch)[0].dtype == torch.float32
    empty = {"tokens": batch["tokens"]} | {k: batch[k][:0] for k in ("positions", "targets")}
    total, count = task.loss(model, empty)
    assert (total.item(), count) == (0.0, 0)


def test_resume_is_exact_with_dropout(tiny, stop_after):
    overrides = (*GATED, "model.dropout=0.2", "workers=1")
    straight = tiny.train(*overrides, "name=straight").directory
    assert_same_run(straight, interrupted(tiny, stop_after, (3,), *overrides))
    lines = [line for line in metrics(straight) if "split" in line]
    assert {"loss", "perplexity", "accuracy"} <= set(lines[0])


def test_a_mask_token_of_the_tokenizer_is_used(tiny, tmp_path):
    file = tmp_path / "wordpiece.json"
    file.write_text(train_wordpiece([f"sheep {i} goats" for i in range(50)], 80, lowercase=True))
    more = (f"data.tokenizer='{file}'", "data.vocab_size=80")
    task = opened(tiny, *more, "model.vocab_size=80")
    batch = task.batch("train", 0, range(8), 8)
    made = batch["tokens"].reshape(-1)[batch["positions"]]
    assert (made == 4).any() and batch["tokens"].max() < 80
    assert (batch["targets"] > 4).all(), "never [UNK], [SEP] or another special token"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.vocab_size=256",), "model.vocab_size must be > data.vocab_size"),
        (("model.vocab_size=100",), "model.vocab_size must be ≥ data.vocab_size"),
        (("task.random_fraction=0.3",), "sum to at most 1"),
        (("task.sequence_length=512",), "model.n_positions (256)"),
        (("task=causal_lm",), "causal_lm"),
    ],
)
def test_bad_options_are_refused(tiny, overrides, words):
    with pytest.raises(ConfigError) as caught:
        tiny.load(*BERT, *overrides)
    assert words in str(caught.value)


def test_tokenizer_without_mask_needs_a_vocabulary_row(tiny, tmp_path, capfd):
    file = tmp_path / "bpe.json"
    file.write_text(train_bpe(["sheep and goats"], 257))
    overrides = tiny.overrides(*BERT, f"data.tokenizer='{file}'", "data.vocab_size=260")
    assert main(["train", *overrides]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "model.vocab_size must be > 260" in said
    assert not (tiny.root / "runs").exists()


def test_a_batch_without_a_token_to_mask_is_refused(tiny, monkeypatch):
    t = tiny.build(*BERT)
    monkeypatch.setattr(t.task, "count", lambda batch: 0)
    with pytest.raises(DataError, match="step 1: "):
        train_step(t)
