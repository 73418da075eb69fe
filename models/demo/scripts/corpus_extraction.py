"""Extraction of the demo corpus: a sentence with facts in, a compact JSON object out.

Values are copied exactly as the sentence writes them; numbers become JSON numbers, a key the
sentence says nothing about becomes null. Held out are names and cities (invented ones, by hash), so
copying has to generalise.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import phrasings_extraction as varied
from corpus_draw import Draw, Item, Phrasings, sentence_case, with_article
from corpus_extraction_templates import ASK, BOOKING, CONTACT, EVENT, ORDER, PERSON, PRODUCT
from corpus_grammar import Grammar, dressed, odd_word
from corpus_records import record
from corpus_words import COLORS, MATERIALS, MONTHS, THINGS

Facts = dict[str, str | int | float]

EVENTS = tuple(
    "concert meeting workshop market conference lecture festival race exhibition wedding party picnic "
    "tournament parade reunion dance".split()
)
ABSENT_KEYS = ("phone", "country", "company", "language", "discount")


def _item(draw: Draw) -> str:
    thing = draw.choice(THINGS)
    return f"{draw.choice(MATERIALS)} {thing}" if draw.chance(0.5) else thing


def _price(draw: Draw) -> int | float:
    whole = draw.number(1, 500)
    return whole if draw.chance(0.5) else whole + draw.choice((0.25, 0.5, 0.75, 0.95, 0.99, 0.2, 0.4))


def _date(draw: Draw) -> str:
    day, month, year = draw.number(1, 28), draw.number(1, 12), draw.number(1990, 2039)
    name = MONTHS[month - 1]
    return draw.choice(
        (f"{day} {name} {year}", f"{name} {day}", f"{year}-{month:02d}-{day:02d}", f"{name} {day}, {year}")
    )


def _person(draw: Draw) -> Facts:
    return {"name": draw.full_name(), "age": draw.number(5, 99), "city": draw.city()}


def _order(draw: Draw) -> Facts:
    item = _item(draw)
    while item.endswith(("s", "x", "sh", "ch")):  # the sentences write the plural as item + s
        item = _item(draw)
    return {"name": draw.full_name(), "quantity": draw.number(2, 99), "item": item, "price": _price(draw)}


def _event(draw: Draw) -> Facts:
    return {"event": draw.choice(EVENTS), "city": draw.city(), "date": _date(draw)}


def _product(draw: Draw) -> Facts:
    return {"color": draw.choice(COLORS), "item": _item(draw), "price": _price(draw)}


def _booking(draw: Draw) -> Facts:
    return {"name": draw.full_name(), "city": draw.city(), "nights": draw.number(2, 21), "date": _date(draw)}


def _contact(draw: Draw) -> Facts:
    name = draw.full_name()
    phone = f"{draw.number(100, 999)}-{draw.number(1000, 9999)}"
    email = f"{name.split()[-1].lower()}@{draw.choice(THINGS)}.{draw.choice(('org', 'com', 'net', 'example'))}"
    return {"name": name, "phone": phone, "email": email}


SCHEMAS: tuple[tuple[Phrasings, Callable[[Draw], Facts]], ...] = (
    (PERSON, _person), (PERSON, _person), (ORDER, _order), (EVENT, _event), (PRODUCT, _product), (BOOKING, _booking),
    (CONTACT, _contact),
)  # fmt: skip

VARIED_SCHEMAS: tuple[tuple[Grammar, Callable[[Draw], Facts]], ...] = (
    (varied.PERSON_WORDINGS, _person), (varied.PERSON_WORDINGS, _person), (varied.ORDER_WORDINGS, _order),
    (varied.EVENT_WORDINGS, _event), (varied.PRODUCT_WORDINGS, _product), (varied.BOOKING_WORDINGS, _booking),
    (varied.CONTACT_WORDINGS, _contact),
)  # fmt: skip
VARIED_SHARE = 0.9  # of the training items; the others use the first templates


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def _sentence(draw: Draw, phrasings: Phrasings, facts: Facts) -> str:
    template = draw.phrase(phrasings)
    for noun in ("color", "event"):
        if noun in facts:
            template = template.replace(f"a {{{noun}}}", with_article(str(facts[noun])))
    sentence = template.format(**facts)
    return sentence[:1].upper() + sentence[1:] if "{item}" in template[:10] else sentence


def _first_extraction(draw: Draw) -> Item:
    phrasings, make = draw.choice(SCHEMAS)
    facts = dict(draw.until_allowed(lambda: tuple(make(draw).items()), "facts"))
    asked = list(facts)
    if draw.chance(0.4):
        asked = draw.random.sample(asked, draw.number(1, len(asked)))
    if draw.chance(0.06):
        asked.append(draw.choice([key for key in ABSENT_KEYS if key not in facts]))
    listed = _listed(asked) if draw.chance(0.6) else ", ".join(asked)
    question = draw.phrase(ASK).replace("{keys}", listed).replace("{s}", _sentence(draw, phrasings, facts))
    return _item_of(question, facts, asked)


def _item_of(question: str, facts: Facts, asked: list[str]) -> Item:
    answer = json.dumps({key: facts.get(key) for key in asked}, separators=(",", ":"), ensure_ascii=False)
    return Item("extraction", (("user", question), ("assistant", answer)), is_json=True)


def _carrier(draw: Draw, grammar: Grammar, facts: Facts) -> str:
    """A composed sentence with the facts.

    Now and then it has a word that means nothing, or stands between neutral sentences.
    """
    he = draw.choice(("he", "she"))
    template = dressed(draw, grammar.wording(draw), odd=0.06, opening=False)
    sentence = template.format(**facts, he=he, He=he.capitalize())
    if draw.chance(0.15):
        sentence = f"{varied.NEUTRAL.wording(draw)} {sentence}"
    if draw.chance(0.15):
        sentence = f"{sentence} {varied.NEUTRAL.wording(draw)}"
    return sentence


def _written_keys(draw: Draw, keys: list[str]) -> str:
    """The asked keys as a list in one of the ways people write lists."""
    way = draw.random.random()
    if way < 0.4:
        return _listed(keys)
    if way < 0.75:
        return ", ".join(keys)
    if way < 0.85:
        return draw.choice((" / ", "; ", " + ", " & ", "/", ",", " | ")).join(keys)
    quote = draw.choice(('"', "'", "`"))
    return ", ".join(f"{quote}{key}{quote}" for key in keys)


def _facts_and_text(draw: Draw) -> tuple[Facts, str]:
    """Facts of one schema, of a free record, or of two at once, with the text that carries them."""
    if draw.chance(0.22):
        return record(draw)
    grammar, make = draw.choice(VARIED_SCHEMAS)
    facts = dict(draw.until_allowed(lambda: tuple(make(draw).items()), "facts"))
    text = _carrier(draw, grammar, facts)
    if draw.chance(0.08):
        grammar, make = draw.choice(VARIED_SCHEMAS)
        more = dict(draw.until_allowed(lambda: tuple(make(draw).items()), "facts"))
        if not set(more) & set(facts):
            return {**facts, **more}, f"{text} {_carrier(draw, grammar, more)}"
    return facts, text


def _varied_extraction(draw: Draw) -> Item:
    facts, text = _facts_and_text(draw)
    asked = list(facts)
    if draw.chance(0.5):
        asked = draw.random.sample(asked, draw.number(1, len(asked)))
    if draw.chance(0.05):
        asked.append(draw.choice([key for key in ABSENT_KEYS if key not in facts] or ["planet"]))
    template = dressed(draw, varied.ASK_WORDINGS.wording(draw), odd=0.08, closing=False)
    if draw.chance(0.04):  # a label nobody knows
        template = f"{sentence_case(odd_word(draw))}: {template}"
    return _item_of(template.format(keys=_written_keys(draw, asked), s=text), facts, asked)


def extraction(draw: Draw) -> Item:
    """A sentence with facts and the keys to pull out of it, in the order they are asked for."""
    if draw.split == "train" and draw.chance(VARIED_SHARE):
        return _varied_extraction(draw)
    return _first_extraction(draw)
