"""Tools that do something, know when something happens or what it costs, in words of any sort.

A question is known by the words that it shares with what a tool shows, some of which mean nothing,
and its values by where they stand. Each tool is drawn as a kind of its own, as those of `free` are.
"""

from __future__ import annotations

from dataclasses import dataclass

from corpus_draw import Draw, sentence_case, with_article
from corpus_grammar import Grammar
from corpus_records import MAKERS

from tool_corpus.free import THINGS, a_word
from tool_corpus.kinds import DAYS, TEXT, WHOLE, Kind, Parameter, Reply, Values, as_json
from tool_corpus.wordings import PLEASE, ToolWords, Wordings

VERBS = tuple(
    "paint lock unlock cook wash charge repair park rent hire feed water scan print mute pause stop copy move hide "
    "clean polish measure test wake deliver cancel renew sign approve reject archive upload restart fold pack ship "
    "sing read draw show start join leave sell lend burn dry cut mark count name check sort share load".split()
)
EVENTS = tuple("arrive start end leave ring return expire land finish stop melt wake begin meet rise move".split())
COSTS = tuple("fee tax toll fare premium interest insurance duty rent charge price value cost share bonus".split())
UNITS = tuple("minutes pages copies meters degrees points people bottles boxes days kilos liters seats hours".split())
NAMES_OF_ACTIONS = Grammar("{verb}_{thing}", "{verb}", "{thing}_{verb}", "do_{verb}", "{verb}_a_{thing}")
DESCRIPTIONS_OF_ACTIONS = Grammar("{verbs} [{one}|any {thing}|the {thing}][.|]", "[Can|Lets one] {verb} {one}[.|]")
ACTIONS = Grammar(
    f"{PLEASE}{{verb}} [the {{thing}} |]{{value}}{{more}}[.||, please.|!]",
    "[I want to|I need to|we want to|let us|you may] {verb} [the {thing} |]{value}{more}[.||, please.]",
    "{verb} [the {thing} |]{value}{more}[.||, please.]",
)
NAMES_OF_EVENTS = Grammar("{thing}_[times|hours|schedule]", "when_{verb}", "{verb}_time", "{thing}_{verb}")
DESCRIPTIONS_OF_EVENTS = Grammar("[Tells|Knows|Says|Shows|Gives] when [{one}|any {thing}|the {thing}] {verbs}[.|]")
EVENT_QUESTIONS = Grammar(
    "when [does|will] [the {thing} |]{value} {verb}{more}[?|]",
    "[tell me|do you know|I want to know|can you say] when [the {thing} |]{value} {verbs}{more}[?|.|]",
    "at [what|which] time [does|will] [the {thing} |]{value} {verb}{more}[?|]",
)
NAMES_OF_COSTS = Grammar("{what}", "{what}_of_{thing}", "{thing}_{what}", "[get|compute]_{what}")
DESCRIPTIONS_OF_COSTS = Grammar("[Computes|Gives|Tells|Calculates|Finds] the {what} of [{one}|any {thing}][.|]")
COST_QUESTIONS = Grammar(
    "[what is|what's|how much is|how high is|tell me|compute|I need] the {what} [of|for] {count} {units}{more}[?|.|]",
    "[what is|how much is|what does it cost to have] [{one}|the {thing}] of {count} {units}{more}[?|.|]",
)


@dataclass(frozen=True)
class _More:
    """A further value that a question may give: where it stands, and how a tool calls it."""

    text: str
    parameter: Parameter


def _further(draw: Draw) -> list[_More]:
    """Up to two further values, no two of a sort."""
    units = _word(draw, UNITS)
    sorts = [
        _More(
            draw.choice((" for {who}", " by {who}", " with {who}", " to {who}")),
            _named("who", "Which person", "person owner customer"),
        ),
        _More(
            draw.choice((" in {where}", " to {where}", " from {where}")),
            _named("where", "Which place", "place city country port"),
        ),
        _More(" at {time}", _named("time", "At what time", "time hour start clock")),
        _More(f" for {{count}} {units}", Parameter("count", (units, "count"), (), WHOLE, f"How many {units}")),
        _More(" on {day}", _named("day", "On which day", "day date weekday")),
    ]
    return draw.random.sample(sorts, draw.choice((0, 0, 1, 1, 2)))


def _named(slot: str, description: str, keys: str) -> Parameter:
    return Parameter(slot, tuple(keys.split()), (), TEXT, description)


def _values(draw: Draw) -> Values:
    first = MAKERS["code"](draw) if draw.chance(0.2) else draw.invented_name()
    value = f"{first} {draw.invented_name()}" if draw.chance(0.3) else first
    hours = f"{draw.number(0, 23)}:{draw.number(0, 59):02d}"
    return {
        "value": value, "count": draw.number(2, 9999), "who": draw.full_name(), "where": draw.city(), "time": hours,
        "day": draw.choice(DAYS[1:]),
    }  # fmt: skip


def _third(verb: str) -> str:
    """The verb as it stands after he, she or it."""
    if verb.endswith("y") and verb[-2:-1] not in "aeiou":
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "x", "z", "ch", "sh", "o")) else f"{verb}s"


def _word(draw: Draw, words: tuple[str, ...]) -> str:
    return a_word(draw) if draw.chance(0.35) else draw.choice(words)


def _words(draw: Draw, forms: tuple[Grammar, Grammar, Grammar], words: dict[str, str], more: list[_More]) -> ToolWords:
    """One name, description and question of their grammars with the words filled in."""
    names, descriptions, questions = forms
    question = questions.wording(draw).replace("{more}", "".join(one.text for one in more))
    for key, word in words.items():
        question = question.replace(f"{{{key}}}", word)
    texts = names.wording(draw).format(**words), sentence_case(descriptions.wording(draw).format(**words)), question
    return ToolWords(*(Wordings(Grammar(text), ()) for text in texts))


def action(draw: Draw) -> Kind:
    """A tool that does something with a thing."""
    verb, thing = _word(draw, VERBS), _word(draw, THINGS)
    words = {"verb": verb, "verbs": _third(verb), "thing": thing, "one": with_article(thing)}

    def reply(draw: Draw, given: Values) -> Reply:
        result = draw.choice(("ok", "done", as_json(ok=True), as_json(status="done"), as_json(status="ok")))
        return result, f"Done: {verb} {given['value']}."

    own = Parameter("value", (thing, thing, "name", "title", "id", "what"), (), TEXT, f"Which {thing}")
    more = _further(draw)
    said = _words(draw, (NAMES_OF_ACTIONS, DESCRIPTIONS_OF_ACTIONS, ACTIONS), words, more)
    return Kind(verb, said, (own, *(one.parameter for one in more)), _values, reply)


def schedule(draw: Draw) -> Kind:
    """A tool that knows when something happens."""
    verb, thing = _word(draw, EVENTS), _word(draw, THINGS)
    words = {"verb": verb, "verbs": _third(verb), "thing": thing, "one": with_article(thing)}

    def reply(draw: Draw, given: Values) -> Reply:
        time = _values(draw)["time"]
        result = time if draw.chance(0.4) else as_json(**{draw.choice(("time", "result", "value")): time})
        return result, f"{given['value']}: {time}."

    own = Parameter("value", (thing, thing, "name", "id", "which"), (), TEXT, f"Which {thing}")
    more = [one for one in _further(draw) if one.parameter.slot == "day"]
    said = _words(draw, (NAMES_OF_EVENTS, DESCRIPTIONS_OF_EVENTS, EVENT_QUESTIONS), words, more)
    return Kind(verb, said, (own, *(one.parameter for one in more)), _values, reply, one="value")


def quote(draw: Draw) -> Kind:
    """A tool that knows what some number of things costs."""
    what, thing, units = _word(draw, COSTS), _word(draw, THINGS), _word(draw, UNITS)
    words = {"what": what, "thing": thing, "one": with_article(thing), "units": units}

    def reply(draw: Draw, given: Values) -> Reply:
        value = draw.number(1, 999)
        result = str(value) if draw.chance(0.4) else as_json(**{draw.choice((what, "result", "value")): value})
        return result, f"The {what} of {given['count']} {units} is {value}."

    own = Parameter("count", (units, units, "count", "amount", "size", "number"), (), WHOLE, f"How many {units}")
    more = [one for one in _further(draw) if one.parameter.slot == "where"]
    said = _words(draw, (NAMES_OF_COSTS, DESCRIPTIONS_OF_COSTS, COST_QUESTIONS), words, more)
    return Kind(what, said, (own, *(one.parameter for one in more)), _values, reply)
