"""Short stories of the demo corpus: one hero, one friend, one thing, told by one of the plots in `stories.toml`.

The facts of a story are drawn first, so that the whole text agrees with them and questions about it have one answer.
Held out are the names and the combination of kind, thing and place (by hash).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from corpus_draw import Draw, Item, Phrasings, sentence_case, with_article
from corpus_words import COLORS, MATERIALS, THINGS

ANIMALS = tuple(
    "fox rabbit bear mouse owl hedgehog badger squirrel otter duck goose cat dog donkey goat sparrow turtle frog beaver "
    "raven wolf hare".split()
)
PEOPLE: tuple[tuple[str, str], ...] = (
    ("girl", "she"), ("boy", "he"), ("baker", "he"), ("baker", "she"), ("sailor", "he"), ("sailor", "she"), ("gardener", "she"),
    ("gardener", "he"), ("painter", "she"), ("tailor", "he"), ("teacher", "she"), ("farmer", "he"), ("shepherd", "he"),
    ("clockmaker", "she"), ("fisherman", "he"), ("robot", "he"), ("wizard", "he"), ("princess", "she"), ("miller", "he"),
)  # fmt: skip
PRONOUNS = {"he": ("he", "his", "him"), "she": ("she", "her", "her")}
TRAITS = tuple(
    "curious shy cheerful clever patient quiet stubborn friendly careful lazy brave young kind thoughtful forgetful "
    "honest little gentle".split()
)
HOMES = (
    "at the edge of a forest", "by the sea", "near an old mill", "on a green hill", "beside a slow river", "at the end of a long road",
    "in a village without a name", "behind the railway station", "in a valley full of apple trees", "next to the lighthouse",
    "under a very old oak", "in the middle of a noisy town", "on a small island", "at the foot of a mountain",
)  # fmt: skip
PLACES = (
    "the old lighthouse", "the silent lake", "the hollow tree", "the market square", "the ruined tower", "the long beach",
    "the stone bridge", "the dark forest", "the windmill", "the hidden garden", "the blue mountain", "the empty castle",
    "the frozen pond", "the apple orchard", "the deep cave", "the harbor", "the old railway", "the snowy pass",
)  # fmt: skip
WEATHERS = tuple("sunny rainy windy foggy cold warm stormy snowy bright grey".split())

ASK = Phrasings(
    train=(
        "Tell me a story about {a_kind} named {hero} and {a_object}.", "Tell me a short story about {hero} the {kind} and {a_object}.",
        "Write a story about {a_kind} called {hero} who has something to do with {a_object}.",
        "Write a short story with {a_kind} named {hero}, {a_object} and {place}.", "Can you tell a story about {hero}, {a_kind}, and {a_object}?",
        "I would like a story about {a_kind} named {hero} and {a_object} at {place}.", "Story please: {a_kind} named {hero}, {a_object}.",
        "Please write a story about {hero}, {a_kind}. There should be {a_object} in it.", "Tell me a story in which {hero} the {kind} goes to {place} and there is {a_object}.",
        "A bedtime story about {a_kind} named {hero} and {a_object}, please.", "Make up a story about {a_kind} named {hero} and {a_object}.",
        "Tell a story with {hero} the {kind} and {a_object}.", "Once upon a time there was {a_kind} named {hero} with {a_object}. Go on.",
    ),
    unseen=(
        "I want to hear about {a_kind} called {hero} and {a_object}. Tell me a story!", "Invent a tale of {a_kind} named {hero} and {a_object}.",
        "Could you write something short about {hero} the {kind} and {a_object}?", "My child wants a story with {a_kind} named {hero} and {a_object}.",
    ),
)  # fmt: skip
ASK_FREELY = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "I would like to hear a story.", "Tell me a bedtime story, please.",
    "Write a short story about friendship.", "Story time!", "Tell me a story about an animal.", "Can you tell me a story?",
    "Write a little story for children.", "tell me a story",
)  # fmt: skip
FREE_SHARE = 0.12
FOLLOW_UPS: tuple[tuple[Phrasings, str], ...] = (
    (
        Phrasings(
            train=("Who was the story about?", "Who is the hero of the story?", "Who was the main character?"),
            unseen=("Which character is the story mainly about?", "Who was it about?"),
        ),
        "The story was about {hero}, a {trait} {kind}.",
    ),
    (
        Phrasings(
            train=("Who was the friend in the story?", "Whom did {hero} meet?", "Who is {friend}?", "What was the friend's name?"),
            unseen=("What is the friend of {hero} called?", "Which friend did {hero} have in the story?"),
        ),
        "The friend was {friend}, a {friend_kind}.",
    ),
    (
        Phrasings(
            train=("Where did {hero} live?", "Where was the house of {hero}?", "Where is the home of {hero}?"),
            unseen=("In what place did {hero} have a home?", "Tell me where {hero} lived."),
        ),
        "{hero} lived {home}.",
    ),
    (
        Phrasings(
            train=("What thing was in the story?", "Which object was important?", "What object is the story about?"),
            unseen=("Which thing mattered in the story?", "Name the object in the story."),
        ),
        "It was {a_object}.",
    ),
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
    """Reads stories.toml once."""
    table = tomllib.loads((Path(__file__).parent / "stories.toml").read_text(encoding="utf-8"))
    plots = tuple(tuple(tuple(beat) for beat in plot["beats"]) for plot in table["plot"])
    return Parts(tuple(table["openings"]), tuple(table["habits"]), tuple(table["weathers"]), plots)


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


def story_request(draw: Draw) -> Item:
    """A request for a story; the answer has to mention the hero and the thing that were asked for."""
    facts = story_facts(draw)
    if draw.split == "train" and draw.chance(FREE_SHARE):
        return Item("story", (("user", draw.choice(ASK_FREELY)), ("assistant", tell(draw, facts))))
    question = draw.phrase(ASK).format(**facts)
    mentions = (facts["hero"], facts["object"])
    return Item("story", (("user", question), ("assistant", tell(draw, facts))), mentions=mentions)


def story_follow_up(draw: Draw) -> Item:
    """A story and then a question about it; the last turn is the answer to that question."""
    facts = story_facts(draw)
    phrasings, answer = draw.choice(FOLLOW_UPS)
    ask = draw.choice(ASK.train).format(**facts)
    question = draw.phrase(phrasings).format(**facts)
    turns = (("user", ask), ("assistant", tell(draw, facts)), ("user", question))
    return Item("story_follow_up", (*turns, ("assistant", _filled(answer, facts))))


def plain_story(draw: Draw) -> Item:
    """A story as plain text, for completion without a chat."""
    return Item("plain", (("text", tell(draw, story_facts(draw))),))
