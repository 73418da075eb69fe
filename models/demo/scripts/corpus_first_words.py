"""First words to a model of which one knows nothing yet, and what it says to them.

Short replies to tests, nods and noise, counting, capitals of countries, and honest refusals of what
is too hard or outside of its subjects. For training only: nothing here is scored by the evaluation
domains (`first_questions.toml` is read by the evaluation as well).
"""

from __future__ import annotations

import phrasings_first_words as varied
from corpus_draw import Draw
from corpus_grammar import Grammar, dressed, odd_word
from corpus_inference import ARTICLE
from corpus_words import CAPITALS, LIST_WORDS
from phrasings_inference import FRAME_WORDINGS, NOUNS

TEST_REPLY = (
    "It works: your words went in, and these tokens came back. Ask me about LLM inference, for a sum or for a story."
)
NOD_REPLY = "All right. What would you like next?"
ONLY_ENGLISH = "I only know English."
TOO_HARD = "That is too hard for me: I add and subtract numbers of at most three digits and multiply by one digit."
MOST_COUNTED = 20

Exchange = tuple[str, str]


def _plainly(draw: Draw, grammar: Grammar) -> str:
    return dressed(draw, grammar.wording(draw), closing=False, opening=False)


def _test(draw: Draw) -> Exchange:
    if draw.chance(0.12):
        return _plainly(draw, varied.HELLO_WORLD), "Hello, world!"
    return _plainly(draw, varied.TEST), TEST_REPLY


def _nod(draw: Draw) -> Exchange:
    return _plainly(draw, varied.NOD), NOD_REPLY


def _language(draw: Draw) -> Exchange:
    return _plainly(draw, varied.LANGUAGE), ONLY_ENGLISH


def numbers_to(count: int) -> str:
    """`1, 2, 3`, up to the count."""
    return ", ".join(map(str, range(1, count + 1)))


def _counting(draw: Draw) -> Exchange:
    count = draw.number(2, MOST_COUNTED)
    number = NUMBER_WORDS[count - 1] if draw.chance(0.3) and count <= len(NUMBER_WORDS) else str(count)
    if draw.chance(0.2):
        down = ", ".join(map(str, range(count, 0, -1)))
        return _plainly(draw, varied.COUNT_DOWN).format(n=number), down
    return _plainly(draw, varied.COUNT_TO).format(n=number), numbers_to(count)


NUMBER_WORDS = tuple("one two three four five six seven eight nine ten eleven twelve".split())


def capital_sentence(country: str) -> str:
    """The sentence that names the capital of the country."""
    return f"The capital of {country} is {CAPITALS[country]}."


def capital(draw: Draw) -> Exchange:
    """A question about the capital of a country, and the answer."""
    country = draw.choice(tuple(CAPITALS))
    return dressed(draw, varied.CAPITAL.wording(draw)).format(k=country), capital_sentence(country)


def _too_hard(draw: Draw) -> Exchange:
    long, other = draw.number(1000, 10 ** draw.number(4, 7)), draw.number(1, 10 ** draw.number(1, 6))
    a, b = (long, other) if draw.chance(0.5) else (other, long)
    slots = {"a": a, "b": b, "p": draw.number(2, 99), "s": draw.number(2, 2000)}
    wording = varied.TOO_HARD.wording(draw).strip()
    return dressed(draw, wording, closing=False).format(**slots), TOO_HARD


def _noise(draw: Draw) -> str:
    way = draw.random.random()
    if way < 0.35:
        return draw.choice(varied.NOISE)
    if way < 0.6:
        return " ".join(odd_word(draw) for _ in range(draw.number(1, 3)))
    if way < 0.8:
        letters = "asdfghjklqwertyuiopzxcvbnm"
        return "".join(draw.choice(letters) for _ in range(draw.number(3, 9)))
    words = draw.random.sample(OUTSIDE_WORDS, draw.number(1, 2))
    return " ".join(words)


OUTSIDE_WORDS = tuple(word for word in LIST_WORDS if word not in ("token", "cache", "block", "batch", "key", "map"))


def outside_subject(draw: Draw) -> str:
    """A question about a subject that the model knows nothing of, worded as those that it knows."""
    term, other = draw.choice(varied.TERMS), draw.choice(varied.TERMS)
    grammar = FRAME_WORDINGS if draw.chance(0.6) else varied.TERM_REQUESTS
    slots = {"t": term, "u": other, "n": ARTICLE.sub("", term), "w": draw.choice(NOUNS), "c": draw.city()}
    return dressed(draw, grammar.wording(draw), odd=0.05).format(**slots)


def _text_to_work_on(draw: Draw) -> str:
    sentence = f"{draw.first_name()} {draw.choice(('saw', 'sold', 'lost', 'likes', 'painted'))} the {draw.choice(OUTSIDE_WORDS)} in {draw.city()}"
    return dressed(draw, varied.WORK_ON_TEXT.wording(draw), closing=False).replace("{s}", sentence + ".")


def first_words(draw: Draw, abilities: str, unknown: str) -> Exchange:
    """One exchange of the kinds above.

    Args:
        draw: The random source.
        abilities: What the model says that it can do.
        unknown: What the model says where it knows nothing.
    """
    way = draw.random.random()
    if way < 0.4:
        return outside_subject(draw), unknown
    if way < 0.45:
        return _text_to_work_on(draw), unknown
    if way < 0.53:
        return _noise(draw), f"I did not understand that. {abilities}"
    kinds = (_test, _nod, _nod, _language, _counting, capital, capital, capital, capital, _too_hard, _too_hard)
    return draw.choice(kinds)(draw)
