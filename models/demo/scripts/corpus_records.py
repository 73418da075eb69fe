"""Free records of the demo corpus: any keys with any values, as labels or as sentences.

They teach extraction that the key decides what is copied, whatever the schema. Names and cities
come from the draw's side of the held-out border like everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable

from corpus_draw import Draw, sentence_case
from corpus_grammar import Grammar
from corpus_words import COLORS, COUNTED, LIST_WORDS, MATERIALS, MONTHS, THINGS

Value = str | int | float
Maker = Callable[[Draw], Value]


def _up_to(highest: int) -> Maker:
    return lambda draw: draw.number(1, highest)


def _one_of(options: tuple[str, ...]) -> Maker:
    return lambda draw: draw.choice(options)


def _words(draw: Draw) -> str:
    return " ".join(draw.choice(LIST_WORDS) for _ in range(draw.number(1, 3)))


def _code(draw: Draw) -> str:
    letters = "".join(draw.choice("ABCDEFGHKLMNPRSTUVWXYZ") for _ in range(draw.number(1, 3)))
    return f"{letters}{draw.choice(('-', '', '/'))}{draw.number(10, 9999)}"


def _clock(draw: Draw) -> str:
    return f"{draw.number(1, 23)}:{draw.choice(('00', '15', '30', '45'))}"


def _two_names(draw: Draw) -> str:
    return f"{draw.invented_name()} {draw.invented_name()}"


MAKERS: dict[str, Maker] = {
    "title": _words,
    "subject": _words,
    "product": _words,
    "password": _words,
    "topic": _words,
    "animal": _one_of(("fox", "owl", "bear", "otter", "cat", "dog", "horse", "mule")),
    "author": _two_names,
    "owner": Draw.full_name,
    "captain": Draw.full_name,
    "winner": Draw.full_name,
    "teacher": Draw.first_name,
    "customer": Draw.full_name,
    "driver": Draw.first_name,
    "name": Draw.full_name,
    "country": Draw.invented_name,
    "company": Draw.invented_name,
    "brand": Draw.invented_name,
    "river": Draw.invented_name,
    "city": Draw.city,
    "destination": Draw.city,
    "origin": Draw.city,
    "port": Draw.city,
    "year": lambda draw: draw.number(1900, 2039),
    "weight": _up_to(900),
    "height": _up_to(400),
    "score": _up_to(100),
    "room": _up_to(600),
    "floor": _up_to(40),
    "age": _up_to(99),
    "distance": _up_to(900),
    "speed": _up_to(300),
    "pages": _up_to(900),
    "seats": _up_to(500),
    "discount": _up_to(90),
    "points": _up_to(999),
    "price": lambda draw: draw.number(1, 900) / draw.choice((1, 2, 4, 10)),
    "code": _code,
    "id": _code,
    "ticket": _code,
    "flight": _code,
    "time": _clock,
    "start": _clock,
    "color": _one_of(COLORS),
    "material": _one_of(MATERIALS),
    "item": _one_of(THINGS),
    "fruit": _one_of(COUNTED),
    "month": _one_of(MONTHS),
    "status": _one_of(("open", "closed", "paid", "lost", "ready", "late", "new", "broken")),
    "language": Draw.invented_name,
    "size": _one_of(("small", "medium", "large", "huge")),
}
KEYS = tuple(MAKERS)
PAIR = Grammar(
    "the {key} is {value}",
    "the {key} is {value}",
    "its {key} is {value}",
    "{value} is the {key}",
    "{value} as {key}",
    "with a {key} of {value}",
    "its {key}: {value}",
    "[for|as] the {key} [we chose|I noted|they gave|it says|we have] {value}",
    "the {key} [was|seems to be|must be|became|stays] {value}",
    "{key} {value}",
    "we know its {key}, {value}",
)
START = Grammar(
    "",
    "",
    "[Note|Record|Entry|Card|File|Report|Info|Sheet]: ",
    "[Here is|This is] [the entry|what we know|the record]: ",
    "[We wrote down|They told me|I read] that ",
)
LABELS = ("{key}: {value}", "{key} = {value}", "{key} - {value}", "{key}={value}", "{key}: {value}", "{key} -> {value}")


def record(draw: Draw) -> tuple[dict[str, Value], str]:
    """Two to six fields with values and a text that states each of them once."""
    keys = draw.random.sample(KEYS, draw.number(2, 6))
    facts = {key: MAKERS[key](draw) for key in keys}
    facts = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in facts.items()
    }
    if draw.chance(0.4):
        label = draw.choice(LABELS)
        parts = [label.format(key=_cased(draw, key), value=value) for key, value in facts.items()]
        return _shuffled(draw, facts), draw.choice((", ", "; ", "\n", " | ", ". ", "\n- ", " / ")).join(parts)
    parts = [PAIR.wording(draw).format(key=key, value=value) for key, value in facts.items()]
    joined = draw.choice((", ", "; ", ". ", ", and ", " and ", ". Then ", ", while ")).join(parts)
    return _shuffled(draw, facts), sentence_case(START.wording(draw) + joined) + "."


def _cased(draw: Draw, key: str) -> str:
    return draw.choice((key, key, key.capitalize(), key.upper())) if draw.chance(0.4) else key


def _shuffled(draw: Draw, facts: dict[str, Value]) -> dict[str, Value]:
    keys = draw.random.sample(list(facts), len(facts)) if draw.chance(0.5) else list(facts)
    return {key: facts[key] for key in keys}
