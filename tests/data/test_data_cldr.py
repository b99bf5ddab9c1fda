"""The grammar of cldr_ende, and the source that it fills."""

from __future__ import annotations

import numpy as np
import pytest

from sparsepretrain.data import load, pairs, prepare
from sparsepretrain.data.sources._cldr_grammar import SHAPES, WORDS, Draw, clause, phrase, sentence
from sparsepretrain.data.sources._cldr_lexicon import PEOPLE, THINGS, VERBS
from sparsepretrain.errors import DataError

SMALL = {"train_pairs": 600, "validation_pairs": 60, "test_pairs": 50, "vocab_size": 400}


@pytest.fixture(scope="module")
def sentences():
    draw = Draw(0)
    return [sentence(draw) for _ in range(3000)]


def texts(data, split):
    found = pairs(data, split)
    sides = ((found.source(i), found.target(i)) for i in range(len(found)))
    return [tuple(data.decode(side[:-1]) for side in pair) for pair in sides]


def test_sentences_have_6_to_25_words_and_are_plain(sentences):
    for text in (side for pair in sentences for side in pair):
        assert WORDS[0] <= len(text.split()) <= WORDS[1]
        assert text[0] == text[0].upper() and text.endswith(".")
        assert text == " ".join(text.split()) and "\N{NO-BREAK SPACE}" not in text


def test_there_are_many_different_sentences(sentences):
    english, german = ({pair[side] for pair in sentences} for side in (0, 1))
    assert len(english) > 2990 and len(german) > 2990
    words = [{word for pair in sentences for word in pair[side].split()} for side in (0, 1)]
    assert min(map(len, words)) > 2000
    # translated, not copied: names and numbers are what both have
    shared = [len({*a.split()} & {*b.split()}) / len(a.split()) for a, b in sentences]
    assert np.mean(shared) < 0.15


def test_draws_repeat_and_differ_by_seed(sentences):
    assert [sentence(d) for d in [Draw(0)] for _ in range(20)] == sentences[:20]
    assert [sentence(d) for d in [Draw(1)] for _ in range(20)] != sentences[:20]


class Script:
    """A draw with chosen answers; 0 after the last one."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def below(self, limit):
        answer = self.answers.pop(0) if self.answers else 0
        assert answer < limit
        return answer


def noun(nouns, english):
    return [n.english for n in nouns].index(english)


@pytest.mark.parametrize(
    ("answers", "english", "german"),
    # noun, adjective or not, which, kind; kinds: the, the, a, several, number, ordinal
    [
        (
            ("customer", 1, 0, 2),
            "a new customer",
            "ein neuer Kunde, einen neuen Kunden, einem neuen Kunden",
        ),
        (
            ("woman", 1, 1, 0, 1),
            "the old woman",
            "die alte Frau, die alte Frau, der alten Frau",
        ),
        (
            ("child", 0, 2),
            "a child",
            "ein Kind, ein Kind, einem Kind",
        ),
        (
            ("child", 0, 3),
            "several children",
            "mehrere Kinder, mehrere Kinder, mehreren Kindern",
        ),
        (
            ("friend", 0, 0, 0),
            "the friends",
            "die Freunde, die Freunde, den Freunden",
        ),
        (
            ("artist", 1, 3, 4, 0, 0),
            "two big artists",
            "zwei große Künstlerinnen, zwei große Künstlerinnen, zwei großen Künstlerinnen",
        ),
        (
            ("guest", 1, 2, 5, 2),
            "the third small guest",
            "der dritte kleine Gast, den dritten kleinen Gast, dem dritten kleinen Gast",
        ),
        (
            ("artist", 1, 4, 2),
            "an important artist",
            "eine wichtige Künstlerin, eine wichtige Künstlerin, einer wichtigen Künstlerin",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_noun_phrases_are_declined(answers, english, german):
    made = phrase(Script(noun(PEOPLE, answers[0]), *answers[1:]), PEOPLE)
    assert made.english == english and ", ".join(made.cases.values()) == german


def built(verb, tense, *, plural=False, **adverbials):
    """ "the teacher(s) VERB the report", with the doctor as receiver where there is one."""
    index = next(i for i, v in enumerate(VERBS) if v.bare == verb)
    the = (0, 1) if not plural else (0, 0)
    one = lambda nouns, word, end: (noun(nouns, word), 0, *end)  # noqa: E731
    receiver = one(PEOPLE, "doctor", (0, 1)) if VERBS[index].dative else ()
    thing = one(THINGS, "report", (0, 1))
    answers = (*one(PEOPLE, "teacher", the), index, *receiver, *thing, tense)
    return clause(Script(*answers), **adverbials)


TIME, PLACE = ("in May 2021", "im Mai 2021"), ("in France", "in Frankreich")


def test_word_order_of_a_separable_verb():
    present = built("accept", 0, time=TIME, place=PLACE)
    assert present.main() == (
        "the teacher accepts the report in France in May 2021",
        "der Lehrer nimmt im Mai 2021 den Bericht in Frankreich an",
    )
    assert present.subordinate()[1] == "der Lehrer im Mai 2021 den Bericht in Frankreich annimmt"
    fronted = built("accept", 0, place=PLACE).fronted(TIME)
    assert fronted == (
        "in May 2021, the teacher accepts the report in France",
        "im Mai 2021 nimmt der Lehrer den Bericht in Frankreich an",
    )


def test_word_order_of_the_other_tenses():
    assert built("show", 1).main() == (
        "the teacher showed the doctor the report",
        "der Lehrer hat dem Arzt den Bericht gezeigt",
    )
    future = built("accept", 2, plural=True)
    assert future.main() == (
        "the teachers will accept the report",
        "die Lehrer werden den Bericht annehmen",
    )
    assert future.subordinate()[1] == "die Lehrer den Bericht annehmen werden"
    assert built("reject", 3).main()[1] == "der Lehrer muss den Bericht ablehnen"
    assert built("reject", 3).main()[0] == "the teacher must reject the report"


@pytest.mark.parametrize("shape", sorted(set(SHAPES), key=lambda f: f.__name__))
def test_every_shape_makes_sentences(shape):
    draw = Draw(7)
    made = {shape(draw) for _ in range(200)}
    assert len(made) > 195
    for text in (side for pair in made for side in pair):
        assert "  " not in text and text == text.strip() and "None" not in text


def test_splits_share_no_sentence_on_either_side(options):
    data = prepare(options("cldr_ende", **SMALL), workers=1)
    sides = {split: list(zip(*texts(data, split), strict=True)) for split in data.tokens}
    assert {split: len(side[0]) for split, side in sides.items()} == {
        "train": 600, "validation": 60, "test": 50,
    }  # fmt: skip
    for side in (0, 1):
        every = [text for split in sides.values() for text in split[side]]
        assert len(set(every)) == len(every) == 710


def test_decoding_gives_back_the_sentences(options):
    data = prepare(options("cldr_ende", **SMALL), workers=1)
    draw = Draw(0)
    first = [sentence(draw) for _ in range(110)]  # held out first, no sentence came twice
    assert texts(data, "validation") + texts(data, "test") == first


def test_held_out_sentences_do_not_depend_on_the_amount_of_training(options):
    small = prepare(options("cldr_ende", **SMALL), workers=1)
    large = prepare(options("cldr_ende", **SMALL | {"train_pairs": 700}), workers=1)
    assert texts(small, "test") == texts(large, "test")
    assert texts(small, "train") == texts(large, "train")[:600]
    assert small.fingerprint != large.fingerprint


def test_preparing_is_repeatable_and_needs_no_command(options, tmp_path, monkeypatch):
    first = load(options("cldr_ende", **SMALL))
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "again"))
    second = prepare(options("cldr_ende", **SMALL), workers=2)
    assert first.fingerprint == second.fingerprint and first.directory != second.directory


def test_another_version_of_babel_is_other_data(options, monkeypatch):
    import importlib.metadata

    first = load(options("cldr_ende", **SMALL))
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "99" if name == "babel" else real(name)
    )
    assert load(options("cldr_ende", **SMALL)).directory != first.directory


def test_without_the_packages(options, monkeypatch, cache):
    import importlib.metadata

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(DataError, match=r"babel and num2words: pip install 'sparsepretrain\[mt\]'"):
        load(options("cldr_ende", **SMALL))
    assert not cache.exists()


def test_an_exhausted_grammar_is_an_error(options, monkeypatch, cache):
    from sparsepretrain.data.sources import _cldr_grammar

    monkeypatch.setattr(_cldr_grammar, "sentence", lambda draw: ("One.", "Eins."))
    with pytest.raises(DataError, match=r"data\.validation_pairs: the grammar ran out"):
        prepare(options("cldr_ende", **SMALL), workers=1)
    assert not [p for p in cache.iterdir() if p.is_dir()]
