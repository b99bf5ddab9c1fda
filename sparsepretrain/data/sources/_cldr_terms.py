"""English and German values of the same things, as CLDR (Babel) and num2words write them.

Every function draws one value and returns it in both languages; German is in the case that its
name says, or the same in all of them.
"""

from __future__ import annotations

import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsepretrain.data.sources._cldr_grammar import Draw

Term = tuple[str, str]
"""English, German."""

FIRST_DAY = datetime.date(1900, 1, 1).toordinal()
DAYS = datetime.date(2040, 1, 1).toordinal() - FIRST_DAY


def _codes(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PLAIN = _codes("""
    AR AT AU BE BG BO BR CA CL CN CO CR CU DE DK EC EE EG ES ET FI FR GE GH GR GT HR HU ID IE IL
    IN IS IT JM JO JP KE KZ LT LU LV MA MG MT MX MY NG NO NP NZ OM PA PE PK PL PT PY RO RS RU SE
    SG SI TH TN TZ UG UY VE VN ZA ZM
""")
"""Territories without an article in either language."""
ARTICLES = {
    "CH": ("", "in der"),
    "TR": ("", "in der"),
    "UA": ("", "in der"),
    "SK": ("", "in der"),
    "MN": ("", "in der"),
    "US": ("the ", "in den"),
    "NL": ("the ", "in den"),
    "AE": ("the ", "in den"),
    "PH": ("the ", "auf den"),
    "MV": ("the ", "auf den"),
    "BS": ("the ", "auf den"),
    "GB": ("the ", "im"),
    "SD": ("", "im"),
    "IQ": ("", "im"),
    "IR": ("", "im"),
    "LB": ("", "im"),
}
"""Territories with one: English article, German preposition and article in the dative."""
LANGUAGES = _codes("""
    ar bg cs da de el en es et fi fr ga he hi hr hu id is it ja ka kk ko lt lv ms mt nb ne nl pl
    pt ro ru sk sl sq sr sv sw ta th tr uk ur vi zh
""")
CURRENCIES = _codes("EUR USD GBP CHF JPY SEK NOK DKK PLN CZK HUF CAD AUD INR BRL MXN ZAR TRY")
SYMBOLS = ("EUR", "USD", "GBP", "JPY")
WEIGHTS = ("mass-kilogram", "mass-gram", "mass-ton", "mass-pound")
LENGTHS = ("length-meter", "length-centimeter", "length-kilometer", "length-mile", "length-foot")
DURATIONS = ("duration-minute", "duration-hour", "duration-day", "duration-week", "duration-month")
AMOUNTS = (
    "volume-liter",
    "energy-kilowatt-hour",
    "digital-gigabyte",
    "area-square-kilometer",
    "power-kilowatt",
)
DATES = ("full", "long", "medium")
"""CLDR's formats of a day after "on" and "am"; the short one comes after "before"."""


def both(text: Any) -> Term:
    """``text("en")`` and ``text("de")``, with plain spaces in place of CLDR's non-breaking ones."""
    english, german = (
        text(language).replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", " ")
        for language in ("en", "de")
    )
    return english, german


def when(draw: Draw) -> Term:
    """A date, a month, or a date and a time."""
    kind = draw.below(6)
    day = FIRST_DAY + draw.below(DAYS)
    if kind == 0:
        english, german = _month(day)
        return f"in {english}", f"im {german}"
    if kind == 1:
        english, german = _day(day, "short")
        return f"before {english}", f"vor dem {german}"
    english, german = _day(day, DATES[draw.below(len(DATES))])
    if kind == 2:
        clock = _clock(draw.below(96))
        return f"on {english} at {clock[0]}", f"am {german} um {clock[1]} Uhr"
    return f"on {english}", f"am {german}"


def where(draw: Draw) -> Term:
    """A territory with its preposition."""
    place = draw.below(len(PLAIN) + 2 * len(ARTICLES))  # those with an article twice as often
    if place < len(PLAIN):
        english, german = _territory(PLAIN[place])
        return f"in {english}", f"in {german}"
    code = list(ARTICLES)[(place - len(PLAIN)) // 2]
    (english, german), (article, preposition) = _territory(code), ARTICLES[code]
    german = " ".join(map(_weak, german.split()))
    if preposition.endswith("den") and german[-1] not in "ns":
        german += "n"
    return f"in {article}{english}", f"{preposition} {german}"


def language(draw: Draw) -> Term:
    """A language."""
    return _language(LANGUAGES[draw.below(len(LANGUAGES))])


def price(draw: Draw) -> Term:
    """An amount of money, with a symbol or in words."""
    amount = draw.below(1000) * 10 ** draw.below(4) + draw.below(2) * 0.5 + 1
    if draw.below(2):
        return _money(amount, SYMBOLS[draw.below(len(SYMBOLS))], "standard")
    return _money(amount, CURRENCIES[draw.below(len(CURRENCIES))], "name")


def measure(draw: Draw, units: tuple[str, ...]) -> Term:
    """A quantity of one of ``units``; nominative or accusative."""
    amount = (draw.below(400) + 2) / (1, 2, 10)[draw.below(3)]
    return _unit(amount, units[draw.below(len(units))])


def percentage(draw: Draw) -> Term:
    """A rate."""
    return _percent(draw.below(999) + 1)


def cardinal(draw: Draw) -> Term:
    """A number from 2 to 99 in words, smaller ones more often."""
    return _words(2 + draw.below(3 + draw.below(96)), "cardinal")


def ordinal(draw: Draw) -> Term:
    """An ordinal from 1 to 40 in words; German as after an article in the nominative."""
    return _words(1 + draw.below(40), "ordinal")


def year(draw: Draw) -> Term:
    """A year in words."""
    return _words(1801 + draw.below(199), "year")


@lru_cache(maxsize=1 << 16)
def _day(day: int, style: str) -> Term:
    from babel.dates import format_date

    date = datetime.date.fromordinal(day)
    return both(lambda locale: format_date(date, style, locale=locale))


@lru_cache(maxsize=1 << 12)
def _month(day: int) -> Term:
    from babel.dates import format_date

    date = datetime.date.fromordinal(day)
    return both(lambda locale: format_date(date, "MMMM y", locale=locale))


@cache
def _clock(quarter: int) -> Term:
    from babel.dates import format_time

    time = datetime.time(quarter // 4, quarter % 4 * 15)
    return both(lambda locale: format_time(time, "short", locale=locale))


@cache
def _territory(code: str) -> Term:
    from babel import Locale

    return both(lambda locale: Locale(locale).territories[code])


@cache
def _language(code: str) -> Term:
    from babel import Locale

    return both(lambda locale: Locale(locale).languages[code])


@lru_cache(maxsize=1 << 14)
def _money(amount: float, currency: str, style: Any) -> Term:
    from babel.numbers import format_currency

    return both(lambda locale: format_currency(amount, currency, locale=locale, format_type=style))


@lru_cache(maxsize=1 << 14)
def _unit(amount: float, unit: str) -> Term:
    from babel.units import format_unit

    return both(lambda locale: str(format_unit(amount, unit, "long", locale=locale)))


@cache
def _percent(thousandths: int) -> Term:
    from babel.numbers import format_percent

    return both(
        lambda locale: format_percent(thousandths / 1000, locale=locale, decimal_quantization=False)
    )


@cache
def _words(number: int, kind: str) -> Term:
    from num2words import num2words

    return both(lambda locale: num2words(number, lang=locale, to=kind))


def _weak(word: str) -> str:
    """An adjective in the dative after an article: Vereinigte -> Vereinigten; nouns stay."""
    endings = {"Vereinigte": "Vereinigten", "Vereinigtes": "Vereinigten", "Arabische": "Arabischen"}
    return endings.get(word, word)
