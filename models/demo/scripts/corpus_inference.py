"""Questions and answers about LLM inference: hand-written topics in many question frames.

The topics are in `topics_*.toml`.

Each topic has names, a one-sentence answer, more sentences, a reason (`topics_reasons.toml`) and
questions of its own; the last own question of every topic is never trained on. Topics that were
added after the first model (`topics_more.toml`) are trained on and never scored. A request for a
short answer gets the one sentence, any other the whole text. Held out are combinations of question
and topic name (by hash).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import phrasings_inference as varied
from corpus_draw import Draw, Item, Phrasings, is_held_out, sentence_case
from corpus_grammar import dressed

SCORED_FILES = ("topics_model.toml", "topics_memory.toml", "topics_serving.toml")
ADDED_FILES = ("topics_more.toml",)
REASONS_FILE = "topics_reasons.toml"

FRAMES = Phrasings(
    train=(
        "What is {t}?", "What does {t} mean?", "Explain {t}.", "Can you explain {t}?", "Tell me about {t}.", "Define {t}.",
        "How would you describe {t}?", "I keep hearing about {t}. What is it?", "Help me understand {t}.",
        "What is meant by {t}?", "Describe {t} to me.", "Could you tell me what {t} is?", "What's {t}?", "{t}?",
        "Please explain {t}.", "Give me a definition of {t}.", "I am new to this. What is {t}?", "what is {t}",
        "What is {t} in LLM inference?", "What is {t} in a language model server?", "Do you know what {t} is?",
        "What do people mean by {t}?", "Can you describe {t}?", "Explain {t} to a beginner.", "I want to learn about {t}.",
        "How does {t} work?", "Say something about {t}.", "What should I know about {t}?", "Why does {t} matter?",
        "Give me an introduction to {t}.", "Tell me what {t} is.", "explain {t}", "What exactly is {t}?",
    ),
    unseen=varied.UNSEEN_FRAMES,
)  # fmt: skip
SHORT = Phrasings(
    train=(
        "{q} Answer in one sentence.", "{q} Keep it short.", "Briefly: {q}", "In one sentence: {q}", "{q} One sentence, please.",
        "{q} Be brief.", "In short, {q}", "Short answer please: {q}",
    ),
    unseen=varied.UNSEEN_SHORT,
)  # fmt: skip
SHORT_SHARE = 0.3
VARIED_SHARE = 0.92  # of the training items; the others use the first frames
ARTICLE = re.compile(r"^(?:a|an|the) ")


@dataclass(frozen=True)
class Topic:
    """One topic: its names, its answers and its own questions.

    Attributes:
        names: What the topic is called; the first is its key in the file of reasons.
        short: Answer in one sentence.
        more: What follows the short answer in the whole one.
        reason: What the topic is good for, the answer to "Why?".
        asks: Questions that do not name the topic.
    """

    names: tuple[str, ...]
    short: str
    more: str
    reason: str
    asks: tuple[str, ...]

    @property
    def long(self) -> str:
        """The whole answer."""
        return f"{self.short} {self.more}"


@cache
def scored_topics() -> tuple[Topic, ...]:
    """The topics that evaluation asks about, in file order."""
    return tuple(topic for name in SCORED_FILES for topic in _read(name))


@cache
def training_topics() -> tuple[Topic, ...]:
    """All topics: the scored ones, then those that were added."""
    return scored_topics() + tuple(topic for name in ADDED_FILES for topic in _read(name))


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


def _read(name: str) -> Iterator[Topic]:
    reasons = _table(REASONS_FILE)
    for entry in _table(name)["topic"]:
        names, asks = tuple(entry["names"]), tuple(entry["asks"])
        yield Topic(names, entry["short"], entry["more"], reasons[names[0]], asks)


def _question(draw: Draw, topic: Topic) -> str:
    own = topic.asks[-1:] if draw.split == "phrasing" else topic.asks[:-1]
    if own and draw.chance(0.3):
        return draw.choice(own)
    return sentence_case(draw.phrase(FRAMES).format(t=draw.choice(topic.names)))


@cache
def _rest(topic: Topic) -> tuple[str, ...]:
    """The short answer without the topic's name: `keeps the keys and values of ...`."""
    names = {ARTICLE.sub("", name) for name in topic.names} | {name for name in topic.names}
    for name in sorted(names, key=len, reverse=True):
        found = re.match(rf"(?:(?:A|An|The) )?{re.escape(name)} (.+)\.$", topic.short, re.IGNORECASE)
        if found:
            return (found[1],)
    return ()


def _clue(draw: Draw, topic: Topic) -> str | None:
    """The definition without the name, whole or cut at a pause.

    None stands for an answer that is worded otherwise.
    """
    rest = _rest(topic)
    if not rest:
        return None
    parts = re.split(r"(?:,| so that| until| because| before| and) ", rest[0])
    return rest[0] if draw.chance(0.5) or len(parts[0].split()) < 4 else parts[0]


def _span(draw: Draw, topic: Topic) -> str:
    """Some neighbouring words of the long answer."""
    words = re.sub(r"[,.:;]", "", draw.choice(re.split(r"(?<=\.) ", topic.long))).split()
    count = min(len(words), draw.number(4, 9))
    start = draw.number(0, len(words) - count)
    kept = [word for word in words[start : start + count] if not draw.chance(0.12)] or words
    return " ".join(kept)


def _varied_question(draw: Draw, topic: Topic) -> str:
    """A question by name, by the topic's own questions, or by words of its answer."""
    way = draw.random.random()
    if way < 0.14 and len(topic.asks) > 1:
        return dressed(draw, draw.choice(topic.asks[:-1]), odd=0.1)
    if way < 0.24 and (clue := _clue(draw, topic)):
        return dressed(draw, varied.CLUE_WORDINGS.wording(draw).replace("{clue}", clue), odd=0.1)
    if way < 0.38:
        return dressed(draw, varied.SPAN_WORDINGS.wording(draw).replace("{clue}", _span(draw, topic)), odd=0.1)
    name = draw.choice(topic.names)
    bare = ARTICLE.sub("", name)
    if draw.chance(0.12):
        name, bare = bare, bare
    if draw.chance(0.08):
        name, bare = name.lower(), bare.lower()
    return dressed(draw, varied.FRAME_WORDINGS.wording(draw), odd=0.1).format(
        t=name, n=bare, w=draw.choice(varied.NOUNS)
    )


def _varied_inference(draw: Draw) -> Item:
    topic = draw.choice(training_topics())
    is_short = draw.chance(SHORT_SHARE)
    unseen = topic.asks[-1].lower().rstrip("?.")
    while True:
        question = _varied_question(draw, topic)
        if is_short:
            question = varied.SHORT_WORDINGS.wording(draw).replace("{q}", question)
        if unseen not in question.lower() and not is_held_out("inference", question):
            break
    answer = topic.short if is_short else topic.long
    return Item("inference", (("user", question), ("assistant", answer)), accepted=(topic.short, topic.long))


def inference_question(draw: Draw) -> Item:
    """A question about a topic, asking for a short or a full answer."""
    if draw.split == "train" and draw.chance(VARIED_SHARE):
        return _varied_inference(draw)
    is_short = draw.chance(SHORT_SHARE)

    def make() -> tuple[str, Topic]:
        topic = draw.choice(scored_topics())
        question = _question(draw, topic)
        return (draw.phrase(SHORT).format(q=question) if is_short else question), topic

    question, topic = make()
    while draw.split != "phrasing" and is_held_out("inference", question) == (draw.split == "train"):
        question, topic = make()
    answer = topic.short if is_short else topic.long
    return Item("inference", (("user", question), ("assistant", answer)), accepted=(topic.short, topic.long))
