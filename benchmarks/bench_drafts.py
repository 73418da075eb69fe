"""How many steps drafters save: tokens that a step of the model settles, with each drafter.

A server for each drafter answers the same requests one after the other: the demo's first questions,
stories, each story twice, and text that repeats itself: forms filled in a conversation in which
others were filled before, numbers to be put in order, and questions that a conversation has asked
and answered already. Tokens per step are those of the answers behind their first one, over
the steps behind the first, by the ledger. Every answer is compared with the one without drafts.

    python -m benchmarks.bench_drafts --drafters draft,ngram,suffix --tokens 4
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tomllib
from typing import Any, NamedTuple

import headrace
from benchmarks.figures import ROOT, report
from headrace.conversations.messages import Messages

_QUESTIONS = ROOT / "models" / "demo" / "scripts" / "first_questions.toml"
_STORIES = (
    "Write a story about an owl called Yiawoth who has something to do with a yellow bicycle.",
    "Tell me a story about a fox named Mina and a lantern.",
    "Tell me a story about a robot and a guitar.",
)


# Name, age and city; the first ones stand filled in already.
_PEOPLE = (
    ("Clara Weber", 34, "Lisbon"),
    ("Jonas Brandt", 51, "Copenhagen"),
    ("Marta Silva", 28, "Barcelona"),
    ("Peter Hansen", 45, "Oslo"),
    ("Anna Rossi", 62, "Rome"),
    ("Lucas Moreau", 39, "Paris"),
)
_NUM_FILLED = 2
_NUMBERS = ("31, 4, 15, 92, 65, 35, 89, 79", "12, 7, 40, 3, 28, 51", "90, 81, 72, 63, 54, 45, 36, 27")
_AGAIN = ("What is a KV cache?", "What is continuous batching?", _STORIES[1])


class Counts(NamedTuple):
    """What the ledgers of several answers say together."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    # Answers, of which so many are other ones than without drafts.
    answers: int = 0
    differing: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step settles on average, without each answer's first one and its step."""
        return (self.tokens - self.answers) / (self.steps - self.answers)


def forms() -> list[list[headrace.Message]]:
    """Conversations that have filled a form for some people and are asked for one person more."""

    def exchange(name: str, age: int, city: str) -> list[headrace.Message]:
        asked = f"Extract name, age and city as JSON: {name} is {age} years old and lives in {city}."
        answer = json.dumps({"name": name, "age": age, "city": city}, separators=(",", ":"))
        return [headrace.Message("user", asked), headrace.Message("assistant", answer)]

    filled = [message for person in _PEOPLE[:_NUM_FILLED] for message in exchange(*person)]
    return [[*filled, exchange(*person)[0]] for person in _PEOPLE[_NUM_FILLED:]]


def prompts(questions: int) -> dict[str, list[Messages]]:
    """What is asked, by kind."""
    chats = tomllib.loads(_QUESTIONS.read_text())["chats"]
    return {
        "questions": [chat[0][0] for chat in chats][:questions],
        "stories": [*_STORIES, *_STORIES],
        "forms": [*forms()],
        "order": [f"Sort these numbers: {numbers}" for numbers in _NUMBERS],
    }


def asked_again(client: headrace.Client, text: str, options: dict[str, Any]) -> headrace.Completion:
    """The answer to a question that stands in the conversation before, with its answer."""
    first = client.chat(text, **options).result().text
    before = [headrace.Message("user", text), headrace.Message("assistant", first)]
    return client.chat([*before, headrace.Message("user", text)], **options).result()


def answered(
    options: dict[str, Any], asked: dict[str, list[Messages]], sampling: dict[str, Any], model: str
) -> dict[str, list[headrace.Completion]]:
    """The answers of a server of its own, by kind."""
    wanted = {"max_tokens": 420, **sampling}
    with headrace.local(model, telemetry="off", **options) as client:
        found = {kind: [client.chat(each, **wanted).result() for each in asked[kind]] for kind in asked}
        return found | {"again": [asked_again(client, text, wanted) for text in _AGAIN]}


def counted(found: list[headrace.Completion], plain: list[headrace.Completion]) -> Counts:
    """What the answers of one kind took, beside those without drafts."""
    return Counts(
        sum(answer.usage.output_tokens for answer in found),
        sum(answer.ledger.step_count for answer in found),
        sum(answer.ledger.draft_tokens for answer in found),
        sum(answer.ledger.accepted_tokens for answer in found),
        len(found),
        sum(answer.text != other.text for answer, other in zip(found, plain, strict=True)),
    )


def main() -> int:
    """Command line; 1 if an answer is another one than without drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"))
    parser.add_argument("--draft-model", default=str(ROOT / "models" / "demo" / "draft"), help="of draft or eagle")
    parser.add_argument("--drafters", default="draft,ngram,suffix", help="with commas, values of --speculate")
    parser.add_argument("--tokens", type=int, default=4, help="drafts for each row and step")
    parser.add_argument("--questions", type=int, default=100, help="first questions to ask, at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1, help="of all requests, where the temperature is above 0")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    sampling = {"temperature": options.temperature, "seed": options.seed}
    asked = prompts(options.questions)
    plain = answered({}, asked, sampling, options.model)
    rows = []
    for drafter in options.drafters.split(","):
        flags: dict[str, Any] = {"speculate": drafter, "speculate_tokens": options.tokens}
        if drafter in ("draft", "eagle"):
            flags["draft_model"] = options.draft_model
        found = answered(flags, asked, sampling, options.model)
        for kind in plain:
            counts = counted(found[kind], plain[kind])
            row = {"drafter": drafter, "k": options.tokens, "asked": kind, **counts._asdict()}
            rows.append(row | {"tokens_per_step": round(counts.tokens_per_step, 3)})
            print(rows[-1], flush=True)
    report("drafts", {"temperature": options.temperature, "rows": rows}, options.json)
    return int(any(row["differing"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
