"""Buckets in, exact sums out; padding leaves no trace; BLEU as sacrebleu says."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

import sparsepretrain as sp
from sparsepretrain import config
from sparsepretrain.data.encoding import ByteCodec
from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.tasks import build_task
from support.tiny_translation import TinyTranslation

CPU = torch.device("cpu")
TENSORS = ("source", "mask", "previous", "targets")


@pytest.fixture
def tiny(tmp_path, prepared_cache, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(prepared_cache))
    return TinyTranslation(tmp_path, tmp_path)


@pytest.fixture
def task(tiny):
    task = build_task(tiny.load())
    task.open_data(("train", "validation", "test"))
    return task


@pytest.fixture
def model(task):
    torch.manual_seed(0)
    return task.build_model()


def widened(batch, columns, filler, rows=0):
    """The same pairs with more padding, and other tokens in it."""
    wide = {}
    for key, value in batch.items():
        if key not in TENSORS:
            wide[key] = value
            continue
        extra = {"mask": False, "targets": -100}.get(key, filler)
        new = F.pad(value, (0, columns), value=extra)
        if key == "source":
            new[~F.pad(batch["mask"], (0, columns))] = filler
        if key == "previous":
            real = F.pad(batch["targets"] != -100, (0, columns))
            new[~real] = filler
        wide[key] = new
    return wide


def gradients(task, model, batch):
    model.zero_grad()
    total, count = task.loss(model, batch)
    total.backward()
    return total.detach(), count, {n: p.grad.clone() for n, p in model.named_parameters()}


def test_batch_holds_whole_pairs(task):
    batch = task.batch("train", 0, range(1), 4)
    rows = len(batch["source"])
    assert rows > 1 and batch["source"].shape[1] % 4 == batch["targets"].shape[1] % 4 == 0
    assert rows * max(batch["source"].shape[1], batch["targets"].shape[1]) <= 256
    decode = lambda row: task._codec.decode(row.tolist())  # noqa: E731
    for source, mask, previous, target in zip(*(batch[key] for key in TENSORS), strict=True):
        words = target[target != -100]
        assert source[mask][-1] == words[-1] == 0, "both end with the end token"
        assert previous[0] == 0 and torch.equal(previous[1 : len(words)], words[:-1])
        assert not previous[len(words) :].any()
        english, german = decode(source[mask][:-1]), decode(words[:-1])
        assert english.endswith(".") and german.endswith(".") and english != german
    assert task.count(batch) == int((batch["targets"] != -100).sum())
    assert {k: v.dtype for k, v in batch.items() if k in TENSORS} == {
        "source": torch.int64, "mask": torch.bool, "previous": torch.int64, "targets": torch.int64,
    }  # fmt: skip


def test_batches_are_a_pure_function(tiny, task):
    other = build_task(tiny.load())
    other.open_data(("validation", "train"))
    for step in (5, 0, 90):
        one, two = (t.batch("train", step, range(1, 3), 4) for t in (task, other))
        assert all(torch.equal(one[key], two[key]) for key in TENSORS)
    seeds = [build_task(tiny.load(f"seed={seed}")) for seed in (0, 1)]
    for t in seeds:
        t.open_data(("train", "validation"))
    same = [t.batch("validation", 0, range(2), 2)["source"].tolist() for t in seeds]
    assert same[0] == same[1], "every seed is evaluated on the same buckets"
    apart = [t.batch("train", 0, range(2), 2)["source"].tolist() for t in seeds]
    assert apart[0] != apart[1]


def test_epoch_visits_every_pair_once(task):
    seen = []
    for sample in range(task.samples("train")):
        batch = task.batch("train", sample, range(1), 1)
        rows = zip(batch["source"], batch["mask"], strict=True)
        seen += [tuple(row[mask].tolist()) for row, mask in rows]
    assert len(seen) == len(set(seen)) == len(task._pairs["train"]) > 250


def test_loss_is_the_smoothed_sum_in_fp32(task, model):
    batch = task.batch("train", 0, range(2), 4)
    model.eval()
    logits = task.recipe.logits(model, batch["source"], batch["mask"], batch["previous"])
    logp = logits.double().log_softmax(-1)
    real = batch["targets"] != -100
    nll = -logp.gather(2, batch["targets"].clamp(min=0)[..., None])[..., 0][real].sum()
    spread = -logp.mean(-1)[real].sum()
    total, count = task.loss(model, batch)
    assert count == int(real.sum()) and total.dtype == torch.float32
    assert total.item() == pytest.approx((0.9 * nll + 0.1 * spread).item(), rel=1e-5)
    seen = task.observe(model, batch, final=False)
    assert seen["loss"] == (pytest.approx(total.item()), count)
    assert seen["nll"] == (pytest.approx(nll.item(), rel=1e-5), count)
    assert set(seen) == {"loss", "nll"}, "no translation before the end"
    with torch.autocast("cpu", torch.bfloat16):
        assert task.loss(model, batch)[0].dtype == torch.float32


@pytest.mark.parametrize(("columns", "filler"), [(0, 7), (4, 399), (12, 0)])
def test_padding_changes_neither_loss_nor_gradients(task, model, columns, filler):
    model.eval()
    batch = task.batch("train", 1, range(3), 4)  # three buckets: much padding
    assert not batch["mask"].all()
    plain = gradients(task, model, batch)
    other = gradients(task, model, widened(batch, columns, filler))
    assert plain[1] == other[1]
    assert other[0].item() == pytest.approx(plain[0].item(), rel=1e-6)
    for name, gradient in plain[2].items():
        torch.testing.assert_close(other[2][name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_output_gradients_at_padding_are_exactly_zero(task, model):
    """So that MVUE, which samples G along the tokens, never sees padding."""
    batch = widened(task.batch("train", 1, range(3), 4), 4, 9)
    seen = {}
    for name, module in model.named_modules():
        if name.endswith(("fc1", "fc2", "out_proj", "q_proj")):
            keep = lambda module, _, outputs, name=name: seen.update({name: outputs[0]})  # noqa: E731
            module.register_full_backward_hook(keep)
    task.loss(model.train(), batch)[0].backward()
    real = {"encoder": batch["mask"], "decoder": batch["targets"] != -100}
    assert len(seen) == 10
    for name, gradient in seen.items():
        side = real["encoder" if ".encoder." in name else "decoder"]
        assert gradient[~side].abs().max() == 0, name
        assert gradient[side].any(), name


def test_mvue_gradients_are_independent_of_padding(task, model):
    """With samples drawn: the same draws, the same gradients, whatever the padding holds."""
    roles = task.roles["all"]
    sparsifier = sp.sparsify(model, "sste", targets=roles, seed=1)
    batch = task.batch("train", 1, range(3), 4)
    results = []
    for filler in (0, 7, 399):
        sparsifier.micro_batch(0)
        results.append(gradients(task, model.eval().train(), widened(batch, 0, filler)))
    for name, gradient in results[0][2].items():
        for other in results[1:]:
            torch.testing.assert_close(other[2][name], gradient, rtol=1e-5, atol=1e-5, msg=name)
    sparsifier.micro_batch(1)
    drawn = gradients(task, model, batch)[2]
    differ = [n for n, g in results[0][2].items() if not torch.allclose(drawn[n], g, atol=1e-3)]
    assert any(name.endswith("fc1.weight") for name in differ), "gradients are sampled"


def test_capacity_bounds_batches_and_example_has_their_form(task):
    for step in range(task.samples("train")):
        batch = task.batch("train", step, range(2), 2)
        tokens = max(batch["source"].numel(), batch["targets"].numel())
        assert tokens <= 2 * task.capacity
    example = task.example(2, CPU)
    assert {k: batch[k].dtype for k in TENSORS} == {k: example[k].dtype for k in TENSORS}
    assert set(batch) == set(example)
    assert example["source"].numel() == 2 * 256 == task.count(example)


def test_final_evaluation_reports_bleu(task, model):
    model.eval()
    requests = [range(i, i + 1) for i in range(task.samples("validation"))]
    size = len(requests)
    seen = [task.observe(model, task.batch("validation", 0, r, size), final=True) for r in requests]
    found = task.metrics(seen)
    assert sum(len(s["hypotheses"]) for s in seen) == 24
    references = sorted(line for s in seen for line in s["references"])
    pairs = task._pairs["validation"]
    originals = sorted(task._codec.decode(pairs.target(i)[:-1].tolist()) for i in range(24))
    assert references == originals
    assert 0 <= found["bleu"] < 5 and found["bleu_signature"].startswith("nrefs:1|case:mixed")
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    task.options.bleu = False
    off = task.observe(model, task.batch("validation", 0, range(1), size), final=True)
    assert "bleu" not in task.metrics([off])


def test_references_are_the_lines_of_the_data(tiny, task):
    first = task._codec.decode(task._pairs["validation"].target(0)[:-1])
    assert task._references["validation"][0] == first
    lowercase = build_task(tiny.load("data.tokenizer=wordpiece"))
    lowercase.open_data(("validation",))
    assert lowercase._references["validation"] == task._references["validation"]
    every, position = lowercase._pairs["validation"], range(1)
    batch = lowercase.batch("validation", 0, position, 1)
    lines = [lowercase._codec.decode(every.target(i)[:-1]) for i in range(24)]
    for row, reference in zip(batch["targets"], batch["references"], strict=True):
        line = lowercase._codec.decode(row[row != -100][:-1])
        assert lowercase._references["validation"].index(reference) == lines.index(line)


@pytest.mark.parametrize("beam", [1, 3])
def test_translations_do_not_depend_on_padding(task, model, beam):
    model.eval()
    task.options.beam, task.options.max_decode = beam, (0.5, 6)
    batch = task.batch("validation", 0, range(2), 4)
    wide = widened(batch, 8, 11)
    plain = task.translate(model, batch["source"], batch["mask"])
    assert task.translate(model, wide["source"], wide["mask"]) == plain
    assert len(plain) == len(batch["source"])


def observed(hypotheses, references):
    seen = {"hypotheses": hypotheses, "references": references}
    return [{"loss": (1.0, 1), "nll": (1.0, 1), **seen}]


def test_bleu_is_sacrebleus(task):
    sacrebleu = pytest.importorskip("sacrebleu")
    hypotheses = ["the cat sat on the mat today", "", "a dog barked at night again"]
    references = ["the cat sat on a mat today", "and left", "a dog barked in the night again"]
    found = task.metrics(observed(hypotheses, references))
    assert found["bleu"] == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert f"version:{sacrebleu.__version__}" in found["bleu_signature"]


def test_missing_sacrebleu_is_named(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(DataError, match=r"sacrebleu: pip install 'sparsepretrain\[mt\]'"):
        task.metrics(observed(["a"], ["a"]))


def test_long_training_pairs_are_left_out_and_long_held_out_ones_refused(tiny):
    task = build_task(tiny.load("task.max_length=30"))
    task.open_data(("train",))
    kept = task._pairs["train"].lengths
    assert 0 < len(kept) < 300 and kept.max() <= 30
    for step in range(task.samples("train")):
        assert task.batch("train", step, range(1), 1)["mask"].sum(1).max() <= 30
    task = build_task(tiny.load("task.max_length=2"))
    with pytest.raises(DataError, match=r"raise task\.max_length"):
        task.open_data(("train",))
    task = build_task(tiny.load("task.max_length=28", "model.max_position_embeddings=28"))
    with pytest.raises(DataError, match=r"pair \d+ of validation has \d+ tokens"):
        task.open_data(("train", "validation"))


def test_an_empty_split_is_an_error(tiny):
    task = build_task(tiny.load("data.test_pairs=0"))
    with pytest.raises(DataError, match="no pairs in split 'test'"):
        task.open_data(("test",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.max_tokens=50", r"task\.max_tokens must be ≥ task\.max_length"),
        ("task.max_decode=[0,0]", r"task\.max_decode"),
        ("task.max_length=300 task.max_tokens=512", r"task\.max_length must be ≤ model\."),
        ("data.vocab_size=500", r"model\.vocab_size must be ≥ data\.vocab_size"),
        ("model.attention_heads=3", r"model\.attention_heads must divide model\.d_model"),
        ("model.ffn_factor=0.001", r"model\.ffn_factor"),
    ],
)
def test_bad_options_are_refused(tiny, override, message):
    with pytest.raises(ConfigError, match=message):
        tiny.load(*override.split())
    with pytest.raises(ConfigError, match="task=translation"):  # data of another kind
        config.load(["model=transformer_nano", "data=python_source"])


def test_rows_of_the_model_that_are_no_tokens_are_left_out_of_text():
    assert ByteCodec().decode([104, 256, 105, 1023]) == "hi"


def test_held_out_pairs_are_padded_within_the_positions(tiny):
    task = build_task(tiny.load())
    task.open_data(("validation",))
    longest = int(task._pairs["validation"].lengths.max())
    words = "task.max_length=4", f"model.max_position_embeddings={-(-longest // 4) * 4}"
    build_task(tiny.load(*words)).open_data(("validation",))
    tight = build_task(
        tiny.load(words[0], f"model.max_position_embeddings={-(-longest // 4) * 4 - 1}")
    )
    with pytest.raises(DataError, match="in multiples of four more than model"):
        tight.open_data(("validation",))
