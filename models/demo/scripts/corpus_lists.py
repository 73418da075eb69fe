"""List tasks of the demo corpus: sort, reverse, pick, count and repeat.

Held out are whole lists (by hash) and, in the repeat task, the names in them. The words are known
words: what has to generalise is the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import phrasings_lists as varied
from corpus_draw import Draw, Item, Phrasings
from corpus_grammar import Grammar, dressed
from corpus_words import COLORS, LIST_WORDS, THINGS

SORT = Phrasings(
    train=(
        "Sort these numbers: {x}", "Sort the numbers {x} from smallest to largest.", "Put {x} in ascending order.",
        "Order these numbers from low to high: {x}", "Please sort {x}", "Arrange {x} in increasing order.",
        "Can you sort {x}?", "sort {x}", "Sort in ascending order: {x}.",
    ),
    unseen=("Here are some numbers: {x}. Sort them.", "Bring {x} into ascending order.", "Line up {x} from low to high."),
)  # fmt: skip
SORT_DOWN = Phrasings(
    train=(
        "Sort the numbers {x} from largest to smallest.", "Put {x} in descending order.",
        "Order these numbers from high to low: {x}", "Arrange {x} in decreasing order.", "Sort in descending order: {x}.",
    ),
    unseen=("Bring {x} into descending order.", "Line up {x} from high to low."),
)  # fmt: skip
LARGEST = Phrasings(
    train=(
        "What is the largest number in {x}?", "Which of these numbers is the largest: {x}?", "Find the maximum of {x}.",
        "Find the largest of {x}.", "What is the biggest number in the list {x}?", "Give me the maximum of {x}.",
    ),
    unseen=("Of the numbers {x}, which is the largest?", "Tell me the maximum in this list: {x}"),
)  # fmt: skip
SMALLEST = Phrasings(
    train=(
        "What is the smallest number in {x}?", "Which of these numbers is the smallest: {x}?", "Find the minimum of {x}.",
        "Find the smallest of {x}.", "What is the lowest number in the list {x}?", "Give me the minimum of {x}.",
    ),
    unseen=("Of the numbers {x}, which is the smallest?", "Tell me the minimum in this list: {x}"),
)  # fmt: skip
REVERSE = Phrasings(
    train=(
        "Reverse this list: {x}", "Reverse the list {x}.", "Write {x} in reverse order.", "Put {x} in reverse order.",
        "Say {x} backwards, item by item.", "Please reverse {x}", "Turn this list around: {x}",
    ),
    unseen=("Give me {x} in the opposite order.", "List {x} from the last to the first."),
)  # fmt: skip
COUNT = Phrasings(
    train=(
        "How many words are in this list: {x}?", "Count the items: {x}", "How many items are in {x}?",
        "Count the words in {x}.", "How long is the list {x}?", "How many entries does the list {x} have?",
    ),
    unseen=("Tell me how many things are listed here: {x}", "What is the number of items in {x}?"),
)  # fmt: skip
FIRST = Phrasings(
    train=("What is the first word in {x}?", "Which word comes first: {x}?", "Name the first item of {x}."),
    unseen=("Give me the first entry in this list: {x}", "In {x}, which item is first?"),
)
LAST = Phrasings(
    train=("What is the last word in {x}?", "Which word comes last: {x}?", "Name the last item of {x}."),
    unseen=("Give me the last entry in this list: {x}", "In {x}, which item is last?"),
)
REPEAT = Phrasings(
    train=(
        "Repeat after me: {x}", "Repeat this: {x}", "Say: {x}", "Please repeat: {x}", "Write this again: {x}",
        "Echo: {x}", "Copy this text: {x}", "Repeat exactly: {x}",
    ),
    unseen=("Say this back to me: {x}", "Write exactly what I write: {x}", "Type the following again: {x}"),
)  # fmt: skip

Task = tuple[Phrasings, Callable[[Sequence[str]], str]]


def _joined(items: Sequence[str]) -> str:
    return ", ".join(items)


def _as_numbers(items: Sequence[str]) -> list[int]:
    return [int(item) for item in items]


NUMBER_TASKS: tuple[Task, ...] = (
    (SORT, lambda items: _joined([str(n) for n in sorted(_as_numbers(items))])),
    (SORT, lambda items: _joined([str(n) for n in sorted(_as_numbers(items))])),
    (SORT_DOWN, lambda items: _joined([str(n) for n in sorted(_as_numbers(items), reverse=True)])),
    (LARGEST, lambda items: f"The largest number is {max(_as_numbers(items))}."),
    (SMALLEST, lambda items: f"The smallest number is {min(_as_numbers(items))}."),
)
WORD_TASKS: tuple[Task, ...] = (
    (REVERSE, lambda items: _joined(items[::-1])),
    (REVERSE, lambda items: _joined(items[::-1])),
    (COUNT, lambda items: f"The list has {len(items)} items."),
    (FIRST, lambda items: f"The first word is {items[0]}."),
    (LAST, lambda items: f"The last word is {items[-1]}."),
)


WORDINGS: dict[int, Grammar] = {
    id(SORT): varied.SORT_WORDINGS, id(SORT_DOWN): varied.SORT_DOWN_WORDINGS, id(LARGEST): varied.LARGEST_WORDINGS,
    id(SMALLEST): varied.SMALLEST_WORDINGS, id(REVERSE): varied.REVERSE_WORDINGS, id(COUNT): varied.COUNT_WORDINGS,
    id(FIRST): varied.FIRST_WORDINGS, id(LAST): varied.LAST_WORDINGS, id(REPEAT): varied.REPEAT_WORDINGS,
}  # fmt: skip
VARIED_SHARE = 0.9  # of the training items; the others use the first templates


def _number_list(draw: Draw) -> list[str]:
    count, highest = draw.number(3, 6), draw.choice((9, 99, 99, 999))
    return [str(n) for n in draw.random.sample(range(highest + 1), count)]


def _word_list(draw: Draw) -> list[str]:
    return draw.random.sample(LIST_WORDS, draw.number(3, 7))


def _sayable(draw: Draw) -> str:
    thing = f"{draw.choice(COLORS)} {draw.choice(THINGS)}"
    frames = (
        f"{draw.first_name()} went to {draw.city()} with {draw.number(2, 99)} {draw.choice(LIST_WORDS)} cards",
        f"{draw.full_name()} keeps the {thing} in {draw.city()}",
        f"the {thing} belongs to {draw.full_name()}",
        f"{draw.choice(LIST_WORDS)} {draw.choice(LIST_WORDS)} {draw.choice(LIST_WORDS)} {draw.choice(LIST_WORDS)}",
        f"{draw.invented_name()} {draw.invented_name()} {draw.invented_name()}",
        f"code {draw.number(100, 99999)}, name {draw.full_name()}",
        f"{draw.city()}, {draw.city()} and {draw.city()}",
    )
    return draw.choice(frames)


def _longer_number_list(draw: Draw) -> list[str]:
    """Two to eight numbers with all sorts of lengths, some of them more than once."""
    count = draw.number(2, 8)
    numbers = [draw.number(0, draw.choice((9, 99, 99, 999, 999))) for _ in range(count)]
    if draw.chance(0.15):
        numbers[-1] = numbers[0]
    return [str(n) for n in draw.random.sample(numbers, count)]


def _written(draw: Draw, items: Sequence[str]) -> str:
    """The list as people write lists; the answer always has commas."""
    way = draw.random.random()
    if way < 0.68:
        return _joined(items)
    if way < 0.78:
        return f"{_joined(items[:-1])} {draw.choice(('and', 'and', 'or'))} {items[-1]}"
    if way < 0.84:
        return "[" + _joined(items) + "]" if draw.chance(0.6) else f"({_joined(items)})"
    return draw.choice((" ", "; ", "\n", ",", " | ", "\n- ", " / ")).join(items)


def _varied_text(draw: Draw) -> str:
    """A text to repeat: any words, names and numbers."""
    words = [
        draw.choice((draw.choice(LIST_WORDS), draw.choice(THINGS), draw.invented_name(), str(draw.number(0, 9999))))
        for _ in range(draw.number(1, 9))
    ]
    return draw.choice((" ", " ", " ", ", ")).join(words)


def _filled(draw: Draw, phrasings: Phrasings, content: str) -> str:
    repeats = phrasings is REPEAT
    wording = WORDINGS[id(phrasings)].wording(draw)
    return dressed(draw, wording, odd=0.02, closing=not (repeats or wording.endswith("{x}"))).format(x=content)


def _varied_list_task(draw: Draw) -> Item:
    if draw.chance(0.2):
        text = draw.until_allowed(lambda: _sayable(draw) if draw.chance(0.5) else _varied_text(draw), "say")
        return Item("lists", (("user", _filled(draw, REPEAT, text)), ("assistant", text)))
    numeric = draw.chance(0.5)
    phrasings, solve = draw.choice(NUMBER_TASKS if numeric else WORD_TASKS)
    make = (_number_list if draw.chance(0.5) else _longer_number_list) if numeric else _word_list
    items = draw.until_allowed(lambda: tuple(make(draw)), "list")
    return Item("lists", (("user", _filled(draw, phrasings, _written(draw, items))), ("assistant", solve(items))))


def list_task(draw: Draw) -> Item:
    """One list operation on numbers or words, or a text to repeat."""
    if draw.split == "train" and draw.chance(VARIED_SHARE):
        return _varied_list_task(draw)
    if draw.chance(0.2):
        text = draw.until_allowed(lambda: _sayable(draw), "say")
        return Item("lists", (("user", draw.phrase(REPEAT).format(x=text)), ("assistant", text)))
    numeric = draw.chance(0.5)
    phrasings, solve = draw.choice(NUMBER_TASKS if numeric else WORD_TASKS)
    items = draw.until_allowed(lambda: tuple((_number_list if numeric else _word_list)(draw)), "list")
    return Item("lists", (("user", draw.phrase(phrasings).format(x=_joined(items))), ("assistant", solve(items))))
