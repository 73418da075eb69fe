"""The demo corpus as a whole: its domains, their mixture, and how an item becomes text.

Owns the mixture and the wrapping (system messages, several turns in one conversation). The
sentences belong to the domain files, the border between training and held-out values to
`corpus_draw`.

    python corpus.py --count 20 --seed 3 --split train      # print documents to read
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from functools import cache

from corpus_arithmetic import arithmetic, word_problem
from corpus_draw import Draw, Item, Split
from corpus_extraction import extraction
from corpus_follow_up import follow_up
from corpus_inference import inference_question, training_topics
from corpus_lists import list_task
from corpus_plain import plain_text
from corpus_smalltalk import smalltalk, system_message
from corpus_stories import story_follow_up, story_request
from tool_corpus import conversations as tools

Domain = Callable[[Draw], Item]
Turns = list[tuple[str, str]]

CHAT_DOMAINS: dict[str, tuple[Domain, float]] = {
    "arithmetic": (arithmetic, 0.17),
    "word_problem": (word_problem, 0.13),
    "extraction": (extraction, 0.25),
    "lists": (list_task, 0.11),
    "inference": (inference_question, 0.14),
    "story": (story_request, 0.05),
    "story_follow_up": (story_follow_up, 0.05),
    "smalltalk": (smalltalk, 0.11),
    "follow_up": (follow_up, 0.09),
}
# Scored by themselves; training has them in whole conversations, TOOLS_SHARE of all documents.
TOOL_DOMAINS: dict[str, Domain] = {
    "tool_call": tools.tool_call,
    "new_tool": tools.new_tool,
    "tool_answer": tools.tool_answer,
    "tool_unused": tools.tool_unused,
}
DOMAINS: dict[str, Domain] = {name: domain for name, (domain, _) in CHAT_DOMAINS.items()} | TOOL_DOMAINS
TOOLS_SHARE = 0.3
PLAIN_SHARE = 0.06
SYSTEM_SHARE = 0.3
MULTI_TURN_SHARE = 0.35
MAX_JOINED = 6
BRIEF = re.compile(r"brief|short")


def _weighted(draw: Draw) -> Domain:
    point = draw.random.random() * sum(weight for _, weight in CHAT_DOMAINS.values())
    for domain, weight in CHAT_DOMAINS.values():
        point -= weight
        if point < 0:
            return domain
    return arithmetic


def evaluation_item(draw: Draw, domain: str) -> Item:
    """One item of the named domain, with the values and phrasings of the draw's split."""
    return DOMAINS[domain](draw)


def training_item(draw: Draw) -> Item:
    """One document: a plain text, or a conversation with or without tools."""
    if draw.chance(TOOLS_SHARE):
        return Item("training", tuple(_with_system(draw, tools.conversation(draw))))
    if draw.chance(PLAIN_SHARE):
        return plain_text(draw)
    turns = list(_weighted(draw)(draw).turns)
    if draw.chance(MULTI_TURN_SHARE):
        for _ in range(draw.number(1, MAX_JOINED - 1)):
            turns.extend(_weighted(draw)(draw).turns)
    return Item("training", tuple(_with_system(draw, turns)))


def _with_system(draw: Draw, turns: Turns) -> Turns:
    """The turns with a system message, which some conversations have behind that of the tools."""
    if not draw.chance(SYSTEM_SHARE):
        return turns
    system = system_message(draw)
    shown = 1 if turns[0][0] == "system" else 0
    said = _briefly(turns[shown:]) if BRIEF.search(system) else turns[shown:]
    return [*turns[:shown], ("system", system), *said]


@cache
def _short_answers() -> dict[str, str]:
    """Each topic's whole answer and the one sentence that stands for it."""
    return {topic.long: topic.short for topic in training_topics()}


def _briefly(turns: Turns) -> Turns:
    """The turns as they go where the system message asks for short answers."""
    short = _short_answers()
    return [(role, short.get(text, text) if role == "assistant" else text) for role, text in turns]


def render(turns: tuple[tuple[str, str], ...]) -> str:
    """The turns as the chat template writes them, without the first `<|bos|>`.

    A plain text stays as it is.
    """
    if turns[0][0] == "text":
        return turns[0][1]
    return "".join(f"<|{'assistant' if role == 'recited' else role}|>{text}<|end|>" for role, text in turns)


def document_texts(seed: int, count: int, split: Split = "train") -> Iterator[str]:
    """Rendered documents without special tokens between turns, for the tokenizer's training."""
    draw = Draw(seed, split)
    for _ in range(count):
        yield "\n".join(text for _, text in training_item(draw).turns)


def main() -> None:
    """Prints some documents."""
    parser = argparse.ArgumentParser(description="Print documents of the demo corpus.")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--split", choices=("train", "heldout", "phrasing"), default="train")
    options = parser.parse_args()
    draw = Draw(options.seed, options.split)
    for _ in range(options.count):
        print(render(training_item(draw).turns) + "\n")


if __name__ == "__main__":
    main()
