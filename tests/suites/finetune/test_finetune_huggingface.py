"""Fine-tuning of checkpoints written by transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sparsepretrain.errors import CheckpointError, DataError
from sparsepretrain.models.pretrained import Pretrained
from support.finetune_cases import build, glue, load, train, write_rows

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "sheep", "goats", "lines", "files", "one", "two"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GPT2 = transformers.GPT2Config(
    vocab_size=256, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
BERT = transformers.BertConfig(
    vocab_size=len(WORDS), intermediate_size=32, max_position_embeddings=64, **SIZES
)
MARIAN = transformers.MarianConfig(
    vocab_size=16, d_model=16, encoder_layers=1, decoder_layers=1, pad_token_id=0,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
    decoder_ffn_dim=32, max_position_embeddings=16, decoder_start_token_id=0,
)  # fmt: skip
LLAMA = transformers.LlamaConfig(
    vocab_size=16, intermediate_size=32, num_key_value_heads=2, **SIZES
)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)


def save(root: Path, model: transformers.PreTrainedModel) -> Path:
    model.save_pretrained(root / "hf")
    return root / "hf"


def bert(root: Path, cls: type = transformers.BertForMaskedLM, **more: object) -> Path:
    config = transformers.BertConfig.from_dict({**BERT.to_dict(), **more})
    directory = save(root, cls(config))
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_gpt2_fine_tunes_on_bytes(tmp_path):
    source = save(tmp_path, transformers.GPT2LMHeadModel(GPT2))
    words = [*glue(tmp_path), "task.max_length=64", "epochs=1", f"runs_dir='{tmp_path}'"]
    directory, out, lines = train(source, *words, "sparsity=sste")
    assert "newly initialized: score.weight" in out
    assert "sste 2:4 on 2 layers" in out
    assert {"accuracy", "f1", "score"} <= set(lines[-1])
    # a fine-tuned run is a source again
    _, out, _ = train(directory, *words, "sparsity=dense", "seed=1")
    assert "newly initialized" not in out


def test_weights_equal_the_checkpoint(tmp_path):
    model = transformers.GPT2LMHeadModel(GPT2).eval()
    source = save(tmp_path, model)
    t = build(source, *glue(tmp_path), "task.max_length=64")
    assert torch.equal(t.model.transformer.wte.weight, model.transformer.wte.weight)
    words = ["task=causal_lm", "data=python_source", f"data.roots=['{Path(__file__).parent}']"]
    t = build(source, *words, "task.sequence_length=16", "steps=1")
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        logits = t.task.recipe.logits(t.model.eval(), tokens)
        assert torch.equal(logits, model(tokens).logits)


def test_bert_keeps_a_trained_head_of_the_right_size(tmp_path):
    cls = transformers.BertForSequenceClassification
    source = bert(tmp_path, cls)
    words = [*glue(tmp_path), "task.max_length=64", "epochs=1", f"runs_dir='{tmp_path}'"]
    directory, out, _ = train(source, *words)
    assert "newly initialized" not in out and "on 2 layers" in out
    assert (directory / "tokenizer.json").is_file()
    _, out, _ = train(source, *words, "data.labels=[no, yes, other]", "task.metrics=[accuracy]")
    assert "newly initialized: classifier.bias, classifier.weight" in out


def test_bert_inputs_and_scores_equal_transformers(tmp_path):
    source = bert(tmp_path)
    rows = [{"sentence1": "one sheep", "sentence2": "two goats", "label": 0}] * 4
    file = write_rows(tmp_path / "rows.jsonl", rows)
    t = build(source, "task=glue/mrpc", f"data.train=['{file}']", "data.validation=[]",
              "eval.batches=0", "task.max_length=64")  # fmt: skip
    batch = t.task.batch("train", 0, range(1), 4)
    assert batch["tokens"][0].tolist() == [1, 8, 4, 2, 9, 5, 2, 0]
    assert batch["mask"][0].sum() == 7
    assert batch["second"][0].tolist() == [False] * 4 + [True] * 3 + [False]
    # scores equal those of transformers
    model, (tokens, mask, second) = t.model.eval(), map(batch.get, ("tokens", "mask", "second"))
    with torch.no_grad():
        given = {"attention_mask": mask.long(), "token_type_ids": second.long()}
        expected = model(input_ids=tokens, **given).logits
        assert torch.equal(Pretrained.scores(model, tokens, mask, second), expected)


@pytest.mark.parametrize(
    ("config", "ffn", "attention"),
    [
        (GPT2, "*.mlp.c_fc *.mlp.c_proj", "*.attn.c_attn *.attn.c_proj"),
        (BERT, "*.intermediate.dense *[0-9].output.dense",
         "*.attention.self.* *.attention.output.dense"),
        (MARIAN, "*.fc1 *.fc2", "*_attn.[qkv]_proj *_attn.out_proj"),
        (LLAMA, "*.mlp.gate_proj *.mlp.up_proj *.mlp.down_proj",
         "*_attn.[qkv]_proj *_attn.o_proj"),
    ],
    ids=["gpt2", "bert", "marian", "llama"],
)  # fmt: skip
def test_layers_are_found_by_role(tmp_path, config, ffn, attention):
    ffn, attention = ffn.split(), attention.split()
    path = tmp_path / config.model_type
    config.save_pretrained(path)
    options = Pretrained.Options(name="x", family="pretrained", path=str(path))
    roles = Pretrained.roles(options)
    assert (roles["ffn"], roles["attention"]) == (ffn, attention)
    assert roles["all"] == ffn + attention
    assert len(roles["ffn_out"]) == 1


def test_tokenizer_larger_than_the_model_is_refused(tmp_path):
    source = bert(tmp_path, vocab_size=8)
    with pytest.raises(DataError, match=r"10 tokens.* 8"):
        build(source, *glue(tmp_path), "task.max_length=64")
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load(source, *glue(tmp_path))
