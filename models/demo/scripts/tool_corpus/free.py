"""Tools of any name in the corpus: lookups of any property, gauges, and entries with any fields.

They teach that what a request shows of a tool decides when it is called and with what, as the free
records of `corpus_records` do for extraction. Each is drawn as a kind of its own.
"""

from __future__ import annotations

from typing import Any

from corpus_draw import Draw, with_article
from corpus_grammar import Grammar, odd_word
from corpus_records import KEYS, MAKERS, PAIR
from corpus_words import COUNTED, LIST_WORDS

from tool_corpus.kinds import FAULTS, NUMBER, TEXT, WHOLE, Kind, Parameter, Reply, Values, as_json
from tool_corpus.wordings import GET, PLEASE, ToolWords, Wordings

PROPERTIES = tuple(
    "height length weight age owner color status population depth width speed mayor manager score rank level size "
    "area volume value rating power limit balance rent salary birthday author editor captain teacher coach address "
    "code key density pressure charge load voltage humidity budget debt title genre year version license capacity "
    "altitude temperature breed flavor grade language religion anthem motto founder symbol diet habitat".split()
)
THINGS = tuple(
    "river mountain tower bridge lake island ship car house book song team company village server engine road planet "
    "star animal plant horse dog museum school factory farm club band film game machine robot sensor battery tank "
    "account student patient worker guest member model project task ticket parcel device printer painting statue".split()
)
ENTRIES = tuple(
    "member guest student ticket record trip sale product patient report issue case driver parcel race lesson visit "
    "rental repair book loan match player vehicle sample delivery claim song project crew".split()
)
LOOKUP_NAMES = Grammar(f"[{GET}_|]{{thing}}_{{what}}", f"{GET}_{{what}}", "{what}_of_{thing}", "{what}[_lookup|_info|]")
LOOKUP_DESCRIPTIONS = Grammar(
    "[Gets|Returns|Tells|Shows|Looks up|Gives|Finds|Reads|Knows|Fetches] the {what} of {one}[.|]",
    "[The |]{what} of [{one}|any {thing}|some {thing}][.|]",
)
LOOKUP_QUESTIONS = Grammar(
    "[what is|what's|tell me|look up|find|show me|check|I need|give me|say|do you know] the {what} of [the |]{thing} {{value}}[?|.||, please.]",
    "[what is|what's|tell me|look up|find|show me|check|I need|give me] the {what} of {{value}}[?|.||, please.]",
    "[what|which] {what} does [the {thing} |]{{value}} have[?|]",
    "{what} of [the {thing} |]{{value}}[?||, please.]",
    "[the {thing}|{thing}] {{value}}[:|,] [what is its {what}|its {what}|{what}][?|]",
)
GAUGE_QUESTIONS = Grammar(
    "[what is|what's|tell me|look up|find|show me|check|I need|give me|say|do you know] the {what} of [the|our|my] {thing}[?|.||, please.| now?]",
    "[what|which] {what} does [the|our|my] {thing} have[?|| now?]",
    "[the|our|my] {thing}[:|,] [what is its {what}|its {what}|{what}][?|]",
)
# All but the things of the kinds that are kept back.
ANY_WORDS = tuple(word for word in LIST_WORDS + COUNTED if word not in ("music", "table", "stamp"))
ENTRY_NAMES = Grammar(
    "[add|create|new|save|register|book|make|open|store|insert|put]_{entry}", "{entry}[_add|_create|s]"
)
ENTRY_DESCRIPTIONS = Grammar(
    "[Adds|Creates|Saves|Registers|Stores|Makes|Opens] [{one}|a new {entry}][.|]", "[A new|New] {entry}[.|]"
)
ENTRY_QUESTIONS = Grammar(
    f"{PLEASE}[add|create|save|register|make|store|open] [{{one}}|a new {{entry}}|the {{entry}}][:|,|;| -] {{fields}}[.||, please.]",
    "[I need|we need|I want|there is] [{one}|a new {entry}][:|,|;| -] {fields}[.|]",
    "[new |]{entry}[:|,| -] {fields}[.|]",
)
KEY_WAYS = ("{what}", "{what}", "{thing}", "name", "id", "{thing}_name")


def _fixed(text: str) -> Wordings:
    """One wording; braces of slots stay."""
    return Wordings(Grammar(text), ())


def _value(draw: Draw) -> str:
    if draw.chance(0.3):
        return str(MAKERS["code"](draw))
    return draw.invented_name() if draw.chance(0.6) else f"{draw.invented_name()} {draw.invented_name()}"


def _filled(draw: Draw, grammar: Grammar, **words: str) -> str:
    return grammar.wording(draw).format(**words)


def a_word(draw: Draw) -> str:
    """A word that means nothing, or one that means something else."""
    if draw.chance(0.4):
        return draw.invented_name().lower()
    return odd_word(draw) if draw.chance(0.5) else draw.choice(ANY_WORDS)


def _of(draw: Draw, words: tuple[str, ...]) -> str:
    """One of the words, or any other, so that what a tool is for must be read."""
    return a_word(draw) if draw.chance(0.3) else draw.choice(words)


def lookup(draw: Draw) -> Kind:
    """A tool that tells one property of a thing by its name."""
    what, thing = _of(draw, PROPERTIES), _of(draw, THINGS)
    keys = tuple(way.format(what="name", thing=thing) for way in KEY_WAYS)
    words = ToolWords(
        _fixed(_filled(draw, LOOKUP_NAMES, what=what, thing=thing)),
        _fixed(_filled(draw, LOOKUP_DESCRIPTIONS, what=what, thing=thing, one=with_article(thing))),
        _fixed(_filled(draw, LOOKUP_QUESTIONS, what=what, thing=thing)),
    )

    def reply(draw: Draw, given: Values) -> Reply:
        value: Any = draw.number(1, 9999) if draw.chance(0.6) else _value(draw)
        said = f"The {what} of {given['value']} is {value}"
        if isinstance(value, int) and draw.chance(0.3):
            unit = draw.choice(("m", "km", "kg", "years", "percent", "points", "liters", "degrees", "watts", "hours"))
            return (
                as_json(**{what: value, "unit": unit}) if draw.chance(0.6) else f"{value} {unit}"
            ), f"{said} {unit}."
        if draw.chance(0.3):
            return str(value), f"{said}."
        fields = {draw.choice((what, what, "result", "value")): value}
        return as_json(**({thing: given["value"], **fields} if draw.chance(0.3) else fields)), f"{said}."

    parameter = Parameter("value", keys, (), TEXT, f"Which {thing}")
    return Kind(what, words, (parameter,), lambda draw: {"value": _value(draw)}, reply, one="value")


def gauge(draw: Draw) -> Kind:
    """A tool without parameters that tells one property of the only thing of its sort."""
    what, thing = draw.until_allowed(lambda: (draw.choice(PROPERTIES), draw.choice(THINGS)), "gauge")
    words = ToolWords(
        _fixed(_filled(draw, LOOKUP_NAMES, what=what, thing=thing)),
        _fixed(_filled(draw, LOOKUP_DESCRIPTIONS, what=what, thing=thing, one=f"the {thing}")),
        _fixed(_filled(draw, GAUGE_QUESTIONS, what=what, thing=thing)),
    )

    def reply(draw: Draw, given: Values) -> Reply:
        value: Any = draw.number(1, 9999) if draw.chance(0.6) else _value(draw)
        result = str(value) if draw.chance(0.4) else as_json(**{draw.choice((what, "result", "value")): value})
        return result, f"The {what} of the {thing} is {value}."

    return Kind(what, words, (), lambda draw: {}, reply)


def entry(draw: Draw) -> Kind:
    """A tool that takes an entry with one to four fields; a question may leave out the last."""
    what = _of(draw, ENTRIES)
    first = draw.choice(RICH_KEYS)
    keys = [first, *draw.random.sample([key for key in KEYS if key != first], draw.number(0, 3))]
    given = keys[: max(1, len(keys) - (1 if draw.chance(0.3) else 0))]
    said = draw.random.sample(given, len(given)) if draw.chance(0.4) else given
    fields = draw.choice((", ", " and ", ", and ", "; ")).join(
        PAIR.wording(draw).replace("{key}", key).replace("{value}", f"{{{key}}}") for key in said
    )
    words = ToolWords(
        _fixed(_filled(draw, ENTRY_NAMES, entry=what)),
        _fixed(_filled(draw, ENTRY_DESCRIPTIONS, entry=what, one=with_article(what))),
        _fixed(
            ENTRY_QUESTIONS.wording(draw)
            .replace("{one}", with_article(what))
            .replace("{entry}", what)
            .replace("{fields}", fields)
        ),
    )
    parameters = tuple(Parameter(key, (key,), (), _schema(key), f"The {key}") for key in keys)

    def reply(draw: Draw, given: Values) -> Reply:
        return draw.choice(("ok", "done", as_json(ok=True), as_json(status="saved"))), f"The {what} was saved."

    return Kind(what, words, parameters, lambda draw: {key: _typed(key, draw) for key in keys}, reply, is_far=True)


def _typed(key: str, draw: Draw) -> object:
    value = MAKERS[key](draw)
    return int(value) if isinstance(value, float) and value.is_integer() else value


# With values enough that some of them are held out.
RICH_KEYS = tuple(key for key in KEYS if key not in "animal color material item fruit month status size start".split())
WHOLE_KEYS = frozenset("year weight height score room floor age distance speed pages seats discount points".split())


def _schema(key: str) -> dict[str, Any]:
    if key == "price":
        return NUMBER
    return WHOLE if key in WHOLE_KEYS else TEXT


def fault(draw: Draw) -> str:
    """What went wrong, in a few words."""
    text = draw.choice(FAULTS)
    return f"{text} {_value(draw)}" if draw.chance(0.2) else text
