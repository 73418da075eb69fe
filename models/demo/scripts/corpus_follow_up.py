"""Second and third turns of the demo corpus: questions that only the turns before explain.

After an answer about LLM inference somebody asks for the reason, for a shorter or a longer answer,
for the same again or for another topic; after a sum the result is taken further. Held out are
combinations of topic and wording (by hash), and the number pairs of `corpus_arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import phrasings_follow_up as varied
from corpus_arithmetic import SYMBOL, allowed_pair, product_steps
from corpus_draw import Draw, Item, Phrasings, is_held_out
from corpus_grammar import Grammar, dressed
from corpus_inference import Topic, inference_question, scored_topics, training_topics

VARIED_SHARE = 0.95  # of the training items; the others use the first templates
SUM_SHARE = 0.3
MOST_FOLLOW_UPS = 4


@dataclass(frozen=True)
class Said:
    """What a conversation has come to: its topic and the last answer."""

    topic: Topic
    answer: str


def _reason(said: Said) -> str:
    return said.topic.reason


def _shorter(said: Said) -> str:
    return said.topic.short


def _more(said: Said) -> str:
    """The part of the topic that comes next."""
    if said.answer == said.topic.short:
        return said.topic.more
    return said.topic.long if said.answer == said.topic.reason else said.topic.reason


def _again(said: Said) -> str:
    return said.answer


Kind = tuple[Phrasings, Grammar, Callable[[Said], str]]
KINDS: tuple[Kind, ...] = (
    (varied.REASON, varied.REASON_WORDINGS, _reason),
    (varied.REASON, varied.REASON_WORDINGS, _reason),
    (varied.SHORTER, varied.SHORTER_WORDINGS, _shorter),
    (varied.MORE, varied.MORE_WORDINGS, _more),
    (varied.AGAIN, varied.AGAIN_WORDINGS, _again),
)
OTHER_SHARE = 0.18
OPERATIONS = {
    "add": (varied.PLUS, varied.PLUS_WORDINGS),
    "sub": (varied.MINUS, varied.MINUS_WORDINGS),
    "mul": (varied.TIMES, varied.TIMES_WORDINGS),
}


def _asked(draw: Draw, phrasings: Phrasings, wordings: Grammar) -> str:
    if draw.split == "train" and draw.chance(VARIED_SHARE):
        return dressed(draw, wordings.wording(draw), closing=False, opening=False)
    return draw.phrase(phrasings)


def _next_turn(draw: Draw, said: Said) -> tuple[str, Said]:
    """A follow-up question and what is said after it."""
    if draw.chance(OTHER_SHARE):
        topic = draw.choice(training_topics() if draw.split == "train" else scored_topics())
        question = _asked(draw, varied.OTHER, varied.OTHER_WORDINGS).format(t=draw.choice(topic.names))
        return question, Said(topic, topic.long)
    phrasings, wordings, answer = draw.choice(KINDS)
    return _asked(draw, phrasings, wordings), Said(said.topic, answer(said))


def _allowed_turn(draw: Draw, said: Said) -> tuple[str, Said]:
    """A follow-up question whose combination with the topic and the answer before it is allowed.

    One that names another topic must not be a held-out question of `corpus_inference` either.
    """
    while True:
        question, after = _next_turn(draw, said)
        key = ("follow up", said.topic.names[0], said.answer == said.topic.short, question)
        held_out = is_held_out(*key), is_held_out("inference", question)
        if draw.split == "phrasing" or (held_out[0] if draw.split == "heldout" else not any(held_out)):
            return question, after


def _conversation(draw: Draw) -> Item:
    first = inference_question(draw)
    topic = next(topic for topic in training_topics() if first.answer in (topic.short, topic.long))
    turns, said = list(first.turns), Said(topic, first.answer)
    for _ in range(draw.number(1, MOST_FOLLOW_UPS if draw.split == "train" else 1)):
        question, said = _allowed_turn(draw, said)
        turns += [("user", question), ("assistant", said.answer)]
    return Item("follow_up", tuple(turns))


def _operands(draw: Draw, operation: str, result: int) -> list[int]:
    """The numbers that the sum may go on with, of a length that is drawn."""
    if operation == "mul":
        numbers = range(2, 10)
    else:
        highest = draw.choice((9, 99, 999))
        numbers = range(min(highest, result) + 1 if operation == "sub" else highest + 1)
    return [number for number in numbers if allowed_pair(draw, operation, result, number)]


def _continued(operation: str, a: int, b: int) -> tuple[str, int]:
    if operation == "mul":
        return product_steps(a, b), a * b
    result = a + b if operation == "add" else a - b
    return f"{a} {SYMBOL[operation]} {b} = {result}", result


def _usable(operation: str, result: int) -> bool:
    """Whether the operation can go on from the result without numbers that are too long."""
    return 10 <= result <= 99 if operation == "mul" else 10 <= result <= 999


def _running_sum(draw: Draw) -> Item:
    """A sum of two numbers that is taken further, one operation a turn."""
    a, b = draw.number(1, 99), draw.number(1, 99)
    while not allowed_pair(draw, "add", a, b):
        a, b = draw.number(1, 99), draw.number(1, 99)
    text, result = _continued("add", a, b)
    asked = draw.choice(("What is {a} + {b}?", "{a} + {b}", "{a} + {b} =", "What is {a} plus {b}?", "Add {a} and {b}."))
    turns = [("user", asked.format(a=a, b=b)), ("assistant", text)]
    for _ in range(draw.number(1, 3)):
        operation = draw.choice(tuple(OPERATIONS))
        operands = _operands(draw, operation, result) if _usable(operation, result) else []
        if not operands:
            continue
        other = draw.choice(operands)
        question = _asked(draw, *OPERATIONS[operation]).format(c=other)
        text, result = _continued(operation, result, other)
        turns += [("user", question), ("assistant", text)]
    return Item("follow_up", tuple(turns))


def follow_up(draw: Draw) -> Item:
    """A conversation whose last question makes sense only after the answers before it."""
    while True:
        item = _running_sum(draw) if draw.chance(SUM_SHARE) else _conversation(draw)
        if len(item.turns) > 2:
            return item
