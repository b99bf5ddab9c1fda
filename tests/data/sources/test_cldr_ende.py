"""The sentences of cldr_ende, and the source that they fill."""

import importlib.metadata
import re
from random import Random

import numpy as np
import pytest

from sparsepretrain.data.preparation import load, prepare
from sparsepretrain.data.sources import cldr_ende
from sparsepretrain.data.sources.cldr_ende import CLAUSES, clause, sentence, slots, value
from sparsepretrain.errors import DataError

SMALL = {
    "train_pairs": 600, "validation_pairs": 60, "test_pairs": 50,
    "tokenizer": "bytes", "vocab_size": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def sentences():
    draws = Random(0)
    return [sentence(draws) for _ in range(3000)]


def test_sentences_are_of_moderate_length_and_plain(sentences):
    for text in (side for pair in sentences for side in pair):
        assert 5 <= len(text.split()) <= 40
        assert text[0] == text[0].upper() and text.endswith(".") and "{" not in text
        assert text == " ".join(text.split()) and "\N{NO-BREAK SPACE}" not in text


def test_sentences_are_diverse_in_both_languages(sentences):
    english, german = ({pair[side] for pair in sentences} for side in (0, 1))
    assert len(english) > 2990 and len(german) > 2990
    words = [{word for pair in sentences for word in pair[side].split()} for side in (0, 1)]
    assert min(map(len, words)) > 2000
    # translated, not copied: names and numbers are what both have
    shared = [len({*a.split()} & {*b.split()}) / len(a.split()) for a, b in sentences]
    assert np.mean(shared) < 0.15


@pytest.mark.parametrize(
    ("slot", "arguments", "english", "german"),
    [
        ("number", (42,), "forty-two", "zweiundvierzig"),
        ("clock", (15, 45), "3:45 PM", "15:45"),
        ("when", (724340, "full"), "on Monday, March 5, 1984", "am Montag, 5. März 1984"),
        ("who", ("the teacher",), "the teacher", "der Lehrer"),
        ("place", ("AT",), "Austria", "Österreich"),
        ("price", (3, 0.5, "EUR", "standard"), "€1.50", "1,50 €"),
        ("span", (6, "duration-week"), "3 weeks", "3 Wochen"),
    ],
)
def test_values_are_written_as_in_their_language(slot, arguments, english, german):
    assert value(slot, *arguments) == (english, german)


def test_both_sides_of_a_clause_have_the_same_slots_and_all_are_used():
    lines = CLAUSES.strip().splitlines()
    found = [sorted(re.findall(r"{(\w+)}", line)) for line in lines]
    assert found[::2] == found[1::2] and {s for line in found for s in line} == {*slots()}
    assert all(len({*line}) == len(line) for line in found)  # a value belongs to one place
    draws = Random(7)
    assert len({clause(draws) for _ in range(200)}) > 195


def test_splits_share_no_sentence_on_either_side(options, pair_texts):
    data = load(options("cldr_ende", **SMALL))
    sides = {split: list(zip(*pair_texts(data, split), strict=True)) for split in data.tokens}
    counts = {split: len(side[0]) for split, side in sides.items()}
    assert counts == {"train": 600, "validation": 60, "test": 50}
    for side in (0, 1):
        every = [text for split in sides.values() for text in split[side]]
        assert len(set(every)) == len(every) == 710
    draws = Random(0)  # held-out sentences come first
    held_out = pair_texts(data, "validation") + pair_texts(data, "test")
    assert held_out == [sentence(draws) for _ in range(110)]


def test_held_out_sentences_do_not_depend_on_the_amount_of_training(options, pair_texts):
    small = prepare(options("cldr_ende", **SMALL), workers=1)
    large = prepare(options("cldr_ende", **SMALL | {"train_pairs": 700}), workers=1)
    assert pair_texts(small, "test") == pair_texts(large, "test")
    assert pair_texts(small, "train") == pair_texts(large, "train")[:600]
    assert small.fingerprint != large.fingerprint


def test_missing_packages_are_named(options, monkeypatch, cache):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(DataError, match=r"pip install 'sparsepretrain\[mt\]'"):
        load(options("cldr_ende", **SMALL))
    assert not cache.exists()


def test_too_few_different_sentences_are_an_error(options, monkeypatch, cache):
    monkeypatch.setattr(cldr_ende, "sentence", lambda draws: ("One.", "Eins."))
    with pytest.raises(DataError, match=r"data\.validation_pairs"):
        prepare(options("cldr_ende", **SMALL), workers=1)
    assert not [p for p in cache.iterdir() if p.is_dir()]
