"""A small grammar of English sentences and their German translations.

Clauses have a subject, a verb, objects and adverbials. German inflects articles, adjectives and
nouns for gender, number and case, puts the finite verb second in main clauses (also after a fronted
adverbial) and last in subordinate ones, and splits separable verbs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sparsepretrain.data.sources import _cldr_terms as terms
from sparsepretrain.data.sources._cldr_lexicon import (
    ADJECTIVES,
    ARTICLES,
    ENDINGS,
    PEOPLE,
    THINGS,
    VERBS,
    Noun,
    Verb,
)
from sparsepretrain.data.sources._cldr_terms import Term

WORDS = (6, 25)
"""Fewest and most words of a sentence, in either language."""
CASES = ("nominative", "accusative", "dative")
BLOCK = 4096
"""Random words drawn at a time."""


class Draw:
    """A stream of random choices: raw Philox words, which NumPy keeps across versions."""

    def __init__(self, seed: int) -> None:
        self._philox = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64))
        self._words: Iterator[int] = iter(())

    def below(self, limit: int) -> int:
        """An integer from 0 to ``limit`` - 1."""
        word = next(self._words, None)
        if word is None:
            self._words = iter(self._philox.random_raw(BLOCK).tolist())
            word = next(self._words)
        return word % limit


@dataclass(frozen=True, slots=True)
class Phrase:
    """A noun phrase."""

    english: str
    cases: dict[str, str]
    """Case -> German."""
    plural: bool


def phrase(draw: Draw, nouns: tuple[Noun, ...]) -> Phrase:
    """An article or a number, often an adjective, a noun."""
    noun = nouns[draw.below(len(nouns))]
    adjective = ADJECTIVES[draw.below(len(ADJECTIVES))] if draw.below(2) else None
    kind = ("the", "the", "a", "several", "number", "ordinal")[draw.below(6)]
    plural = kind in ("several", "number") or (kind == "the" and draw.below(3) == 0)
    gender = "p" if plural else noun.gender
    # the article in English and, by case, in German; and how what follows inflects
    before, article, declension = ["the"], ARTICLES["the"][gender], "weak"
    inflected: list[str] = []
    if kind == "number":
        english, german = terms.cardinal(draw)
        before, article, declension = [english], dict.fromkeys(CASES, german), "strong"
    elif kind == "several":
        before, article, declension = ["several"], ARTICLES["several"]["p"], "strong"
    elif kind == "a":
        first = noun.english if adjective is None else adjective[0]
        before = ["an" if first[0] in "aeio" else "a"]
        article, declension = ARTICLES["a"][gender], "mixed"
    elif kind == "ordinal":
        english, german = terms.ordinal(draw)
        before, inflected = ["the", english], [german.removesuffix("e")]
    if adjective is not None:
        before, inflected = [*before, adjective[0]], [*inflected, adjective[1]]
    cases = {}
    for case in CASES:
        ending = ENDINGS[declension][gender][case]
        words = [article[case], *(stem + ending for stem in inflected)]
        cases[case] = " ".join([*words, noun.german(case, plural=plural)])
    english = noun.english_plural if plural else noun.english
    return Phrase(" ".join([*before, english]), cases, plural)


@dataclass(frozen=True, slots=True)
class Clause:
    """What happens, before it is put into an order."""

    subject: Phrase
    english: str
    """Verb and objects."""
    objects: str
    """German objects."""
    finite: str
    """German finite verb."""
    end: str
    """What German puts last: prefix, participle or infinitive; may be empty."""
    joined: str
    """``end`` and ``finite`` as a subordinate clause ends with them."""
    time: Term
    place: Term

    def main(self) -> Term:
        """Subject first."""
        return (
            _join(self.subject.english, self.english, self.place[0], self.time[0]),
            _join(self.subject.cases["nominative"], self.finite, *self._middle(), self.end),
        )

    def fronted(self, adverbial: Term) -> Term:
        """``adverbial`` first: German inverts subject and verb."""
        english = _join(self.subject.english, self.english, self.place[0], self.time[0])
        rest = (self.subject.cases["nominative"], *self._middle(), self.end)
        return f"{adverbial[0]}, {english}", _join(adverbial[1], self.finite, *rest)

    def subordinate(self) -> Term:
        """As after a conjunction: the finite verb last."""
        english = _join(self.subject.english, self.english, self.place[0], self.time[0])
        return english, _join(self.subject.cases["nominative"], *self._middle(), self.joined)

    def _middle(self) -> tuple[str, str, str]:
        return self.time[1], self.objects, self.place[1]


NOWHERE = ("", "")


def clause(draw: Draw, *, time: Term = NOWHERE, place: Term = NOWHERE) -> Clause:
    """A subject does something in one of four tenses."""
    subject = phrase(draw, PEOPLE)
    verb = VERBS[draw.below(len(VERBS))]
    english, german = [], []
    if verb.dative:
        receiver = phrase(draw, PEOPLE)
        english, german = [receiver.english], [receiver.cases["dative"]]
    thing = phrase(draw, THINGS)
    english, german = [*english, thing.english], [*german, thing.cases["accusative"]]
    before, finite, end = _tense(verb, draw.below(4), plural=subject.plural)
    joined = end + finite if verb.prefix and end == verb.prefix else _join(end, finite)
    return Clause(
        subject, _join(before, *english), " ".join(german), finite, end, joined, time, place
    )


def _tense(verb: Verb, tense: int, *, plural: bool) -> tuple[str, str, str]:
    """(English verb, German finite verb, German end): present, past, future or "must"."""
    if tense == 0:
        english, german = (verb.bare, verb.plural) if plural else (verb.third, verb.singular)
        return english, german, verb.prefix
    if tense == 1:
        return verb.past, "haben" if plural else "hat", verb.participle
    infinitive = verb.prefix + verb.plural
    if tense == 2:
        return f"will {verb.bare}", "werden" if plural else "wird", infinitive
    return f"must {verb.bare}", "müssen" if plural else "muss", infinitive


def sentence(draw: Draw) -> Term:
    """One sentence in both languages, of :data:`WORDS` words, ending with a full stop."""
    while True:
        english, german = SHAPES[draw.below(len(SHAPES))](draw)
        if all(WORDS[0] <= len(text.split()) <= WORDS[1] for text in (english, german)):
            return f"{english[0].upper()}{english[1:]}.", f"{german[0].upper()}{german[1:]}."


def _statement(draw: Draw) -> Term:
    time = terms.when(draw)
    place = terms.where(draw) if draw.below(2) else NOWHERE
    if draw.below(2):
        return clause(draw, place=place).fronted(time)
    return clause(draw, time=time, place=place).main()


def _abroad(draw: Draw) -> Term:
    place = terms.where(draw)
    time = terms.when(draw) if draw.below(2) else NOWHERE
    return clause(draw, time=time).fronted(place)


def _reason(draw: Draw) -> Term:
    english, german = CONJUNCTIONS[draw.below(len(CONJUNCTIONS))]
    first, second = clause(draw), clause(draw, time=terms.when(draw) if draw.below(2) else NOWHERE)
    if draw.below(2):  # the subordinate clause takes the first place of the main one
        one, other = second.subordinate(), first
        main = _join(other.finite, other.subject.cases["nominative"], other.objects, other.end)
        plain = other.main()[0]
        return f"{english} {one[0]}, {plain}", f"{german} {one[1]}, {main}"
    one, two = first.main(), second.subordinate()
    return f"{one[0]} {english} {two[0]}", f"{one[1]}, {german} {two[1]}"


def _report(draw: Draw) -> Term:
    speaker, verb = phrase(draw, PEOPLE), SAYING[draw.below(len(SAYING))]
    one = clause(draw, place=terms.where(draw) if draw.below(3) == 0 else NOWHERE).subordinate()
    which = 1 if speaker.plural else 0
    return (
        f"{speaker.english} {verb[0][which]} that {one[0]}",
        f"{speaker.cases['nominative']} {verb[1][which]}, dass {one[1]}",
    )


def _thing(draw: Draw) -> Term:
    """Two of weight, price, size and need of a thing."""
    subject = phrase(draw, THINGS)
    first = draw.below(4)
    facts = []
    for kind in (first, (first + 1 + draw.below(3)) % 4):
        verbs, units = FACTS[kind]
        english, german = verbs[1 if subject.plural else 0]
        value = terms.measure(draw, units) if units else terms.price(draw)
        facts.append((f"{english} {value[0]}", f"{german} {value[1]}"))
    return (
        f"{subject.english} {facts[0][0]} and {facts[1][0]}",
        f"{subject.cases['nominative']} {facts[0][1]} und {facts[1][1]}",
    )


def _rate(draw: Draw) -> Term:
    """How many people of a place speak a language."""
    rate, place, tongue = terms.percentage(draw), terms.where(draw), terms.language(draw)
    noun = PEOPLE[draw.below(len(PEOPLE))]
    people = noun.german("accusative", plural=True)
    time = terms.when(draw) if draw.below(2) else NOWHERE
    if draw.below(2):
        return (
            _join(f"{place[0]}, {rate[0]} of the {noun.english_plural} learn {tongue[0]}", time[0]),
            _join(place[1], "lernen", time[1], f"{rate[1]} der {people} {tongue[1]}"),
        )
    return (
        _join(f"{rate[0]} of the {noun.english_plural} {place[0]} speak {tongue[0]}", time[0]),
        _join(f"{rate[1]} der {people}", place[1], "sprechen", time[1], tongue[1]),
    )


def _pay(draw: Draw) -> Term:
    """Somebody paid, or will pay, for something."""
    payer, thing, money = phrase(draw, PEOPLE), phrase(draw, THINGS), terms.price(draw)
    which = 1 if payer.plural else 0
    if draw.below(2):
        lead, verb = terms.where(draw), "will pay"
        finite, end = ("wird", "werden")[which], "bezahlen"
    else:
        year = terms.year(draw)
        lead, verb = (f"in the year {year[0]}", f"im Jahr {year[1]}"), "paid"
        finite, end = ("hat", "haben")[which], "bezahlt"
    return (
        f"{lead[0]}, {payer.english} {verb} {money[0]} for {thing.english}",
        f"{lead[1]} {finite} {payer.cases['nominative']} {money[1]} für "
        f"{thing.cases['accusative']} {end}",
    )


def _duration(draw: Draw) -> Term:
    """How long somebody wrote about something, and in which language."""
    thing, length = phrase(draw, THINGS), terms.measure(draw, terms.DURATIONS)
    writer, tongue, time = phrase(draw, PEOPLE), terms.language(draw), terms.when(draw)
    which = 1 if writer.plural else 0
    return (
        f"{writer.english} wrote about {thing.english} in {tongue[0]} for {length[0]} {time[0]}",
        f"{writer.cases['nominative']} {('hat', 'haben')[which]} {time[1]} {length[1]} lang auf "
        f"{tongue[1]} über {thing.cases['accusative']} geschrieben",
    )


FACTS: tuple[tuple[tuple[Term, Term], tuple[str, ...]], ...] = (
    ((("weighs", "wiegt"), ("weigh", "wiegen")), terms.WEIGHTS),
    ((("costs", "kostet"), ("cost", "kosten")), ()),
    ((("measures", "misst"), ("measure", "messen")), terms.LENGTHS),
    ((("needs", "braucht"), ("need", "brauchen")), (*terms.AMOUNTS, *terms.DURATIONS)),
)
"""Verbs for one and for several things, and the units; no units: a price."""
CONJUNCTIONS = (
    ("because", "weil"),
    ("although", "obwohl"),
    ("before", "bevor"),
    ("if", "wenn"),
    ("while", "während"),
)
SAYING = (
    (("says", "say"), ("sagt", "sagen")),
    (("believes", "believe"), ("glaubt", "glauben")),
    (("knows", "know"), ("weiß", "wissen")),
    (("hopes", "hope"), ("hofft", "hoffen")),
    (("admits", "admit"), ("gibt zu", "geben zu")),
)
"""(one speaker, several) in English and in German."""
SHAPES = (
    _statement,
    _statement,
    _abroad,
    _reason,
    _reason,
    _report,
    _thing,
    _thing,
    _rate,
    _pay,
    _duration,
)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
