"""Short stories of the demo corpus: one hero, one friend, one thing, one of several plots.

The plots are in `stories*.toml`.

The facts of a story are drawn first, so that the whole text agrees with them and questions about it
have one answer. Held out are the names and the combination of kind, thing and place (by hash).

What a request leaves open (plot, sentences, home, trait) is in training mostly decided by a word of
the request: the thing decides the plot, the kind the opening, and so on. A model that always takes
the likeliest token then tells different stories to different requests instead of the one story that
is likeliest on average.
"""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import phrasings_stories as varied
from corpus_draw import Draw, Item, is_held_out, sentence_case, with_article
from corpus_grammar import Grammar, dressed
from corpus_stories_templates import (
    ANIMALS,
    ASK,
    ASK_FREELY,
    FOLLOW_UPS,
    FREE_SHARE,
    HOMES,
    PEOPLE,
    PLACES,
    PRONOUNS,
    TRAITS,
    WEATHERS,
)  # fmt: skip
from corpus_words import COLORS, FIRST_NAMES, MATERIALS, MORE_KINDS, THINGS

# of the training items; the others are told and asked for as the first ones were
VARIED_SHARE = 0.95
LED_SHARE = 0.8
TRAINING_NAMES = tuple(name for name in FIRST_NAMES if not is_held_out("name", name))
PARTIAL = (varied.HERO_ONLY, varied.OBJECT_ONLY, varied.KIND_AND_OBJECT, varied.KIND_ONLY)
MORE_KINDS_SHARE = 0.3  # of the training items; the evaluation knows the first kinds only
ONLY_SHE, ONLY_HE = ("queen", "witch", "woman"), ("king", "man")
FOLLOW_UP_WORDINGS: tuple[Grammar, ...] = (
    varied.WHO_QUESTIONS, varied.FRIEND_QUESTIONS, varied.HOME_QUESTIONS, varied.OBJECT_QUESTIONS,
)  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """The texts of stories.toml."""

    openings: tuple[str, ...]
    habits: tuple[str, ...]
    weathers: tuple[str, ...]
    plots: tuple[tuple[tuple[str, ...], ...], ...]


@cache
def parts() -> Parts:
    """The parts of the first stories."""
    return _read("stories.toml")


@cache
def all_parts() -> Parts:
    """The parts of the first stories and those that were added."""
    first, more, rest = parts(), _read("stories_more.toml"), _read("stories_rest.toml")
    return Parts(
        first.openings + more.openings,
        first.habits + more.habits,
        first.weathers + more.weathers,
        first.plots + more.plots + rest.plots,
    )


def _read(name: str) -> Parts:
    table = tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    plots = tuple(tuple(tuple(beat) for beat in plot["beats"]) for plot in table["plot"])
    openings, habits, weathers = (tuple(table.get(name, ())) for name in ("openings", "habits", "weathers"))
    return Parts(openings, habits, weathers, plots)


def _object(draw: Draw) -> str:
    thing = draw.choice(THINGS)
    return f"{draw.choice(MATERIALS + COLORS)} {thing}" if draw.chance(0.6) else thing


def _combination(draw: Draw) -> tuple[str, str, str, str]:
    kind, pronoun = draw.choice(PEOPLE) if draw.chance(0.45) else (draw.choice(ANIMALS), draw.choice(("he", "she")))
    return kind, pronoun, _object(draw), draw.choice(PLACES)


def story_facts(draw: Draw) -> dict[str, str]:
    """Everything a story may mention, drawn before any sentence."""
    kind, pronoun, thing, place = draw.until_allowed(lambda: _combination(draw), "story")
    he, his, him = PRONOUNS[pronoun]
    hero, friend = draw.first_name(), draw.first_name()
    when = draw.choice(parts().weathers).format(weather=draw.choice(WEATHERS))
    friend_kind = draw.choice([animal for animal in ANIMALS if animal != kind])
    return {
        "hero": hero, "friend": friend, "kind": kind, "a_kind": with_article(kind), "friend_kind": friend_kind,
        "trait": draw.choice(TRAITS), "he": he, "his": his, "him": him, "He": he.capitalize(), "His": his.capitalize(),
        "object": thing, "a_object": with_article(thing), "place": place, "home": draw.choice(HOMES), "when": when,
    }  # fmt: skip


def _filled(template: str, facts: dict[str, str]) -> str:
    for slot in ("object", "trait", "kind", "friend_kind"):
        template = template.replace(f"a {{{slot}}}", with_article(facts[slot])).replace(
            f"A {{{slot}}}", sentence_case(with_article(facts[slot]))
        )
    return template.format(**facts)


def tell(draw: Draw, facts: dict[str, str]) -> str:
    """The whole story as one or two paragraphs."""
    told = parts()
    sentences = [_filled(draw.choice(told.openings), facts)]
    if draw.chance(0.6):
        sentences.append(_filled(draw.choice(told.habits), facts))
    beats = [_filled(draw.choice(beat), facts) for beat in draw.choice(told.plots)]
    return " ".join([*sentences, *beats[:3]]) + "\n\n" + " ".join(beats[3:])


def _led(draw: Draw, slot: str, word: str, options: Sequence[str]) -> str:
    """The option that the word of the request leads to in this slot; sometimes any other."""
    if draw.chance(LED_SHARE):
        return options[zlib.crc32(f"{slot}|{word}".encode()) % len(options)]
    return draw.choice(options)


def _pronoun(draw: Draw, kind: str) -> str:
    if kind in ONLY_SHE:
        return "she"
    return "he" if kind in ONLY_HE else draw.choice(("he", "she"))


def _varied_combination(draw: Draw, opening: str | None) -> tuple[str, str, str, str]:
    """Kind, pronoun, thing and place; an opening word leads kind and thing."""
    kind, pronoun, thing, place = _combination(draw)
    if opening is not None:
        kind, thing = _led(draw, "free kind", opening, ANIMALS), _led(draw, "free thing", opening, THINGS)
        return kind, draw.choice(("he", "she")), thing, place
    if draw.chance(MORE_KINDS_SHARE):
        kind = draw.choice(MORE_KINDS)
        pronoun = _pronoun(draw, kind)
    return kind, pronoun, thing, place


def _led_facts(draw: Draw, opening: str | None = None) -> dict[str, str]:
    """Facts of a story whose open choices follow the words of the request.

    Args:
        draw: The random source.
        opening: Word that leads kind and thing, for a request that names neither.
    """
    told = all_parts()
    while True:
        kind, pronoun, thing, place = draw.until_allowed(lambda: _varied_combination(draw, opening), "story")
        noun = thing.split()[-1]
        hero = _led(draw, "hero", kind, TRAINING_NAMES) if draw.chance(0.4) else draw.first_name()
        friend = _led(draw, "friend", kind, TRAINING_NAMES) if draw.chance(0.5) else draw.first_name()
        if friend != hero:
            break
    initial = hero[0]
    he, his, him = PRONOUNS[pronoun]
    when = _led(draw, "when", noun, told.weathers).format(weather=_led(draw, "weather", kind, WEATHERS))
    friend_kind = _led(draw, "friend kind", noun, [animal for animal in ANIMALS if animal != kind])
    return {
        "hero": hero, "friend": friend, "kind": kind, "a_kind": with_article(kind), "friend_kind": friend_kind,
        "trait": _led(draw, "trait", initial, TRAITS), "he": he, "his": his, "him": him, "He": he.capitalize(), "His": his.capitalize(),
        "object": thing, "a_object": with_article(thing), "place": place, "home": _led(draw, "home", kind, HOMES), "when": when,
    }  # fmt: skip


def _led_story(draw: Draw, facts: dict[str, str]) -> str:
    """The story whose plot and sentences follow the kind, the thing and the hero's initial."""
    told = all_parts()
    words = (facts["kind"], facts["object"].split()[-1], facts["hero"][0])
    sentences = [_filled(_led(draw, "opening", words[0], told.openings), facts)]
    if draw.chance(0.6):
        sentences.append(_filled(_led(draw, "habit", words[2], told.habits), facts))
    plot = int(_led(draw, "plot", words[1], [str(index) for index in range(len(told.plots))]))
    for index, beat in enumerate(told.plots[plot]):
        sentences.append(_filled(_led(draw, f"{plot}.{index}", words[index % 3], beat), facts))
    pause = len(sentences) - draw.choice((2, 3, 3))
    return " ".join(sentences[:pause]) + "\n\n" + " ".join(sentences[pause:])


def _asked(draw: Draw, facts: dict[str, str]) -> str:
    """A request that says all, some or nothing of what the story is about."""
    chance = draw.random.random()
    if chance < 0.12:
        return draw.phrase(ASK).format(**facts)
    grammar = draw.choice(PARTIAL) if chance < 0.40 else varied.FULL
    return dressed(draw, grammar.wording(draw), odd=0.05).format(**facts)


def _varied_request(draw: Draw) -> Item:
    if draw.chance(FREE_SHARE):
        question = dressed(draw, varied.FREE.wording(draw), odd=0.03)
        facts = _led_facts(draw, opening=question.split()[-1].strip(".,!?").lower())
        return Item("story", (("user", question), ("assistant", _led_story(draw, facts))))
    facts = _led_facts(draw)
    turns = (("user", _asked(draw, facts)), ("assistant", _led_story(draw, facts)))
    return Item("story", turns, mentions=(facts["hero"], facts["object"]))


def _varied_follow_up(draw: Draw) -> Item:
    """A story that the model told or the user pasted, and one to four questions about it."""
    facts = _led_facts(draw)
    story = _led_story(draw, facts) if draw.chance(0.8) else tell(draw, facts)
    told = (("user", _asked(draw, facts)), ("assistant", story))
    questions = draw.random.sample(range(len(FOLLOW_UPS)), draw.number(1, 4))
    turns: list[tuple[str, str]] = list(told)
    for number, index in enumerate(questions):
        question = _follow_up_question(draw, index, facts)
        if number == 0 and draw.chance(0.15):
            turns, question = [], _pasted(draw, story, question)
        turns.extend((("user", question), ("assistant", _filled(FOLLOW_UPS[index][1], facts))))
    return Item("story_follow_up", tuple(turns))


def _pasted(draw: Draw, story: str, question: str) -> str:
    label = draw.choice(("Here is a story.", "Read this story.", "Story:", "Text:", "My story:", ""))
    return f"{story}\n\n{question}" if draw.chance(0.4) else f"{label}\n{story}\n\n{question}".lstrip()


def _follow_up_question(draw: Draw, index: int, facts: dict[str, str]) -> str:
    if draw.chance(0.1):
        return draw.phrase(FOLLOW_UPS[index][0]).format(**facts)
    return dressed(draw, FOLLOW_UP_WORDINGS[index].wording(draw), odd=0.03).format(**facts)


def story_request(draw: Draw) -> Item:
    """A request for a story; the answer has to mention the hero and the thing asked for."""
    if draw.split == "train" and draw.chance(VARIED_SHARE):
        return _varied_request(draw)
    facts = story_facts(draw)
    if draw.split == "train" and draw.chance(FREE_SHARE):
        return Item("story", (("user", draw.choice(ASK_FREELY)), ("assistant", tell(draw, facts))))
    question = draw.phrase(ASK).format(**facts)
    mentions = (facts["hero"], facts["object"])
    return Item("story", (("user", question), ("assistant", tell(draw, facts))), mentions=mentions)


def story_follow_up(draw: Draw) -> Item:
    """A story and then a question about it; the last turn is the answer to that question."""
    if draw.split == "train" and draw.chance(VARIED_SHARE):
        return _varied_follow_up(draw)
    facts = story_facts(draw)
    phrasings, answer = draw.choice(FOLLOW_UPS)
    ask = draw.choice(ASK.train).format(**facts)
    question = draw.phrase(phrasings).format(**facts)
    turns = (("user", ask), ("assistant", tell(draw, facts)), ("user", question))
    return Item("story_follow_up", (*turns, ("assistant", _filled(answer, facts))))


def plain_story(draw: Draw) -> Item:
    """A story as plain text, for completion without a chat."""
    facts = _led_facts(draw)
    return Item("plain", (("text", _led_story(draw, facts)),))
