"""Invalid options of every source are refused with their key."""

import pytest

from sparsepretrain.errors import ConfigError

PARALLEL = {"tokenizer": "bytes", "vocab_size": None, "validation": None}


@pytest.mark.parametrize(("tokenizer", "has_mask"), [("gpt2", False), ("some/other", None)])
def test_mask_token_is_known_by_tokenizer(options, tokenizer, has_mask):
    size = 9 if has_mask is None else None
    assert options("openwebtext", tokenizer=tokenizer, vocab_size=size).has_mask is has_mask


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        ("python_source", {"vocab_size": 300}, "data.vocab_size must be 256"),
        ("python_source", {"tokenizer": "byte"}, "(did you mean 'bytes'?)"),
        ("python_source", {"tokenizer": "bpe", "vocab_size": 256}, "must be ≥ 257"),
        ("python_source", {"tokenizer": "wordpiece", "vocab_size": 5}, "must be ≥ 6"),
        ("python_source", {"tokenizer": "a.json"}, "data.vocab_size must be given"),
        ("python_source", {"tokenizer": "a.json", "vocab_size": 0}, "data.vocab_size"),
        ("python_source", {"tokenizer": "gpt2_size_bpe", "vocab_size": 256}, "must be 50257"),
        ("python_source", {"validation": 1.0}, "data.validation"),
        ("python_source", {"seed": -1}, "data.seed"),
        ("python_source", {"name": "a/b"}, "data.name"),
        ("python_source", {"roots": []}, "data.roots"),
        ("text_files", {"files": []}, "data.files"),
        ("text_files", {"test": []}, "data.test"),
        ("text_files", {"files": ["a.txt", "b.jsonl"]}, "data.files has 'b.jsonl'"),
        ("text_files", {"validation": ["*.parquet"]}, "data.validation has '*.parquet'"),
        ("wikitext2", {"validation": 0.1}, "data.rows=lines"),
        ("openwebtext", {"path": "json"}, "data.data_files"),
        ("openwebtext", {"data_files": []}, "data.data_files must name at least one file"),
        ("openwebtext", {"tokenizer": "some/other"}, "data.vocab_size must be given"),
        ("digits", {"validation": 150, "test": 24}, "data.test"),
        ("parallel_files", PARALLEL | {"train": []}, "data.train must be"),
        ("parallel_files", PARALLEL | {"test": ["a", "b", "c"]}, "data.test must be"),
    ],
)
def test_invalid_options_are_refused_with_their_key(options, config, changes, expected):
    with pytest.raises(ConfigError) as caught:
        options(config, **changes)
    assert any(expected in message for message in caught.value.messages)
