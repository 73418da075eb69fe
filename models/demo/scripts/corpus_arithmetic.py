"""Arithmetic of the demo corpus: calculations with their steps, comparisons, word problems.

The held-out border runs through number pairs: a pair `(operation, a, b)` that an evaluation item
uses is never an operation of any training item, in whatever phrasing. Products of two single digits
are the only exception: they are the table that longer products are worked out with, so training
sees all of them and the evaluation asks for none.
"""

from __future__ import annotations

import phrasings_arithmetic as bare
import phrasings_problems as told
from corpus_arithmetic_templates import ADD, GAIN, GROUPS, LARGER, LOSE, MUL, SUB
from corpus_draw import Draw, Item, is_held_out
from corpus_grammar import Grammar, dressed, said
from corpus_words import COLORS, CONTAINERS, COUNTED

Pair = tuple[int, int]
VARIED_SHARE = 0.9  # of the training items; the others use the first templates
SYMBOL = {"add": "+", "sub": "-", "mul": "×"}


def _operand(draw: Draw, longest: int) -> int:
    digits = draw.choice((1, 2, 2, 3, 3, 3) if longest == 3 else (1, 2, 2))
    return draw.number(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def allowed_pair(draw: Draw, operation: str, a: int, b: int) -> bool:
    """Whether this split may use the pair, whose two orders are on one side of the border."""
    return is_held_out("pair", operation, max(a, b), min(a, b)) == (draw.split != "train")


def _pair(draw: Draw, operation: str, longest: int) -> Pair:
    while True:
        a, b = _operand(draw, longest), _operand(draw, longest)
        if operation == "compare" and draw.chance(0.4):  # numbers that look alike
            b = draw.number(max(0, a - 30), a + 30)
        if operation == "sub":
            a, b = max(a, b), min(a, b)
        if allowed_pair(draw, operation, a, b):
            return a, b


def _product_pair(draw: Draw) -> Pair:
    """A single digit and a number of at most two digits, in either order."""
    while True:
        a, b = draw.number(2, 9), draw.number(2, 99) if draw.chance(0.85) else draw.number(2, 9)
        a, b = (b, a) if draw.chance(0.5) else (a, b)
        single = a < 10 and b < 10
        if single and draw.split == "train":
            return a, b
        if not single and allowed_pair(draw, "mul", a, b):
            return a, b


def product_steps(a: int, b: int) -> str:
    """The product written with its steps, as in `6 × 47 = 240 + 42 = 282`."""
    big, small = max(a, b), min(a, b)
    tens, ones = big - big % 10, big % 10
    if big < 10 or ones == 0:
        return f"{a} × {b} = {a * b}"
    return f"{a} × {b} = {tens} × {small} + {ones} × {small} = {tens * small} + {ones * small} = {a * b}"


def _plain(draw: Draw) -> tuple[str, str]:
    operation = draw.choice(("add", "add", "sub", "sub", "mul"))
    if operation == "mul":
        a, b = _product_pair(draw)
        return draw.phrase(MUL).format(a=a, b=b), product_steps(a, b)
    a, b = _pair(draw, operation, 3)
    result = a + b if operation == "add" else a - b
    question = draw.phrase(ADD if operation == "add" else SUB).format(a=a, b=b)
    return question, f"{a} {SYMBOL[operation]} {b} = {result}"


def _compare(draw: Draw) -> tuple[str, str]:
    a, b = _pair(draw, "compare", 3)
    question = draw.phrase(LARGER).format(a=a, b=b)
    answer = f"{a} and {b} are equal." if a == b else f"{max(a, b)} is larger than {min(a, b)}."
    return question, answer


def _carrying_pair(draw: Draw) -> Pair:
    """Two summands as they occur inside products, such as 450 and 54, in either order."""
    while True:
        a, b = 10 * draw.number(1, 81), draw.number(10, 89)
        a, b = (b, a) if draw.chance(0.3) else (a, b)
        if allowed_pair(draw, "add", a, b):
            return a, b


def _equal_pair(draw: Draw) -> Pair:
    while True:
        a = _operand(draw, 3)
        if allowed_pair(draw, "compare", a, a):
            return a, a


def _said(draw: Draw, grammar: Grammar, a: int, b: int) -> str:
    wording = grammar.wording(draw)
    has_sign = any(sign in wording for sign in ("+", " - ", "*", "×", "plus", "minus", "times"))
    return dressed(draw, wording, odd=0.08 if has_sign else 0.0).format(a=a, b=b)


def _varied_plain(draw: Draw) -> tuple[str, str]:
    operation = draw.choice(("add", "add", "sub", "sub", "mul", "mul"))
    if operation == "mul":
        a, b = _product_pair(draw)
        return _said(draw, bare.MUL_WORDINGS, a, b), product_steps(a, b)
    carrying = operation == "add" and draw.chance(0.2)
    a, b = _carrying_pair(draw) if carrying else _pair(draw, operation, 3)
    result = a + b if operation == "add" else a - b
    grammar = bare.ADD_WORDINGS if operation == "add" else bare.SUB_WORDINGS
    return _said(draw, grammar, a, b), f"{a} {SYMBOL[operation]} {b} = {result}"


def _varied_compare(draw: Draw) -> tuple[str, str]:
    a, b = _equal_pair(draw) if draw.chance(0.1) else _pair(draw, "compare", 3)
    smaller = draw.chance(0.15)
    question = said(draw, bare.SMALLER_WORDINGS if smaller else bare.LARGER_WORDINGS, {"a": a, "b": b})
    if a == b:
        return question, f"{a} and {b} are equal."
    low, high = min(a, b), max(a, b)
    return question, f"{low} is smaller than {high}." if smaller else f"{high} is larger than {low}."


def _word_problem(draw: Draw) -> tuple[str, str]:
    kind = draw.choice(("gain", "lose", "groups"))
    name, things, boxes = draw.first_name(), draw.choice(COUNTED), draw.choice(CONTAINERS)
    if kind == "groups":
        a, b = _product_pair(draw)
        question = draw.phrase(GROUPS).format(name=name, a=a, b=b, things=things, boxes=boxes)
        return question, f"{product_steps(a, b)}, so there are {a * b} {things}."
    a, b = _pair(draw, "add" if kind == "gain" else "sub", 3 if draw.chance(0.3) else 2)
    result = a + b if kind == "gain" else a - b
    phrasings = GAIN if kind == "gain" else LOSE
    question = draw.phrase(phrasings).format(name=name, a=a, b=b, things=things)
    symbol = "+" if kind == "gain" else "-"
    return question, f"{a} {symbol} {b} = {result}, so there are {result} {things}."


def _varied_word_problem(draw: Draw) -> tuple[str, str]:
    kind = draw.choice(("gain", "two", "lose", "lose", "groups"))
    name, things, boxes = draw.first_name(), draw.choice(COUNTED), draw.choice(CONTAINERS)
    color, color2 = draw.random.sample(COLORS, 2)
    facts = {**told.slots(draw, kind, name, boxes), "things": things, "color": color, "color2": color2}
    facts["other"] = draw.first_name()
    if kind == "groups":
        a, b = _product_pair(draw)
        steps, result = product_steps(a, b), a * b
    else:
        a, b = _pair(draw, "sub" if kind == "lose" else "add", 3 if draw.chance(0.4) else 2)
        result = a - b if kind == "lose" else a + b
        steps = f"{a} {'-' if kind == 'lose' else '+'} {b} = {result}"
    question = dressed(draw, told.wording(draw, kind), odd=0.03).format(a=a, b=b, **facts)
    return question, f"{steps}, so there are {result} {things}."


def _is_varied(draw: Draw) -> bool:
    return draw.split == "train" and draw.chance(VARIED_SHARE)


def arithmetic(draw: Draw) -> Item:
    """A bare calculation or a comparison."""
    if _is_varied(draw):
        question, answer = _varied_compare(draw) if draw.chance(0.15) else _varied_plain(draw)
    else:
        question, answer = _compare(draw) if draw.chance(0.12) else _plain(draw)
    return Item("arithmetic", (("user", question), ("assistant", answer)))


def word_problem(draw: Draw) -> Item:
    """A calculation told as a small story with a name and things."""
    question, answer = (_varied_word_problem if _is_varied(draw) else _word_problem)(draw)
    return Item("word_problem", (("user", question), ("assistant", answer)))
