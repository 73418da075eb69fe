"""Plain texts of the demo corpus, for completion without a chat.

Stories, sums, questions with their answers, definitions, capitals, counting, and what the model
says of itself: what people let a model continue when they try it.
"""

from __future__ import annotations

from collections.abc import Callable

from corpus_arithmetic import SYMBOL, allowed_pair, arithmetic, product_steps, word_problem
from corpus_draw import Draw, Item, sentence_case
from corpus_first_words import NUMBER_WORDS, capital, capital_sentence, numbers_to
from corpus_inference import inference_question, training_topics
from corpus_lists import list_task
from corpus_smalltalk import ABILITIES, IDENTITY, smalltalk
from corpus_stories import plain_story
from corpus_words import CAPITALS, LIST_WORDS

LAYOUTS = (
    "{q}\n{a}", "{q}\n{a}", "{q}\n\n{a}", "{q} {a}", "Q: {q}\nA: {a}", "Question: {q}\nAnswer: {a}",
    "User: {q}\nAssistant: {a}", "{q}\nAnswer: {a}",
)  # fmt: skip
INTRODUCTIONS = (
    f"Hello! {IDENTITY} {ABILITIES}",
    f"Hello, my name is Headrace. {IDENTITY}",
    f"Hi, my name is Headrace. {IDENTITY}",
    f"My name is Headrace. {IDENTITY} {ABILITIES}",
    IDENTITY,
    f"I am a very small language model. {ABILITIES}",
)
UNKNOWN_SUBJECTS = (
    "The president of {k}", "The mayor of {c}", "The population of {k}", "The weather in {c}", "The future of {w}", "The price of {w}",
    "{c}", "{n}", "The history of {w}", "The best {w}", "The meaning of life", "The future of AI", "The largest city of {k}",
    "The president of the United States", "San Francisco", "The author of this book", "The color of the {w}", "The oldest {w} in {c}",
)  # fmt: skip
UNKNOWN_ENDINGS = (
    " is something that I know nothing about, because I am a very small demo model.",
    " is outside of what I was trained on: I know stories, small sums and LLM inference.",
)


def _sum_line(draw: Draw) -> str:
    operation = draw.choice(("add", "add", "sub", "mul"))
    while True:
        highest = draw.choice((9, 20, 99, 999))
        a, b = (
            (draw.number(2, 9), draw.number(2, 9))
            if operation == "mul"
            else (draw.number(0, highest), draw.number(0, highest))
        )
        a, b = (max(a, b), min(a, b)) if operation == "sub" else (a, b)
        if operation == "mul" or allowed_pair(draw, operation, a, b):
            break
    sign = draw.choice(("*", "×")) if operation == "mul" else SYMBOL[operation]
    result = {"add": a + b, "sub": a - b, "mul": a * b}[operation]
    return f"{a} {sign} {b} = {result}"


def _sums(draw: Draw) -> str:
    if draw.chance(0.15):
        a, b = draw.number(2, 9), draw.number(11, 99)
        if allowed_pair(draw, "mul", a, b):
            return product_steps(a, b)
    return "\n".join(_sum_line(draw) for _ in range(1 if draw.chance(0.92) else 3))


def _question_and_answer(draw: Draw) -> str:
    domain = draw.choice((inference_question, inference_question, arithmetic, word_problem, list_task, smalltalk))
    question, answer = (text for _, text in domain(draw).turns)
    return draw.choice(LAYOUTS).format(q=question, a=answer)


def _definition(draw: Draw) -> str:
    topic = draw.choice(training_topics())
    return draw.choice((topic.long, topic.long, topic.short, f"{topic.short} {topic.reason}"))


def _capitals(draw: Draw) -> str:
    if draw.chance(0.3):
        question, answer = capital(draw)
        return draw.choice(LAYOUTS).format(q=question, a=answer)
    countries = draw.random.sample(tuple(CAPITALS), 1 if draw.chance(0.92) else 3)
    return " ".join(capital_sentence(country) for country in countries)


def _counting(draw: Draw) -> str:
    count = draw.number(5, 12)
    words = ", ".join(NUMBER_WORDS[:count])
    return draw.choice(
        (f"{sentence_case(words)}.", f"Count: {words}.", f"Count to {count}: {words}.", numbers_to(count))
    )


def _introduction(draw: Draw) -> str:
    return draw.choice(INTRODUCTIONS)


def _unknown(draw: Draw) -> str:
    slots = {"k": draw.choice(tuple(CAPITALS)), "c": draw.city(), "w": draw.choice(LIST_WORDS), "n": draw.full_name()}
    return draw.choice(UNKNOWN_SUBJECTS).format(**slots) + draw.choice(UNKNOWN_ENDINGS)


KINDS: tuple[tuple[Callable[[Draw], str], float], ...] = (
    (_question_and_answer, 0.3), (_sums, 0.12), (_definition, 0.12), (_capitals, 0.06), (_counting, 0.03),
    (_introduction, 0.02), (_unknown, 0.03),
)  # fmt: skip


def plain_text(draw: Draw) -> Item:
    """A text without roles; mostly a story, else one of the other kinds."""
    point = draw.random.random()
    for kind, share in KINDS:
        point -= share
        if point < 0:
            return Item("plain", (("text", kind(draw)),))
    return plain_story(draw)
