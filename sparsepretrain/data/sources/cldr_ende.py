"""English-German sentences around CLDR values: a small offline translation task.

Babel and num2words write dates, amounts, quantities, places and numbers in both languages. The
clauses around them differ in word order, as German puts verbs, participles, infinitives and
prefixes last, and the subject behind the verb if another phrase comes first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, time
from functools import cache
from importlib import metadata
from random import Random
from typing import Annotated, Any, ClassVar

from sparsepretrain.data.source import SPLITS, Pairs, PairSource, TokenOptions
from sparsepretrain.errors import DataError, needs
from sparsepretrain.registry import register

VERSION = 2
"""Version of the sentences."""
TRIES = 50
"""Maximum generated sentences per distinct sentence."""

CLAUSES = """
{when}, {who} bought {number} machines for {price}
{when} hat {who} {number} Maschinen für {price} gekauft
{who} pays {money} for the {ordinal} ticket
{who} bezahlt {money} für die {ordinal} Karte
in the year {year}, {who} sold a house in {place}
im Jahr {year} hat {who} ein Haus in {place} verkauft
{who} has learned {language} in {place} for {span}
{who} hat {span} lang in {place} {language} gelernt
{when}, {who} will write a book about {place} in {language}
{when} wird {who} ein Buch über {place} auf {language} schreiben
{who} sends {number} parcels to {place} {when}
{who} schickt {when} {number} Pakete nach {place} ab
{who} accepts the {ordinal} invoice for {price} {when}
{who} nimmt {when} die {ordinal} Rechnung über {price} an
{who} rejects {number} offers from {place}
{who} lehnt {number} Angebote aus {place} ab
at {clock}, {who} collects {mass} of paper
um {clock} Uhr holt {who} {mass} Papier ab
{who} wants to repair {number} bicycles {when}
{who} will {when} {number} Fahrräder reparieren
{who} needs {amount} and {span} for the {ordinal} machine
{who} braucht {amount} und {span} für die {ordinal} Maschine
{who} travels {length} because the {ordinal} train leaves at {clock}
{who} fährt {length}, weil der {ordinal} Zug um {clock} Uhr abfährt
{who} says that {percent} of the tourists in {place} speak {language}
{who} sagt, dass {percent} der Touristen in {place} {language} sprechen
if the parcel weighs {mass}, {who} pays {price}
wenn das Paket {mass} wiegt, bezahlt {who} {price}
although the {ordinal} car costs {money}, {who} must buy it {when}
obwohl das {ordinal} Auto {money} kostet, muss {who} es {when} kaufen
{who} lost {percent} of the votes in {place} in the year {year}
{who} hat im Jahr {year} in {place} {percent} der Stimmen verloren
"""
"""Alternating English and German clauses."""
JOINTS = ((", and ", ", und "), (", but ", ", aber "))
"""Conjunctions of two clauses; half of the sentences have two."""
PEOPLE = {
    "the teacher": "der Lehrer",
    "the old doctor": "die alte Ärztin",
    "a friend": "ein Freund",
    "the young author": "die junge Autorin",
    "a customer": "ein Kunde",
    "every student": "jeder Student",
    "this company": "diese Firma",
    "nobody": "niemand",
}
PLACES = """
AR AT AU BE BG BO BR CA CL CN CO CR CU DE DK EC EE EG ES ET FI FR GE GH GR GT HR HU ID IE IL IN IS
IT JM JO JP KE KZ LT LU LV MA MG MT MX MY NG NO NP NZ OM PA PE PK PL PT PY RO RS RU SE SG SI TH TN
TZ UG UY VE VN ZA ZM
"""
"""Territories without an article in either language."""
CURRENCIES = "EUR USD GBP CHF JPY SEK NOK DKK PLN CZK HUF CAD AUD INR BRL MXN ZAR TRY"
DAYS = range(date(1900, 1, 1).toordinal(), date(2040, 1, 1).toordinal())


@cache
def slots() -> dict[str, tuple[Any, ...]]:
    """Slot -> function that writes a value in a language, and choices for its other arguments."""
    from babel import Locale
    from babel.dates import format_date, format_time
    from babel.numbers import format_currency, format_percent
    from babel.units import format_unit
    from num2words import num2words

    def when(to: str, day: int, style: str) -> str:
        lead = {"en": "in", "de": "im"} if style == "MMMM y" else {"en": "on", "de": "am"}
        return f"{lead[to]} {format_date(date.fromordinal(day), style, locale=to)}"

    def clock(to: str, hour: int, minute: int) -> str:
        return format_time(time(hour, minute), "short", locale=to)

    def percent(to: str, halves: int) -> str:
        return format_percent(halves / 200, locale=to, decimal_quantization=False)

    def money(to: str, amount: int, scale: float, code: str, style: Any) -> str:
        return format_currency(amount * scale, code, locale=to, format_type=style)

    def unit(to: str, amount: int, name: str) -> str:
        return str(format_unit(amount / 2, name, "long", locale=to))

    both = [Locale(to).languages for to in ("en", "de")]
    codes = (code for code in sorted(both[0]) if len(code) == 2)
    languages = [code for code in codes if all(names.get(code, "").isalpha() for names in both)]
    amounts = range(1, 1000)
    scales = (0.5, 10, 1000)
    spans = [f"duration-{name}" for name in ("hour", "day", "week", "year")]
    return {
        "number": (lambda to, n: num2words(n, lang=to), range(2, 100)),
        "ordinal": (lambda to, n: num2words(n, lang=to, to="ordinal"), range(1, 41)),
        "year": (lambda to, n: num2words(n, lang=to, to="year"), range(1801, 2000)),
        "percent": (percent, range(1, 200)),
        "clock": (clock, range(24), range(0, 60, 15)),
        "when": (when, DAYS, ("full", "long", "medium", "MMMM y")),
        "who": (lambda to, who: who if to == "en" else PEOPLE[who], list(PEOPLE)),
        "place": (lambda to, code: Locale(to).territories[code], PLACES.split()),
        "language": (lambda to, code: Locale(to).languages[code], languages),
        "money": (money, amounts, scales, CURRENCIES.split(), ("name",)),
        "price": (money, amounts, scales, ("EUR", "USD", "GBP", "JPY"), ("standard",)),
        "mass": (unit, amounts, ("mass-kilogram", "mass-gram", "mass-pound")),
        "length": (unit, amounts, ("length-meter", "length-kilometer", "length-mile")),
        "amount": (unit, amounts, ("volume-liter", "energy-kilowatt-hour", "digital-gigabyte")),
        "span": (unit, range(4, 200, 2), spans),
    }


@cache
def value(slot: str, *arguments: Any) -> tuple[str, str]:
    """Return a value in English and German with ordinary spaces."""
    write = slots()[slot][0]
    english, german = (" ".join(write(to, *arguments).split()) for to in ("en", "de"))
    return english, german


def choose(draws: Random, choices: Any) -> Any:
    """Draw from ``choices`` by ``Random.random``, whose stream is stable across versions."""
    return choices[int(draws.random() * len(choices))]


def clause(draws: Random) -> tuple[str, str]:
    """Draw a clause and the values of its slots."""
    lines = CLAUSES.strip().splitlines()
    english, german = choose(draws, list(zip(lines[::2], lines[1::2], strict=True)))
    for slot in re.findall(r"{(\w+)}", english):
        one, other = value(slot, *(choose(draws, choices) for choices in slots()[slot][1:]))
        english, german = english.replace(f"{{{slot}}}", one), german.replace(f"{{{slot}}}", other)
    return english, german


def sentence(draws: Random) -> tuple[str, str]:
    """Draw a sentence of one or two clauses in English and German."""
    parts = [clause(draws)]
    if choose(draws, (True, False)):
        parts += [choose(draws, JOINTS), clause(draws)]
    english, german = ("".join(texts) for texts in zip(*parts, strict=True))
    return f"{english[0].upper()}{english[1:]}.", f"{german[0].upper()}{german[1:]}."


@dataclass(slots=True, kw_only=True)
class Options(TokenOptions):
    """Options of ``source: cldr_ende``."""

    train_pairs: Annotated[int, "> 0"]
    validation_pairs: Annotated[int, "≥ 0"]
    test_pairs: Annotated[int, "≥ 0"]
    seed: Annotated[int, "[0, 2^32)"]


@register("source", "cldr_ende")
class CldrEnDe(PairSource):
    """Sentence pairs about dates, times, amounts, places and languages.

    All English and all German sentences are distinct, so splits share none. Held-out sentences are
    drawn first and do not depend on the number of training pairs.
    """

    Options: ClassVar[type[TokenOptions]] = Options

    def state(self) -> list[Any]:
        """Return the versions of the sentences, Babel (with its CLDR data) and num2words."""
        with needs(self.options.name, "babel and num2words", "mt"):
            return [VERSION, metadata.version("babel"), metadata.version("num2words")]

    def pairs(self) -> dict[str, Pairs]:
        """Generate all sentences: about a second for 5,000."""
        draws = Random(self.options.seed)
        seen = set[str]()
        pairs_of_split: dict[str, Pairs] = {split: [] for split in (*SPLITS[1:], SPLITS[0])}
        for split, chosen in pairs_of_split.items():
            size = getattr(self.options, f"{split}_pairs")
            tries = 0
            while len(chosen) < size:
                pair, tries = sentence(draws), tries + 1
                if seen.isdisjoint(pair):
                    seen.update(pair)
                    chosen.append(pair)
                elif tries >= TRIES * size:
                    raise DataError(f"data.{split}_pairs: there are too few different sentences")
        return pairs_of_split
