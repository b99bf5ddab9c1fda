"""Exports of fine-tuned Hugging Face checkpoints: padding, special tokens, names of classes."""

import io
import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto import modeling_auto

from sparsepretrain import config
from sparsepretrain.console import Console
from sparsepretrain.data.encoding import FileCodec
from sparsepretrain.errors import ConfigError
from sparsepretrain.export import convert as converting
from sparsepretrain.export.tokenizer import PAD, make_tokenizer
from sparsepretrain.runs import weights
from sparsepretrain.tasks import build_task
from sparsepretrain.training import derive
from sparsepretrain.training.assembly import evaluated_model
from support.export_cases import export, write_checkpoint
from support.families import CAUSAL, SEQ2SEQ, small_config
from support.finetune_cases import train, write_rows

WORDS = ["<unk>", "<eos>", "<pad>", "sheep", "goats", "lines", "files", "one", "two"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = transformers.LlamaConfig(
    vocab_size=16, intermediate_size=32, num_key_value_heads=2, pad_token_id=2, eos_token_id=[1, 7],
    bos_token_id=0, **SIZES,
)  # fmt: skip
FAST = ("gpt2", "llama", "bart")
CLASSIFIERS = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
TEXTS = ["one two sheep goats", "two goats"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)


def add_tokenizer(directory, *, ends=False, words=WORDS, **settings):
    """A tokenizer of a few words; with ``ends`` it adds <eos> to each text."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <eos>", pair="$A <eos> $B <eos>", special_tokens=[("<eos>", 1)]
        )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    made.save_pretrained(directory)


def classified(source, tmp_path, *words):
    """Run directory of a classifier of the checkpoint, which was never trained."""
    typed = ["task=labelled_files", "data.train=[a.jsonl]", "data.validation=[b.jsonl]"]
    typed += ["data.texts=[text]", "data.labels=[spam,ham]", "task.max_length=16", *words]
    typed += ["steps=4", "epochs=null", "parallel.device=cpu", f"runs_dir='{tmp_path}'"]
    run = derive.finetuned(str(source), typed, [], Console(io.StringIO()))
    return write_checkpoint(run)


def assert_batches_equal_evaluation(run, directory):
    """Logits of two texts together, alone, and in evaluation are equal."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    # AutoTokenizer takes the rules of Qwen2Tokenizer for every qwen2, not those of tokenizer.json
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    assert tokenizer.pad_token_id == model.config.pad_token_id is not None
    task, ours, _ = evaluated_model(weights.find(run))
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    second = torch.zeros_like(batch.attention_mask).bool()
    with torch.no_grad():
        together = model(**batch).logits
        alone = torch.cat([model(**tokenizer(t, return_tensors="pt")).logits for t in TEXTS])
        mask = batch.attention_mask.bool()
        evaluated = task.recipe.scores(ours, batch.input_ids, mask, second)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together, evaluated, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        family if family in FAST else pytest.param(family, marks=pytest.mark.slow)
        for family in (*CAUSAL, *SEQ2SEQ)
        if family in CLASSIFIERS
    ],
)
def test_classifiers_predict_batches_without_a_padding_token(tmp_path, family):
    config = small_config(family)
    if family in CAUSAL:
        config.pad_token_id = None
    else:
        config.decoder_start_token_id = 0
    config.eos_token_id = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "hf")
    add_tokenizer(tmp_path / "hf", ends=family in SEQ2SEQ, eos_token="<eos>", unk_token="<unk>")
    run = classified(tmp_path / "hf", tmp_path)
    directory, _ = export(run)
    assert_batches_equal_evaluation(run, directory)


@pytest.mark.parametrize("pad", [None, "<eos>", "<pad>"])
def test_no_text_ends_with_the_padding_of_a_causal_classifier(tmp_path, pad):
    config = transformers.LlamaConfig.from_dict({**LLAMA.to_dict(), "pad_token_id": None})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    settings = {"eos_token": "<eos>", "unk_token": "<unk>"} | ({"pad_token": pad} if pad else {})
    words = [word.replace("<pad>", "files") for word in WORDS[:-2]] if pad is None else WORDS
    words = [*words, *(["one", "two"] if pad is None else [])]
    add_tokenizer(tmp_path / "hf", ends=True, words=list(dict.fromkeys(words)), **settings)
    run = classified(tmp_path / "hf", tmp_path)
    write_settings(run, tmp_path / "hf")
    directory, _ = export(run)
    assert_batches_equal_evaluation(run, directory)
    exported = AutoTokenizer.from_pretrained(directory)
    assert exported.pad_token == ("<pad>" if pad == "<pad>" else PAD)


def write_settings(run, source):
    """The files that a run keeps when its training begins."""
    (run / "pretrained").mkdir()
    for name in ("tokenizer_config.json",):
        (run / "pretrained" / name).write_bytes((source / name).read_bytes())


def test_vocabularies_below_256_are_exported(tmp_path):
    transformers.LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "hf")
    add_tokenizer(tmp_path / "hf", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    run = classified(tmp_path / "hf", tmp_path)
    directory, _ = export(run)
    assert_batches_equal_evaluation(run, directory)
    task, _, _ = evaluated_model(weights.find(run))
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    assert converting.small_batch(task, model)["input_ids"].max() < 16


def test_tokenizer_settings_and_generation_come_with_the_export(tmp_path):
    model = transformers.LlamaForCausalLM(LLAMA)
    source = tmp_path / "hf"
    model.save_pretrained(source)
    generation = {"eos_token_id": [1, 7], "do_sample": True, "temperature": 0.6, "top_k": 20}
    (source / "generation_config.json").write_text(json.dumps(generation))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    special = {"bos_token": "one", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    add_tokenizer(source, **special, extra_special_tokens=["two"], padding_side="left")
    (source / "chat_template.jinja").write_text(template)
    (tmp_path / "text.txt").write_text("one sheep two goats\n" * 200)
    words = ["task=causal_lm", "data=text_files", f"data.files=['{tmp_path}/text.txt']"]
    words += ["task.sequence_length=16", "steps=1", "eval.batches=1", f"runs_dir='{tmp_path}'"]
    first, _, _ = train(source, *words)
    second, _, _ = train(first, *words, "seed=1")
    for run in (first, second):
        directory, _ = export(run)
        exported = AutoTokenizer.from_pretrained(directory)
        assert {key: getattr(exported, key) for key in special} == special
        assert exported.chat_template == template and exported.padding_side == "left"
        assert "two" in exported.all_special_tokens and len(exported) == len(WORDS)
        assert json.loads((directory / "generation_config.json").read_text()) == generation
        config = json.loads((directory / "config.json").read_text())
        assert (config["eos_token_id"], config["pad_token_id"]) == ([1, 7], 2)


def spam_or_ham(root):
    """Files of texts of two classes, by name."""
    pairs = [("one sheep", "spam"), ("two goats", "ham")] * 4
    rows = [{"text": text, "label": name} for text, name in pairs]
    return [write_rows(root / f"{split}.jsonl", rows) for split in ("train", "dev")]


def named_checkpoint(root, names, config=LLAMA):
    """A classifier whose head has names; <unk> … <two> are its tokens."""
    config = type(config).from_dict(config.to_dict())
    config.id2label = dict(enumerate(names))
    config.label2id = {name: row for row, name in enumerate(names)}
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(root)
    add_tokenizer(root, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    return model.eval()


ROBERTA = transformers.RobertaConfig(
    vocab_size=16, intermediate_size=32, max_position_embeddings=64, pad_token_id=2, **SIZES
)


def probabilities(directory):
    """Name -> probabilities of TEXTS."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits
    return {name: logits.softmax(1)[:, row] for row, name in model.config.id2label.items()}


def fine_tuned(source, root, labels, *words):
    """``train`` for one step that changes nothing."""
    first, second = spam_or_ham(root)
    typed = ["task=labelled_files", f"data.train=['{first}']", f"data.validation=['{second}']"]
    typed += ["data.texts=[text]", f"data.labels=[{labels}]", "task.max_length=16", "steps=1"]
    typed += ["epochs=null", "optim.lr=1e-12", "sparsity=dense", f"runs_dir='{root}/runs'", *words]
    return train(source, *typed)


@pytest.mark.parametrize("config", [LLAMA, ROBERTA], ids=["llama", "roberta"])
def test_a_head_with_names_in_another_order_follows_the_data(tmp_path, config):
    source = tmp_path / "hf"
    named_checkpoint(source, ["SPAM", "ham"], config)
    before = probabilities(source)
    first, out, _ = fine_tuned(source, tmp_path, "ham,spam")
    assert "its rows were put in the order of data.labels, ham, spam" in out
    second, out, _ = fine_tuned(first, tmp_path, "spam,ham")  # a run is a source, too
    assert "its rows were put in the order of data.labels, spam, ham" in out
    for run in (first, second):
        exported = export(run)[0]
        after = probabilities(exported)
        torch.testing.assert_close(after["spam"], before["SPAM"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(after["ham"], before["ham"], rtol=1e-3, atol=1e-5)
        assert_batches_equal_evaluation(run, exported)
    _, out, _ = fine_tuned(first, tmp_path, "ham,spam", "seed=1")
    assert "its rows" not in out
    with pytest.raises(ConfigError, match=r"data\.labels: expected the order of the run"):
        typed = [f"data.validation=['{tmp_path}/dev.jsonl']", "data.labels=[spam,ham]"]
        derive.evaluated(weights.find(first), typed, [])


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (["NEGATIVE", "POSITIVE"], "ham,spam", "was trained for NEGATIVE, POSITIVE; its rows go"),
        (["LABEL_0", "LABEL_1"], "ham,spam", ""),
        (["spam", "ham"], "ham,spam,other", "newly initialized: score.weight"),
    ],
)
def test_exports_name_the_classes_of_the_data(tmp_path, before, now, line):
    named_checkpoint(tmp_path / "hf", before)
    run, out, _ = fine_tuned(tmp_path / "hf", tmp_path, now)
    assert line in out and ("its rows" in out) == ("its rows" in line)
    config = json.loads((export(run)[0] / "config.json").read_text())
    assert list(config["id2label"].values()) == now.split(",")
    assert config["label2id"] == {name: row for row, name in enumerate(now.split(","))}


@pytest.mark.parametrize("family", ["gpt2", "pretrained"])
def test_prompts_have_the_special_tokens_of_training(tmp_path, family):
    """T5's tokenizer ends every text, as Llama's begins it; packed text has no such tokens."""
    task = build_task(
        config.load(["data.tokenizer=bpe", "data.vocab_size=300", "model.vocab_size=300"])
    )
    task.model_options.family = family
    model = transformers.LlamaForCausalLM(LLAMA)
    add_tokenizer(tmp_path, eos_token="<eos>")
    file = tmp_path / "tokenizer.json"
    plain = FileCodec(file).encode(["one sheep"])[0].tolist()
    end = FileCodec(file).end_of_text
    ends = processors.TemplateProcessing("$A <eos>", "$A $B:1 <eos>:1", [("<eos>", end)])
    for added in (ends, processors.Sequence([processors.ByteLevel(), ends])):
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.post_processor = added
        tokenizer.save(str(file))
        assert Tokenizer.from_file(str(file)).encode("one sheep").ids == [*plain, end]
        made = make_tokenizer(file, None, task, model)
        expected = [*plain, end] if family == "pretrained" else plain
        assert made("one sheep").input_ids == expected
        assert made("one", "sheep").input_ids == expected
