"""Conversations with tools: which are offered, what is asked, and what model and tool say.

A question for one of the tools becomes a call, its result an answer. A question for none of them is
answered as it is without tools, and one for a tool that is not there with the apology for what the
model does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from corpus_arithmetic import arithmetic, word_problem
from corpus_draw import Draw, Item, is_held_out
from corpus_extraction import extraction
from corpus_grammar import dressed
from corpus_inference import inference_question
from corpus_lists import list_task
from corpus_smalltalk import UNKNOWN, smalltalk

from tool_corpus import free, free_actions
from tool_corpus.kinds import KEPT_BACK, TRAINED, Kind, Parameter, Reply, Schema, Values, as_json
from tool_corpus.layout import ShownTool, call_text, result_text, tools_text
from tool_corpus.wordings import FOLLOW_UP

Turns = list[tuple[str, str]]
SLOT = re.compile(r"\{(\w+)\}")
FAULT_SHARE = 0.06
# Groups whose questions the model may take for something that it can do by itself.
OWN_SKILLS = {"sum", "message", "note", "calendar"}
FREE = (
    free.lookup, free.lookup, free.lookup, free.entry, free.entry, free.gauge, free_actions.action, free_actions.action,
    free_actions.action, free_actions.schedule, free_actions.quote,
)  # fmt: skip
# Of all tools: a name, and of all parameters: a key, that says nothing. So they have to be read.
DISGUISED_SHARE = 0.3


@dataclass(frozen=True)
class Offered:
    """One tool of a conversation: its kind, how it is shown, and what it calls each slot."""

    kind: Kind
    shown: ShownTool
    keys: dict[str, str]

    def arguments(self, given: Values) -> Values:
        """The values of slots by the tool's own keys, in the order in which it shows them."""
        return {key: given[slot] for slot, key in self.keys.items() if slot in given}


@dataclass(frozen=True)
class Asked:
    """A question for a tool, with the values that it gives."""

    text: str
    given: Values


def _named(draw: Draw, name: str) -> str:
    """The name as programmers write names: mostly with underscores."""
    if draw.chance(0.15):
        first, *rest = name.split("_")
        return first + "".join(part.capitalize() for part in rest)
    return name.replace("_", "-") if draw.chance(0.04) else name


def _property(draw: Draw, parameter: Parameter, described: bool) -> Schema:
    schema = dict(parameter.schema)
    if described or draw.chance(0.25):
        schema["description"] = parameter.description
    if schema == {"type": "integer"} and draw.chance(0.15):
        schema["minimum"] = draw.choice((0, 1))
    if schema["type"] == "integer" and draw.chance(0.1):
        schema["type"] = "number"
    return schema


def _offer(draw: Draw, kind: Kind, needed: set[str]) -> Offered:
    """Shows a tool of the kind with the parameters that a question needs, and perhaps more."""
    parameters = [
        one for place, one in enumerate(kind.parameters) if place == 0 or one.slot in needed or draw.chance(0.75)
    ]
    keys: dict[str, str] = {}
    properties: dict[str, Schema] = {}
    for one in parameters:
        left = [key for key in _keys(draw, one) if key not in keys.values()]
        is_disguised = _is_disguised(draw) or not left
        key = _new_word(draw, keys) if is_disguised else draw.choice(left)
        keys[one.slot] = key
        properties[key] = _property(draw, one, described=is_disguised and len(parameters) > 1)
    return Offered(kind, _shown(draw, kind, properties), keys)


def _shown(draw: Draw, kind: Kind, properties: dict[str, Schema]) -> ShownTool:
    description = kind.words.descriptions.draw(draw)
    if _is_disguised(draw):
        name = "_".join(free.a_word(draw) for _ in range(draw.choice((1, 1, 2))))
    else:
        name = kind.words.names.draw(draw)
        description = "" if draw.chance(0.04) else description
    return ShownTool(_named(draw, name), description, properties)


def _is_disguised(draw: Draw) -> bool:
    return draw.split != "phrasing" and draw.chance(DISGUISED_SHARE)


def _new_word(draw: Draw, keys: dict[str, str]) -> str:
    word = free.a_word(draw)
    while word in keys.values():
        word = free.a_word(draw)
    return word


def _keys(draw: Draw, parameter: Parameter) -> tuple[str, ...]:
    if draw.split == "phrasing" and parameter.unseen:
        return parameter.unseen
    return tuple(dict.fromkeys(parameter.keys)) if draw.chance(0.5) else parameter.keys


def _asked(draw: Draw, kind: Kind) -> Asked:
    """A question for a tool of the kind; the values that it gives belong to the draw's split."""
    template = kind.words.questions.draw(draw)
    slots = sorted(set(SLOT.findall(template)))

    def drawn() -> Values:
        values = kind.values(draw)
        return {slot: values[slot] for slot in slots}

    given = drawn()
    while slots and is_held_out("tool", kind.group, *given.values()) != (draw.split != "train"):
        given = drawn()
    text = template if draw.split == "phrasing" else dressed(draw, template)
    return Asked(text.format(**given), given)


def _any_kind(draw: Draw) -> Kind:
    return draw.choice(TRAINED) if draw.chance(0.45) else draw.choice(FREE)(draw)


def _asked_kind(draw: Draw) -> Kind:
    """A kind to ask a question for: one whose phrasings are kept back where those are scored."""
    return draw.choice(TRAINED) if draw.split == "phrasing" else _any_kind(draw)


def _offer_with(draw: Draw, first: Offered) -> list[Offered]:
    """Up to three more tools beside one, none of which fits the same questions, in any order."""
    offered = [first]
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2, 2, 3))):
        kind = _any_kind(draw)
        tool = _offer(draw, kind, set())
        is_apart = all(tool.kind.group != one.kind.group and tool.shown.name != one.shown.name for one in offered)
        if is_apart:
            offered.append(tool)
    return draw.random.sample(offered, len(offered))


def _system(offered: list[Offered]) -> tuple[str, str]:
    return "system", tools_text([one.shown for one in offered])


def _reply(draw: Draw, tool: Offered, given: Values) -> Reply:
    assert tool.kind.reply is not None, "kinds that are kept back have no results"
    if draw.chance(FAULT_SHARE):
        fault = free.fault(draw)
        result = as_json(error=fault) if draw.chance(0.6) else f"{draw.choice(('Error', 'error', 'failed'))}: {fault}"
        return result, f"That did not work: {fault}."
    result, answer = tool.kind.reply(draw, given)
    # A sentence is an answer as it stands.
    return (answer, answer) if draw.chance(0.12) else (result, answer)


def _exchange(draw: Draw, tool: Offered, asked: Asked) -> Turns:
    """A question, its call, the result and the answer."""
    result, answer = _reply(draw, tool, asked.given)
    call = call_text(tool.shown.name, tool.arguments(asked.given))
    return [("user", asked.text), ("assistant", call), ("user", result_text(result)), ("assistant", answer)]


def _further(draw: Draw, tool: Offered, before: Asked) -> Turns:
    """A second question for the same tool: "And in Oslo?"."""
    slot = tool.kind.one
    value = _other(draw, tool.kind, before.given[slot])
    template = dressed(draw, FOLLOW_UP.draw(draw), opening=False)
    preposition = draw.choice(("in ", "")) if slot == "city" else ""
    return _exchange(draw, tool, Asked(template.format(value=f"{preposition}{value}"), {slot: value}))


def _other(draw: Draw, kind: Kind, value: object) -> object:
    """Another value of the slot that a kind has; it belongs to the draw's split."""
    while True:
        other = kind.values(draw)[kind.one]
        if other != value and is_held_out("tool", kind.group, other) == (draw.split != "train"):
            return other


def _twice(draw: Draw, tool: Offered) -> Turns | None:
    """A question for two values at once, with two calls; None where it gives another value too.

    Both calls stand in one answer, or the second in the next: callers may allow one at a time.
    """
    kind = tool.kind
    asked = _asked(draw, kind)
    if set(asked.given) != {kind.one}:
        return None
    first, second = asked.given[kind.one], _other(draw, kind, asked.given[kind.one])
    both = f"{first}{draw.choice((' and ', ' and ', ' and in ' if kind.one == 'city' else ' and ', ', and '))}{second}"
    given = [{kind.one: first}, {kind.one: second}]
    replies = [_reply(draw, tool, one) for one in given]
    calls = [call_text(tool.shown.name, tool.arguments(one)) for one in given]
    results = [("user", result_text(result)) for result, _ in replies]
    if draw.chance(0.3):
        between = [("recited", calls[0]), results[0], ("assistant", calls[1]), results[1]]
    else:
        between = [("assistant", "\n".join(calls)), *results]
    said = " ".join(answer for _, answer in replies)
    return [("user", asked.text.replace(str(first), both)), *between, ("assistant", said)]


def _fits(offered: list[Offered]) -> list[Callable[[Draw], Item]]:
    """Domains none of whose questions could be meant for one of the tools."""
    plain: list[Callable[[Draw], Item]] = [extraction, inference_question, list_task]
    if all(one.kind.group != "sum" for one in offered):
        plain += [arithmetic, word_problem]
    return [*plain, smalltalk] if all(one.kind.is_far for one in offered) else plain


def _without_call(draw: Draw, offered: list[Offered]) -> Turns:
    """A question for none of the tools, and its answer."""
    groups = {one.kind.group for one in offered}
    if draw.chance(0.4):
        kind = draw.choice(TRAINED) if draw.chance(0.6) else _any_kind(draw)
        if kind.group not in groups | OWN_SKILLS:
            return [("user", _asked(draw, kind).text), ("assistant", UNKNOWN)]
    return list(draw.choice(_fits(offered))(draw).turns)


def _begun(draw: Draw, kind: Kind) -> tuple[Offered, Asked, list[Offered]]:
    """A tool of the kind, a question for it, and all tools that are offered."""
    asked = _asked(draw, kind)
    tool = _offer(draw, kind, set(asked.given))
    return tool, asked, _offer_with(draw, tool)


def conversation(draw: Draw) -> Turns:
    """A conversation of up to four exchanges for training."""
    tool, asked, offered = _begun(draw, _asked_kind(draw))
    if draw.chance(0.08) and tool.kind.group not in OWN_SKILLS:
        # What a tool would be needed for is not known where there is none.
        return [("user", asked.text), ("assistant", UNKNOWN)]
    turns = [_system(offered)]
    for count in range(draw.choice((1, 1, 2, 3))):
        if draw.chance(0.22):
            turns += _without_call(draw, offered)
        elif count == 0:
            turns += _first(draw, tool, asked)
        else:
            turns += _again(draw, draw.choice(offered))
    if draw.chance(0.15) and _is_one_exchange(turns):
        # A request may offer no tools once it has a result, and what is not there is not called.
        return [turns[1], ("recited", turns[2][1]), *turns[3:]]
    return turns


def _first(draw: Draw, tool: Offered, asked: Asked) -> Turns:
    if tool.kind.one and draw.chance(0.12):
        twice = _twice(draw, tool)
        if twice is not None:
            return twice
    turns = _exchange(draw, tool, asked)
    if tool.kind.one in asked.given and draw.chance(0.2):
        turns += _further(draw, tool, asked)
    return turns


def _again(draw: Draw, tool: Offered) -> Turns:
    """An exchange with a tool that is shown already: with a question that gives what it has."""
    for _ in range(8):
        asked = _asked(draw, tool.kind)
        if set(asked.given) <= set(tool.keys):
            return _exchange(draw, tool, asked)
    return []


def _is_one_exchange(turns: Turns) -> bool:
    return len(turns) == 5 and turns[3][1].startswith("<tool_response>")


def tool_call(draw: Draw) -> Item:
    """A question whose answer is a call."""
    tool, asked, offered = _begun(draw, _asked_kind(draw))
    call = call_text(tool.shown.name, tool.arguments(asked.given))
    return Item("tool_call", (_system(offered), ("user", asked.text), ("assistant", call)))


def new_tool(draw: Draw) -> Item:
    """A question for a tool of a kind that training never sees."""
    tool, asked, offered = _begun(draw, draw.choice(KEPT_BACK))
    call = call_text(tool.shown.name, tool.arguments(asked.given))
    return Item("new_tool", (_system(offered), ("user", asked.text), ("assistant", call)))


def tool_answer(draw: Draw) -> Item:
    """The result of a call, and the sentence that answers with it."""
    tool, asked, offered = _begun(draw, _asked_kind(draw))
    return Item("tool_answer", (_system(offered), *_exchange(draw, tool, asked)))


def tool_unused(draw: Draw) -> Item:
    """A question for none of the tools that are there."""
    _, _, offered = _begun(draw, _any_kind(draw))
    return Item("tool_unused", (_system(offered), *_without_call(draw, offered)))
