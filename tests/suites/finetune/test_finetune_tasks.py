"""Encoding, padding, spans and metrics of tasks on records."""

import collections
import math
import sys

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from tokenizers import Tokenizer, models, pre_tokenizers

from sparsepretrain import config
from sparsepretrain.config.compose import build
from sparsepretrain.config.compose import read as read_words
from sparsepretrain.data.encoding import ByteCodec, FileCodec
from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.tasks import build_task, read
from sparsepretrain.tasks._bases import Sample
from sparsepretrain.tasks.question_answering import About, QuestionAnsweringOptions, f1, normalize
from sparsepretrain.tasks.sequence_classification import _cut
from sparsepretrain.training.assembly import build_model
from support.finetune_cases import write_rows
from support.tiny_runs import composed


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))


FOUR = "data.labels=[a,b,c,d]"
SPLITS = ("train", "validation")


def task_of(recipe: str, *overrides: str):
    """Return the task of a recipe, for a small GPT-2."""
    # as the verb does: the model's block without the model's own task
    request = read_words([f"finetune={recipe}", "model=pretrained", *overrides])
    model = composed("model=gpt2_nano")["model"] | {"n_embd": 32, "n_layer": 2}
    request.blocks["model"] = model
    return build_task(config.validate(build(request)[0]))


def test_pairs_are_cut_to_max_length():
    task = task_of("labelled_files", FOUR, "task.max_length=12")
    rows = [{"texts": ["ab", "cdefghijklmn"], "label": 2, "part": 0},
            {"texts": ["abcdefghijkl", "mnopqrstuvwx"], "label": 1, "part": 0},
            {"texts": ["a", "b"], "label": 3, "part": 0}]  # fmt: skip
    samples = task.encode(rows, ByteCodec())
    assert [bytes(sample.ids.tolist()) for sample in samples] == [
        b"ab\0cdefghijk", b"abcde\0mnopqr", b"a\0b",
    ]  # fmt: skip
    assert [sample.second for sample in samples] == [3, 6, 2]
    assert [sample.target for sample in samples] == [2, 1, 3]


def test_longer_text_is_cut_first():
    for room in range(13):
        first, second = _cut(list(range(9)), list(range(4)), room)
        assert len(first) + len(second) == min(room, 13)
        assert len(second) == 4 if room >= 8 else abs(len(first) - len(second)) <= 1


def test_tokenizers_have_their_template(tmp_path):
    words = {w: i for i, w in enumerate(["[CLS]", "[SEP]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert FileCodec(tmp_path / "tokenizer.json").template() == ((0,), (1,), (1,), (1,))
    assert ByteCodec().template() == ((), (0,), (), ())
    ids, spans = FileCodec(tmp_path / "tokenizer.json").encode_spans(["b  a"])[0]
    assert ids.tolist() == [3, 2] and spans.tolist() == [[0, 1], [3, 4]]
    ids, spans = ByteCodec().encode_spans(["aé"])[0]
    assert ids.tolist() == [97, 195, 169] and spans.tolist() == [[0, 1], [1, 2], [1, 2]]


def batch_of(task, lengths: list[int], extra: int = 0) -> dict:
    """Return a batch of random texts with ``extra`` tokens of padding."""
    generator = np.random.default_rng(0)
    span = task.head == "spans"
    targets = [(5, 7) if span else n % 4 for n in lengths]
    ids = [generator.integers(1, 256, n) for n in lengths]
    batch = task.collate([Sample(i, 4, t, None) for i, t in zip(ids, targets, strict=True)])
    for key in ("tokens", "mask", "second"):
        batch[key] = torch.nn.functional.pad(batch[key], (0, extra))
    batch["tokens"][~batch["mask"]] = 77 if extra else 0  # values at padding must not matter
    return batch


@pytest.mark.parametrize("recipe", [("labelled_files", FOUR), ("python_qa",)], ids=lambda r: r[0])
def test_padding_does_not_change_loss_or_gradients(recipe):
    task = task_of(*recipe)
    model = build_model(task, torch.device("cpu"))
    lengths = [9, 14, 30]
    results = []
    for extra in (0, 8):
        model.zero_grad()
        loss, count = task.loss(model, batch_of(task, lengths, extra))
        loss.backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((loss.detach(), grads, count))
    assert results[0][2] == results[1][2] == 3
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)
    # MVUE groups four tokens of a sequence: nothing is drawn for padding
    batch, seen = batch_of(task, lengths, extra=4), {}
    layer = model.transformer.h[0].mlp.c_fc
    hook = layer.register_full_backward_hook(lambda *args: seen.update(grad=args[2][0]))
    task.loss(model, batch)[0].backward()
    hook.remove()
    assert batch["tokens"].shape[1] % 4 == 0 and (seen["grad"][~batch["mask"]] == 0).all()
    # one by one: neighbors in the batch must not matter either
    whole = batch_of(task, lengths)
    parts = [{k: v[i : i + 1] for k, v in whole.items()} for i in range(3)]
    alone = sum(float(task.loss(model, part)[0].detach()) for part in parts)
    assert alone == pytest.approx(float(results[0][0]), rel=1e-5)


def test_long_contexts_become_overlapping_windows(tmp_path):
    task = task_of("python_qa", "task.max_length=24", "task.stride=4", "task.max_question=8")
    context = "0123456789abcdefghijklmnop"
    rows = [{"question": "where?", "context": context, "answers": [["fgh", 15]]}]
    samples = task.encode(rows, ByteCodec())
    assert all(len(sample.ids) <= 24 for sample in samples)
    texts = [bytes(s.ids[s.second : s.second + len(s.about.spans)].tolist()) for s in samples]
    assert [text.decode() for text in texts] == [context[i : i + 16] for i in (0, 12)]
    # windows with the whole answer have it as target; the end is the token after it
    assert [sample.target for sample in samples] == [(0, 0), (7 + 3, 7 + 5 + 1)]


def best_span(task, scores: np.ndarray, sample: Sample) -> tuple[float, int, int]:
    """Search exhaustively: score, first and last token of the best span; -inf if none."""
    after, size = int(task.options.end == "next"), len(sample.about.spans)
    starts = scores[sample.second : sample.second + size, 0]
    ends = scores[sample.second + after : sample.second + after + size, 1]
    best = -np.inf, -1, -1
    for i in np.argsort(-starts, kind="stable")[:20]:
        j = i + int(np.argmax(ends[i : min(size, i + task.options.max_answer)]))
        with np.errstate(invalid="ignore"):  # inf - inf
            score = float(starts[i] + ends[j])
        if score > best[0]:
            best = score, int(i), j
    return best


@pytest.mark.parametrize("end", ["last", "next"])
@pytest.mark.parametrize("longest", [1, 5, 400])
def test_best_span_equals_exhaustive_search(end, longest):
    task = task_of("python_qa", f"task.end={end}", f"task.max_answer={longest}")
    contexts = enumerate(["x" * 70, "ab", "", "cd ef", "y" * 19])
    rows = [{"question": "q" * n, "context": c, "answers": [["", 0]]} for n, c in contexts]
    samples, draw = task.encode(rows, ByteCodec()), np.random.default_rng(0)
    batch = task.collate(samples)
    shape = (*batch["tokens"].shape, 2)
    values = [-np.inf, np.inf, np.nan, 0.0, -0.0, 1.0, 2.0]
    chances = [[0.3, p, p, *[0.175 - p / 2] * 4] for p in [0, 0.02] * 10]
    nasty = [draw.choice(values, shape, p=p) for p in chances]
    equal = [np.full(shape, value) for value in values]
    found = set()
    for scores in (*nasty, *equal, draw.integers(0, 4, shape), draw.standard_normal(shape)):
        scores = scores.astype(np.float32)
        (seen,) = read([task.predictions(torch.from_numpy(scores), batch)])
        for n, sample in enumerate(samples):
            expected = best_span(task, scores[n], sample)
            assert seen["score"][n] == expected[0]
            if expected[0] > -np.inf:
                assert (seen["first"][n], seen["last"][n]) == expected[1:]
            found.add(expected)
    assert len(found) > 25 and (-np.inf, -1, -1) in found


def test_best_window_of_a_question_is_scored():
    task = task_of("python_qa")

    def window(example: int, text: str, *answers: str) -> About:
        return About(example, text, [*answers], np.array([[0, len(text)]]), 0)

    about = [window(0, "wrong", "right one"), window(1, "x", "y")]
    other = [window(0, "The right!", "right one", "no"), window(1, "y", "y")]
    place = {"first": [0, 0], "last": [0, 0]}
    rows = [
        {"loss": (2.0, 2), "score": [1.0, 0.0], **place, "about": about},
        {"loss": (4.0, 1), "score": [2.0, 0.0], **place, "about": other},  # the first of equals
    ]
    found = task.metrics(rows)
    assert found == {"loss": 2.0, "exact_match": 0.0, "f1": pytest.approx(100 * 2 / 3 / 2)}
    nothing = {"score": [-math.inf], "first": [3], "last": [0], "about": [window(0, "y", "y")]}
    assert task.metrics([{"loss": (1.0, 1), **nothing}])["f1"] == 0.0


def official_f1(prediction: str, truth: str) -> float:
    """Compute F1 as evaluate-v1.1.py does."""
    left, right = normalize(prediction).split(), normalize(truth).split()
    common = collections.Counter(left) & collections.Counter(right)
    same = sum(common.values())
    if same == 0:
        return 0
    precision = 1.0 * same / len(left)
    recall = 1.0 * same / len(right)
    return (2 * precision * recall) / (precision + recall)


def test_squad_metrics_equal_the_official_ones():
    assert normalize(" The  cat, an animal: a 'pet'. ") == "cat animal pet"
    assert normalize("theatre another") == "theatre another"
    assert normalize("The Cat!") == normalize("cat") != normalize("cats")
    for pair in [("the cat sat", "a cat"), ("", "x"), ("a a b", "a b b"), ("x y", "y x")]:
        assert f1(*pair) == official_f1(*pair)


def observation(predicted, labels, parts=None) -> dict:
    about = {"predicted": predicted, "labels": labels, "parts": parts or [0] * len(labels)}
    return {"loss": (1.0, len(labels)), **about}


def test_glue_metrics_equal_sklearn():
    truth, found = [1, 0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0]
    mrpc = task_of("glue/mrpc")
    values = mrpc.metrics([observation(found[:3], truth[:3]), observation(found[3:], truth[3:])])
    assert values["accuracy"] == pytest.approx(500 / 7)
    assert values["f1"] == pytest.approx(100 * sklearn_metrics.f1_score(truth, found))
    assert values["score"] == (values["accuracy"] + values["f1"]) / 2
    cola = task_of("glue/cola")
    expected = 100 * sklearn_metrics.matthews_corrcoef(truth, found)
    assert cola.metrics([observation(found, truth)])["mcc"] == pytest.approx(expected)
    stsb = task_of("glue/stsb", "model.n_positions=128")
    values = stsb.metrics([observation([0.1, 2.0, 2.5, 9.0], [0.0, 2.0, 3.0, 5.0])])
    assert values["spearman"] == pytest.approx(100) and 90 < values["pearson"] < 100
    assert stsb.metrics([observation([1.0, 1.0], [0.0, 2.0])])["pearson"] == 0.0
    mnli = task_of("glue/mnli")
    values = mnli.metrics([observation([0, 1, 2, 2], [0, 1, 0, 2], [0, 0, 1, 1])])
    assert (values["accuracy_matched"], values["accuracy_mismatched"]) == (100, 50)
    assert values["accuracy"] == values["score"] == 75
    batch = batch_of(stsb, [9, 12])
    batch["targets"] = torch.tensor([1.0, 3.0])
    model = build_model(stsb, torch.device("cpu"))
    expected = ((stsb.scores(model, batch)[:, 0] - batch["targets"]) ** 2).sum()
    assert torch.allclose(stsb.loss(model, batch)[0], expected), "regression: squared error"


def test_batches_are_equal_in_every_process(tmp_path):
    rows = [{"sentence1": f"{i}", "sentence2": "x", "label": i % 2} for i in range(10)]
    files = {split: write_rows(tmp_path / f"{split}.jsonl", rows) for split in SPLITS}
    task = task_of("glue/mrpc", *(f"data.{split}=['{file}']" for split, file in files.items()))
    task.open_data(("train", "validation"))
    whole = task.batch("train", 3, range(8), 8)
    half = task.batch("train", 3, range(4, 8), 8)
    assert torch.equal(whole["tokens"][4:], half["tokens"])
    assert torch.equal(whole["targets"][4:], half["targets"])
    seen = task.batch("validation", 0, range(10), 10)["tokens"][:, 0]
    assert sorted(seen.tolist()) == [48 + i for i in range(10)]  # every sample once


def test_windows_without_room_for_a_context_name_their_keys():
    options = QuestionAnsweringOptions(
        name="question_answering", tokenizer="bytes", max_length=64, stride=16, max_question=64,
        max_answer=30, end="last",
    )  # fmt: skip
    ((key, problem),) = options.problems()
    assert key == "max_length" and "no room for a context after max_question=64" in problem
    options.max_length = 128
    assert [*options.problems()] == []


def test_a_text_without_tokens_has_one_that_the_head_reads(tmp_path):
    words = ("data.texts=[sentence]", FOUR)
    task = task_of("labelled_files", *words)
    rows = [{"texts": [text], "label": 1, "part": 0} for text in ("", "sheep and goats")]
    empty, full = task.encode(rows, ByteCodec())
    assert (empty.ids.tolist(), empty.second, full.ids.tolist()[:2]) == ([0], 1, [115, 104])
    model = build_model(task, torch.device("cpu")).eval()
    alone = task.scores(model, task.collate([empty]))
    beside = task.scores(model, task.collate([empty, full]))
    assert torch.allclose(alone[0], beside[0], atol=1e-6), "whatever its neighbors are"
    pairs = [{"texts": ["", ""], "label": 1, "part": 0}]
    assert task.encode(pairs, ByteCodec())[0].ids.tolist() == [0]
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="no text, and the tokenizer has no end-of-text token"):
        task.encode(rows, FileCodec(tmp_path / "tokenizer.json"))


def test_parts_have_as_many_names_as_validation_has_entries():
    two = "data.validation=[a.jsonl,b.jsonl]"
    three = "data.validation=[a.jsonl,b.jsonl,c.jsonl]"
    with pytest.raises(ConfigError, match=r"task\.parts must name the 3 entries of data\.val"):
        task_of("labelled_files", FOUR, "task.parts=[x,y]", three)
    task_of("labelled_files", FOUR, two)  # parts: [all]
    task_of("labelled_files", FOUR, "task.parts=[x,y]", "data.validation=[a.jsonl]")
    task = task_of("labelled_files", FOUR, two, "task.parts=[x,y]")
    seen = {"predicted": [1, 1, 1], "labels": [1, 1, 0], "parts": [0, 1, 2], "loss": (1.0, 3)}
    found = task.metrics([seen])  # the test split has a third entry
    assert (found["accuracy_x"], found["accuracy_y"], found["accuracy_2"]) == (100, 100, 0)


def test_a_missing_scikit_learn_is_named_before_the_first_step(monkeypatch):
    task = task_of("labelled_files", FOUR)
    task.require_metrics()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"scikit-learn: pip install 'sparsepretrain\[eval\]'"):
        task.require_metrics()


def test_padding_beyond_the_positions_is_refused():
    words = ("labelled_files", FOUR, "model.n_positions=50")
    task_of(*words, "task.max_length=48")
    for length, padded in ((49, ", which is padded to 52"), (52, "$")):
        with pytest.raises(ConfigError, match=rf"model\.n_positions \(50\), got {length}{padded}"):
            task_of(*words, f"task.max_length={length}")
