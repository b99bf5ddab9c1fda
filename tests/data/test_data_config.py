import dataclasses
import itertools
import re
from pathlib import Path

import pytest
from tiny_runs import composed

from sparsepretrain import registry
from sparsepretrain.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "configs" / "data"
CONFIGS = sorted(file for file in FOLDER.glob("*.yaml") if not file.name.startswith("_"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_keys_are_the_fields_and_every_key_is_commented(file, options):
    plain = composed(f"data={file.stem}")["data"]
    cls = registry.get("source", plain["source"]).Options
    assert set(plain) == {f.name for f in dataclasses.fields(cls)}
    assert plain["name"] == file.stem
    lines = file.read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r"\w+:", line) and not line.startswith(("name:", "source:", "defaults:")):
            assert before.startswith("#"), f"{line} has no comment"
    if "vocab_size" in plain:
        sizes = {"gpt2": 50257, "bytes": 256, "bert-base-uncased": 30522, "wordpiece": 32768}
        known = sizes.get(plain["tokenizer"], plain["vocab_size"])
        assert options(file.stem).vocab_size == known


def test_every_source_has_a_config():
    used = {composed(f"data={file.stem}")["data"]["source"] for file in CONFIGS}
    assert used == set(registry.names("source"))


@pytest.mark.parametrize(
    ("tokenizer", "known"),
    [("bytes", False), ("gpt2", False), ("bert-base-uncased", True), ("wordpiece_cased", True),
     ("some/other", None)],
)  # fmt: skip
def test_mask_token_is_known_by_tokenizer(options, tokenizer, known):
    size = 9 if known is None else None
    assert options("openwebtext", tokenizer=tokenizer, vocab_size=size).has_mask is known


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        ("python_source", {"vocab_size": 300}, "data.vocab_size must be 256"),
        ("python_source", {"tokenizer": "byte"}, "(did you mean 'bytes'?)"),
        ("python_source", {"tokenizer": "gpt2"}, "data.tokenizer"),
        ("python_source", {"tokenizer": "bpe", "vocab_size": 256}, "must be ≥ 257"),
        ("python_source", {"tokenizer": "wordpiece", "vocab_size": 5}, "must be ≥ 6"),
        ("python_source", {"tokenizer": "a.json"}, "data.vocab_size must be given"),
        ("python_source", {"tokenizer": "a.json", "vocab_size": 0}, "data.vocab_size"),
        ("python_source", {"tokenizer": "gpt2_size_bpe", "vocab_size": 256}, "must be 50257"),
        ("python_source", {"validation": 1.0}, "data.validation"),
        ("python_source", {"seed": -1}, "data.seed"),
        ("python_source", {"name": "a/b"}, "data.name"),
        ("python_source", {"roots": []}, "data.roots"),
        ("python_source", {"roots": "src"}, "data.roots"),
        ("text_files", {"files": []}, "data.files"),
        ("text_files", {"test": []}, "data.test"),
        ("text_files", {"validation": "x"}, "data.validation"),
        ("wikitext2", {"validation": 0.1}, "data.rows=lines"),
        ("wikitext2", {"rows": "pages"}, "data.rows must be one of documents, lines"),
        ("openwebtext", {"path": "json", "data_files": {"train": "x"}}, "data.data_files"),
        ("text_files", {"file": "x"}, "(did you mean 'data.files'?)"),
        ("openwebtext", {"path": "json"}, "data.data_files"),
        ("openwebtext", {"data_files": ["x"]}, "data.data_files needs data.path"),
        ("openwebtext", {"tokenizer": "some/other"}, "data.vocab_size must be given"),
    ],
)
def test_wrong_options_are_one_line(options, config, changes, expected):
    with pytest.raises(ConfigError) as caught:
        options(config, **changes)
    assert len(caught.value.messages) == 1 and expected in caught.value.messages[0]
