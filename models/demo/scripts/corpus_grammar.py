"""Paraphrase grammars: how one request of the demo corpus comes in very many wordings.

A form is text with alternatives in brackets, which may be nested and empty, and with slots for
`str.format`:

    "[please |]add {a} [and|to|with] {b}[.|]"

Owns the expansion, the dressing of a wording (openers, lower case, lost punctuation, a typo, an
unknown word) and the rule that no wording of a grammar may contain a phrasing that is kept back for
testing. The words belong to the `phrasings_*.py` files. Only the training split uses grammars;
values come in through the slots and are never altered.
"""

from __future__ import annotations

import re
from bisect import bisect
from itertools import accumulate
from math import log
from random import Random

from corpus_draw import Draw, sentence_case

Sequence = tuple["str | Choice", ...]
Choice = tuple[Sequence, ...]

OPENERS = (
    "[Hi|Hello|Hey|Good day][ there| you|][!|,|.|:] ", "[Quick|Small|Short|Simple|Easy|One|Next|Another|New] [question|task|request|thing][:|.|,] ",
    "[Q|Question|Task|User|Request|Me|Exercise][:| -] ", "[I have a|Here is a|Here comes a|This is a|I've got a] [question|task|request|small task][:|.] ",
    "[Can you|Could you|Will you] help me[ with this| please|]? ", "[Okay|OK|Ok|Well|So|Now|Right|Alright|Great|Good][,|.| then,] ",
    "[Sorry|Excuse me|Pardon|Please][,|:] ", "[I need|I want] [help|an answer|your help][:|.] ", "[My|Our] [teacher|son|daughter|boss|friend] [asks|wants to know|says][:|] ",
    "[Dear|My dear|Hey] [assistant|model|machine|Headrace], ", "{number}[.|)] ",
)  # fmt: skip
CLOSERS = (
    " [Thanks|Thank you|Thx|Cheers|Please|Go|Go on][.|!|]", " [It is|It's|This is] [for|about] [my homework|a friend|work|school|a test].",
    " I am [curious|waiting|in a hurry|new here].", " [Take your time|No hurry|Be careful|Do it right|Think first].",
)  # fmt: skip
PLAIN_TEXT = re.compile(r"[^\[\]|]+")
WORD = re.compile(r"(?<![\w{'])[a-z]{4,}(?![\w}'])")
ODD_SYLLABLES = "bla gro fen tus wim dor pel nak rif zom lu sko ti var que ned jop hul mer gi".split()


def parse(form: str) -> Sequence:
    """The form as a sequence of texts and choices.

    Raises:
        ValueError: If brackets do not match.
    """
    sequence, end = _parse(form, 0, inside=False)
    if end != len(form):
        raise ValueError(f"unmatched {form[end]} in {form!r}")
    return sequence


def _parse(form: str, at: int, *, inside: bool) -> tuple[Sequence, int]:
    """Reads texts and choices up to the end of the form, or of the option if `inside` a choice."""
    parts: list[str | Choice] = []
    while at < len(form) and form[at] not in "]|":
        if form[at] == "[":
            choice, at = _parse_choice(form, at + 1)
            parts.append(choice)
        else:
            found = PLAIN_TEXT.match(form, at)
            assert found is not None, "every other character is text"
            parts.append(found[0])
            at = found.end()
    if inside and at == len(form):
        raise ValueError(f"unmatched [ in {form!r}")
    return tuple(parts), at


def _parse_choice(form: str, at: int) -> tuple[Choice, int]:
    options: list[Sequence] = []
    while True:
        option, at = _parse(form, at, inside=True)
        options.append(option)
        at += 1
        if form[at - 1] == "]":
            return tuple(options), at


def wordings(sequence: Sequence) -> int:
    """How many texts the sequence can become."""
    total = 1
    for part in sequence:
        if not isinstance(part, str):
            total *= sum(wordings(option) for option in part)
    return total


def _expand(sequence: Sequence, random: Random) -> str:
    return "".join(
        part if isinstance(part, str) else _expand(part[int(random.random() * len(part))], random) for part in sequence
    )


def plain_words(text: str) -> str:
    """The words of a template in lower case, every slot as `{}`.

    Two templates are compared by them.
    """
    return " ".join(re.findall(r"[a-z']+|\{\}", re.sub(r"\{\w*\}", "{}", text.lower())))


class Grammar:
    """Forms to say one thing.

    A form with more wordings is drawn more often, but far from in proportion.
    """

    def __init__(self, *forms: str, unseen: tuple[str, ...] = ()) -> None:
        self.forms = [parse(form) for form in forms]
        self.weights = list(accumulate(1.0 + log(wordings(form)) for form in self.forms))
        self.unseen = tuple(plain_words(template) for template in unseen)

    def wording(self, draw: Draw) -> str:
        """A template, its slots still open, that contains no phrasing kept back for testing."""
        while True:
            form = self.forms[bisect(self.weights, draw.random.random() * self.weights[-1])]
            text = _expand(form, draw.random).replace("  ", " ")
            if not self.unseen or not self.hides_unseen(text):
                return text

    def hides_unseen(self, template: str) -> bool:
        """Whether a phrasing kept back for testing lies in the template."""
        words = plain_words(template)
        return any(phrasing in words for phrasing in self.unseen)


OPENER, CLOSER = Grammar(*OPENERS), Grammar(*CLOSERS)


def _typo(draw: Draw, word: str) -> str:
    at = draw.number(1, len(word) - 2)
    kind = draw.number(0, 2)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return word[:at] + word[at + 1 :] if kind == 1 else word[:at] + word[at] + word[at:]


def odd_word(draw: Draw) -> str:
    """A word that means nothing, for sentences that must be understood without it."""
    return "".join(draw.choice(ODD_SYLLABLES) for _ in range(draw.number(1, 3)))


def _replaced(draw: Draw, text: str, *, by_odd_word: bool) -> str:
    """The text with one of its words misspelt or exchanged; slots are left alone."""
    found = list(WORD.finditer(text))
    if not found:
        return text
    hit = draw.choice(found)
    return text[: hit.start()] + (odd_word(draw) if by_odd_word else _typo(draw, hit[0])) + text[hit.end() :]


def dressed(draw: Draw, template: str, *, odd: float = 0.0, closing: bool = True, opening: bool = True) -> str:
    """The template as people type it.

    It comes with or without opener, capital and closing mark, and sometimes with a typo.

    Args:
        draw: The random source.
        template: Wording with open slots.
        odd: Probability that one word is exchanged for one that means nothing; for wordings that
            bear it.
        closing: Whether a closing sentence may follow and the last mark may be lost.
        opening: Whether an opener may come first.
    """
    if odd and draw.chance(odd):
        template = _replaced(draw, template, by_odd_word=True)
    elif draw.chance(0.04):
        template = _replaced(draw, template, by_odd_word=False)
    if not draw.chance(0.13):
        template = sentence_case(template)
    elif draw.chance(0.3):
        template = re.sub(r"(?<!\{)\b[A-Z](?=[a-z])", lambda hit: hit[0].lower(), template)
    if closing:
        template = _ended(draw, template)
    if opening and draw.chance(0.1):
        template = OPENER.wording(draw).replace("{number}", str(draw.number(1, 20))) + template
    return template


def _ended(draw: Draw, template: str) -> str:
    chance = draw.random.random()
    if chance < 0.12:
        return template.rstrip(".?!")
    if chance < 0.16:
        return template.rstrip(".?!") + draw.choice((" ?", " !", "??", "...", ".", "?", "!"))
    if chance < 0.21 and template.endswith((".", "?", "!")):
        return template + CLOSER.wording(draw)
    return template


def said(draw: Draw, grammar: Grammar, slots: dict[str, object], *, odd: float = 0.0, closing: bool = True) -> str:
    """One dressed wording of the grammar with its slots filled."""
    return dressed(draw, grammar.wording(draw), odd=odd, closing=closing).format(**slots)
