"""Words of the grammar: nouns with gender and plural, adjectives, verbs, and their endings."""

from __future__ import annotations

from typing import NamedTuple


class Noun(NamedTuple):
    """A noun in both languages."""

    english: str
    english_plural: str
    singular: str
    """German."""
    gender: str
    """m, f or n."""
    plural: str
    """German."""
    weak: bool = False
    """The accusative and dative singular are the plural: der Kunde, den Kunden."""

    def german(self, case: str, *, plural: bool) -> str:
        """The German form in nominative, accusative or dative."""
        if plural:
            add_n = case == "dative" and self.plural[-1] not in "ns"
            return self.plural + "n" * add_n
        return self.plural if self.weak and case != "nominative" else self.singular


class Verb(NamedTuple):
    """A verb with an object in the accusative."""

    bare: str
    third: str
    past: str
    singular: str
    """German, third person, without its prefix."""
    plural: str
    """The same; with the prefix before it the infinitive."""
    participle: str
    prefix: str = ""
    """Separable."""
    dative: bool = False
    """Whether there is a receiver, too."""


def _nouns(table: str) -> tuple[Noun, ...]:
    found = []
    for line in table.strip().splitlines():
        english, english_plural, singular, gender, plural, *weak = line.split()
        found.append(Noun(english, english_plural, singular, gender, plural, bool(weak)))
    return tuple(found)


def _verbs(table: str) -> tuple[Verb, ...]:
    found = []
    for line in table.strip().splitlines():
        bare, third, past, singular, plural, participle, *rest = line.split()
        prefix = next((word.rstrip("-") for word in rest if word != "+"), "")
        found.append(Verb(bare, third, past, singular, plural, participle, prefix, "+" in rest))
    return tuple(found)


# English, plural, German, gender, plural, weak or not
PEOPLE = _nouns("""
teacher teachers Lehrer m Lehrer
doctor doctors Arzt m Ärzte
friend friends Freund m Freunde
guest guests Gast m Gäste
child children Kind n Kinder
woman women Frau f Frauen
man men Mann m Männer
neighbour neighbours Nachbar m Nachbarn weak
customer customers Kunde m Kunden weak
student students Student m Studenten weak
colleague colleagues Kollege m Kollegen weak
engineer engineers Ingenieurin f Ingenieurinnen
judge judges Richterin f Richterinnen
author authors Autorin f Autorinnen
girl girls Mädchen n Mädchen
baker bakers Bäcker m Bäcker
farmer farmers Bauer m Bauern weak
tourist tourists Tourist m Touristen weak
member members Mitglied n Mitglieder
lawyer lawyers Anwältin f Anwältinnen
driver drivers Fahrer m Fahrer
artist artists Künstlerin f Künstlerinnen
""")

THINGS = _nouns("""
report reports Bericht m Berichte
letter letters Brief m Briefe
house houses Haus n Häuser
machine machines Maschine f Maschinen
book books Buch n Bücher
key keys Schlüssel m Schlüssel
picture pictures Bild n Bilder
ticket tickets Karte f Karten
table tables Tisch m Tische
clock clocks Uhr f Uhren
contract contracts Vertrag m Verträge
bridge bridges Brücke f Brücken
ship ships Schiff n Schiffe
proposal proposals Vorschlag m Vorschläge
newspaper newspapers Zeitung f Zeitungen
box boxes Kiste f Kisten
car cars Auto n Autos
plan plans Plan m Pläne
suitcase suitcases Koffer m Koffer
invoice invoices Rechnung f Rechnungen
window windows Fenster n Fenster
bicycle bicycles Fahrrad n Fahrräder
medicine medicines Medikament n Medikamente
parcel parcels Paket n Pakete
building buildings Gebäude n Gebäude
lamp lamps Lampe f Lampen
map maps Landkarte f Landkarten
program programs Programm n Programme
chair chairs Stuhl m Stühle
answer answers Antwort f Antworten
""")

ADJECTIVES = (
    ("new", "neu"),
    ("old", "alt"),
    ("small", "klein"),
    ("big", "groß"),
    ("important", "wichtig"),
    ("beautiful", "schön"),
    ("strange", "seltsam"),
    ("famous", "berühmt"),
    ("young", "jung"),
    ("modern", "modern"),
    ("cheap", "billig"),
    ("quiet", "leis"),
    ("heavy", "schwer"),
    ("broken", "kaputt"),
    ("honest", "ehrlich"),
    ("cold", "kalt"),
    ("green", "grün"),
    ("red", "rot"),
    ("interesting", "interessant"),
    ("clean", "sauber"),
)
"""English, German stem."""

# English in three forms, German in three, separable prefix, + for verbs with a receiver
VERBS = _verbs("""
buy buys bought kauft kaufen gekauft
find finds found findet finden gefunden
see sees saw sieht sehen gesehen
sell sells sold verkauft verkaufen verkauft
need needs needed braucht brauchen gebraucht
describe describes described beschreibt beschreiben beschrieben
forget forgets forgot vergisst vergessen vergessen
order orders ordered bestellt bestellen bestellt
lose loses lost verliert verlieren verloren
repair repairs repaired repariert reparieren repariert
accept accepts accepted nimmt nehmen angenommen an-
reject rejects rejected lehnt lehnen abgelehnt ab-
prepare prepares prepared bereitet bereiten vorbereitet vor-
collect collects collected holt holen abgeholt ab-
return returns returned gibt geben zurückgegeben zurück-
destroy destroys destroyed macht machen kaputtgemacht kaputt-
watch watches watched sieht sehen angesehen an-
remove removes removed trägt tragen weggetragen weg-
start starts started schaltet schalten eingeschaltet ein-
give gives gave gibt geben gegeben +
show shows showed zeigt zeigen gezeigt +
send sends sent schickt schicken geschickt +
bring brings brought bringt bringen mitgebracht mit- +
present presents presented stellt stellen vorgestellt vor- +
explain explains explained erklärt erklären erklärt +
""")

ARTICLES = {
    "the": {
        "m": {"nominative": "der", "accusative": "den", "dative": "dem"},
        "f": {"nominative": "die", "accusative": "die", "dative": "der"},
        "n": {"nominative": "das", "accusative": "das", "dative": "dem"},
        "p": {"nominative": "die", "accusative": "die", "dative": "den"},
    },
    "a": {
        "m": {"nominative": "ein", "accusative": "einen", "dative": "einem"},
        "f": {"nominative": "eine", "accusative": "eine", "dative": "einer"},
        "n": {"nominative": "ein", "accusative": "ein", "dative": "einem"},
    },
    "several": {"p": {"nominative": "mehrere", "accusative": "mehrere", "dative": "mehreren"}},
}
"""Article -> gender (p: plural) -> case -> German."""

ENDINGS = {
    "weak": {
        "m": {"nominative": "e", "accusative": "en", "dative": "en"},
        "f": {"nominative": "e", "accusative": "e", "dative": "en"},
        "n": {"nominative": "e", "accusative": "e", "dative": "en"},
        "p": {"nominative": "en", "accusative": "en", "dative": "en"},
    },
    "mixed": {
        "m": {"nominative": "er", "accusative": "en", "dative": "en"},
        "f": {"nominative": "e", "accusative": "e", "dative": "en"},
        "n": {"nominative": "es", "accusative": "es", "dative": "en"},
    },
    "strong": {"p": {"nominative": "e", "accusative": "e", "dative": "en"}},
}
"""Declension -> gender (p: plural) -> case -> ending of an adjective."""
