"""Questions and answers about LLM inference: hand-written topics (`topics_*.toml`) in many question frames.

Each topic has names, a one-sentence answer, more sentences, and questions of its own; the last own question of every
topic is never trained on. A request for a short answer gets the one sentence, any other the whole text. Held out are
combinations of question and topic name (by hash).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from corpus_draw import Draw, Item, Phrasings, is_held_out, sentence_case

TOPIC_FILES = ("topics_model.toml", "topics_memory.toml", "topics_serving.toml")

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
    unseen=(
        "Someone mentioned {t} today; what did they mean?", "Walk me through {t}.", "Teach me about {t}.",
        "I don't get {t}, can you clear it up?", "Break down {t} for me.", "In plain words, what would {t} be?",
        "Give me the idea behind {t}.", "What's the deal with {t}?",
    ),
)  # fmt: skip
SHORT = Phrasings(
    train=(
        "{q} Answer in one sentence.", "{q} Keep it short.", "Briefly: {q}", "In one sentence: {q}", "{q} One sentence, please.",
        "{q} Be brief.", "In short, {q}", "Short answer please: {q}",
    ),
    unseen=("{q} A single sentence is enough.", "{q} Make it brief.", "Quick answer: {q}"),
)  # fmt: skip
SHORT_SHARE = 0.3


@dataclass(frozen=True)
class Topic:
    """One topic: its names, its two answers and its own questions."""

    names: tuple[str, ...]
    short: str
    long: str
    asks: tuple[str, ...]


@cache
def topics() -> tuple[Topic, ...]:
    """All topics, in file order."""
    loaded: list[Topic] = []
    for name in TOPIC_FILES:
        table = tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
        loaded.extend(_topic(entry) for entry in table["topic"])
    return tuple(loaded)


def _topic(entry: dict[str, object]) -> Topic:
    short, more = str(entry["short"]), str(entry["more"])
    names, asks = entry["names"], entry["asks"]
    assert isinstance(names, list) and isinstance(asks, list)
    return Topic(tuple(names), short, f"{short} {more}", tuple(asks))


def _question(draw: Draw, topic: Topic) -> str:
    own = topic.asks[-1:] if draw.split == "phrasing" else topic.asks[:-1]
    if own and draw.chance(0.3):
        return draw.choice(own)
    return sentence_case(draw.phrase(FRAMES).format(t=draw.choice(topic.names)))


def inference_question(draw: Draw) -> Item:
    """A question about a topic, asking for a short or a full answer."""
    is_short = draw.chance(SHORT_SHARE)

    def make() -> tuple[str, Topic]:
        topic = draw.choice(topics())
        question = _question(draw, topic)
        return (draw.phrase(SHORT).format(q=question) if is_short else question), topic

    question, topic = make()
    while draw.split != "phrasing" and is_held_out("inference", question) == (draw.split == "train"):
        question, topic = make()
    answer = topic.short if is_short else topic.long
    return Item("inference", (("user", question), ("assistant", answer)), accepted=(topic.short, topic.long))
