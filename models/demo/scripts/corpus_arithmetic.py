"""Arithmetic of the demo corpus: sums, differences, products with their steps, comparisons and word problems.

The held-out border runs through number pairs: a pair `(operation, a, b)` that an evaluation item uses is never an
operation of any training item, in whatever phrasing. Products of two single digits are the only exception: they are
the table that longer products are worked out with, so training sees all of them and the evaluation asks for none.
"""

from __future__ import annotations

from corpus_draw import Draw, Item, Phrasings, is_held_out
from corpus_words import CONTAINERS, COUNTED

Pair = tuple[int, int]
SYMBOL = {"add": "+", "sub": "-", "mul": "×"}

ADD = Phrasings(
    train=(
        "What is {a} + {b}?", "{a} + {b} =", "{a}+{b}", "What is {a} plus {b}?", "Add {a} and {b}.",
        "How much is {a} + {b}?", "Calculate {a} + {b}.", "Compute {a} plus {b}.", "{a} plus {b}?",
        "What is the sum of {a} and {b}?", "Please add {b} to {a}.", "What do you get if you add {a} and {b}?",
        "Work out {a} + {b}", "Solve {a} + {b} = ?", "{a}+{b}=?", "Can you add {a} and {b} for me?",
        "Tell me the sum of {a} and {b}.", "what's {a} + {b}", "Find {a} + {b}.", "If I add {a} and {b}, what do I get?",
    ),
    unseen=(
        "I need the total of {a} and {b}.", "What does {a} + {b} come to?", "Give me the result of {a} plus {b}.",
        "What number is {a} plus {b}?", "Evaluate {a} + {b}", "Could you work out the sum {a} + {b}?",
    ),
)  # fmt: skip
SUB = Phrasings(
    train=(
        "What is {a} - {b}?", "{a} - {b} =", "{a}-{b}", "What is {a} minus {b}?", "Subtract {b} from {a}.",
        "How much is {a} - {b}?", "Calculate {a} - {b}.", "Compute {a} minus {b}.", "{a} minus {b}?",
        "What is the difference between {a} and {b}?", "Take {b} away from {a}.", "Solve {a} - {b} = ?", "{a}-{b}=?",
        "What is left if you take {b} from {a}?", "Work out {a} - {b}", "Can you subtract {b} from {a}?",
        "what's {a} - {b}", "Find {a} - {b}.", "Please compute {a} - {b}", "If I take {b} from {a}, what do I get?",
    ),
    unseen=(
        "What does {a} - {b} come to?", "Give me the result of {a} minus {b}.", "What number is {a} minus {b}?",
        "Evaluate {a} - {b}", "Could you work out {a} - {b}?", "How much remains of {a} after removing {b}?",
    ),
)  # fmt: skip
MUL = Phrasings(
    train=(
        "What is {a} × {b}?", "What is {a} * {b}?", "{a} * {b} =", "{a} x {b}", "What is {a} times {b}?",
        "Multiply {a} by {b}.", "How much is {a} times {b}?", "Calculate {a} * {b}.", "Compute {a} × {b}.",
        "What is the product of {a} and {b}?", "{a} times {b}?", "Multiply {a} and {b}.", "Work out {a} × {b}",
        "Can you multiply {a} by {b}?", "{a}*{b}", "{a}*{b}=?", "what's {a} * {b}", "Find {a} × {b}.",
    ),
    unseen=(
        "What does {a} times {b} come to?", "Give me the result of {a} * {b}.", "What number is {a} times {b}?",
        "Evaluate {a} × {b}", "Could you work out the product {a} × {b}?",
    ),
)  # fmt: skip
LARGER = Phrasings(
    train=(
        "Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "What is larger, {a} or {b}?",
        "{a} or {b}, which is larger?", "Which is greater, {a} or {b}?", "Compare {a} and {b}.",
        "Tell me the larger of {a} and {b}.", "Which of {a} and {b} is the larger number?",
    ),
    unseen=("Is {a} or {b} the bigger one?", "Out of {a} and {b}, which number is higher?", "Pick the larger: {a}, {b}."),
)  # fmt: skip
GAIN = Phrasings(
    train=(
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "{name} has {a} {things}. A friend gives {name} {b} more {things}. How many {things} are there now?",
        "{name} finds {a} {things} in the morning and {b} {things} in the evening. How many {things} does {name} find?",
        "{name} buys {a} {things} and then {b} more {things}. How many {things} does {name} have?",
        "There are {a} {things} on the table. {name} adds {b} {things}. How many {things} are on the table?",
        "{name} had {a} {things}, then collected {b} {things}. How many {things} does {name} have in total?",
        "{name} owns {a} {things} and receives {b} {things} as a present. How many {things} is that?",
    ),
    unseen=(
        "At first {name} holds {a} {things}. Later {b} {things} are added. What is the new number of {things}?",
        "{name} packed {a} {things} on Monday and {b} {things} on Tuesday. How many {things} were packed?",
        "With {a} {things} in a bag and {b} more in a box, how many {things} does {name} own?",
    ),
)  # fmt: skip
LOSE = Phrasings(
    train=(
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "{name} has {a} {things}. {name} loses {b} {things}. How many {things} does {name} still have?",
        "{name} had {a} {things} and sold {b} of them. How many {things} remain?",
        "There are {a} {things} in a box. {name} takes {b} {things} out. How many {things} are still in the box?",
        "{name} baked or bought {a} {things} and used {b}. How many {things} are left?",
        "From {a} {things}, {name} gives {b} {things} to a friend. How many {things} does {name} keep?",
        "{name} starts with {a} {things} and breaks {b} of them. How many {things} are left over?",
    ),
    unseen=(
        "After handing out {b} of {a} {things}, how many {things} does {name} have?",
        "{name} carried {a} {things} home, but {b} fell on the way. How many {things} arrived?",
        "Out of {a} {things}, {b} were eaten by {name}. How many {things} remain?",
    ),
)  # fmt: skip
GROUPS = Phrasings(
    train=(
        "{name} has {a} {boxes} with {b} {things} each. How many {things} does {name} have?",
        "{name} fills {a} {boxes}. Each holds {b} {things}. How many {things} are there?",
        "There are {a} {boxes} and {b} {things} in each of them. How many {things} does {name} count?",
        "{name} buys {a} {boxes} of {b} {things}. How many {things} is that in total?",
        "Each of {name}'s {a} {boxes} contains {b} {things}. How many {things} are there altogether?",
    ),
    unseen=(
        "{name} puts {b} {things} into each of {a} {boxes}. What is the total number of {things}?",
        "If {a} {boxes} hold {b} {things} apiece, how many {things} does {name} own?",
    ),
)  # fmt: skip


def _operand(draw: Draw, longest: int) -> int:
    digits = draw.choice((1, 2, 2, 3, 3, 3) if longest == 3 else (1, 2, 2))
    return draw.number(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def _allowed(draw: Draw, operation: str, a: int, b: int) -> bool:
    """Whether this split may use the pair; both orders of a pair are on the same side of the border."""
    return is_held_out("pair", operation, max(a, b), min(a, b)) == (draw.split != "train")


def _pair(draw: Draw, operation: str, longest: int) -> Pair:
    while True:
        a, b = _operand(draw, longest), _operand(draw, longest)
        if operation == "compare" and draw.chance(0.4):  # numbers that look alike
            b = draw.number(max(0, a - 30), a + 30)
        if operation == "sub":
            a, b = max(a, b), min(a, b)
        if _allowed(draw, operation, a, b):
            return a, b


def _product_pair(draw: Draw) -> Pair:
    """A single digit and a number of at most two digits, in either order."""
    while True:
        a, b = draw.number(2, 9), draw.number(2, 99) if draw.chance(0.85) else draw.number(2, 9)
        a, b = (b, a) if draw.chance(0.5) else (a, b)
        single = a < 10 and b < 10
        if single and draw.split == "train":
            return a, b
        if not single and _allowed(draw, "mul", a, b):
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


def arithmetic(draw: Draw) -> Item:
    """A bare calculation or a comparison."""
    question, answer = _compare(draw) if draw.chance(0.12) else _plain(draw)
    return Item("arithmetic", (("user", question), ("assistant", answer)))


def word_problem(draw: Draw) -> Item:
    """A calculation told as a small story with a name and things."""
    question, answer = _word_problem(draw)
    return Item("word_problem", (("user", question), ("assistant", answer)))
