"""Scores a finished demo folder on held-out items and writes eval.json and the model card.

Owns the judging and the tables. Two sets that training never saw are scored by domain: `heldout`
(values, names and combinations held back, phrasings known) and `phrasing` (phrasings held back as
well). Answers are decoded greedily from the bf16 checkpoint, in bf16 on a GPU and in fp32 on a CPU.
The draft is scored by how often it would have proposed the target's token.

Beside them stand the first questions (`first_questions.toml`), which training has seen: what people
ask before they know the model.

    python evaluate.py --model FOLDER [--scale 1.0] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import DOMAINS, evaluation_item
from corpus_draw import Draw, Item, Split
from demo_generation import generate, greedy_choices
from demo_model import END_ID, DemoModel, load_folder
from demo_shards import SPOKEN_BIT, Encoder
from model_card import write_card
from tokenizers import Tokenizer

COUNTS = {
    "arithmetic": 300, "word_problem": 200, "extraction": 300, "lists": 250, "inference": 250, "story": 100,
    "story_follow_up": 100, "smalltalk": 100, "follow_up": 200, "tool_call": 300, "new_tool": 150, "tool_answer": 200,
    "tool_unused": 150,
}  # fmt: skip
MAX_NEW_TOKENS = {"story": 420}
MAX_FIRST_TOKENS = 240
# A step of decoding takes a GPU as long for one row as for hundreds.
BATCH = 512
# Rows whose logits are held at once.
AGREEMENT_BATCH = 128
PROPOSED = 4
EVALUATION_SEED = 20260
FIRST_QUESTIONS = Path(__file__).parent / "first_questions.toml"
BRIEFLY = "Be brief."


@dataclass(frozen=True)
class Scored:
    """One judged answer."""

    item: Item
    prompt: list[int]
    produced: list[int]
    text: str
    is_right: bool


def is_right(item: Item, text: str, ended: bool) -> bool:
    """Judges an answer.

    It must end by itself and equal an accepted answer, the JSON value, or the story's rules.
    """
    if not ended:
        return False
    if item.is_json:
        try:
            return bool(json.loads(text) == json.loads(item.answer))
        except json.JSONDecodeError:
            return False
    if item.mentions:
        return all(word in text for word in item.mentions) and text.count(".") >= 5
    return text.strip() in (item.answer, *item.accepted)


def _batches(items: list[Item]) -> Iterator[list[Item]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def score_domain(model: DemoModel, encoder: Encoder, items: list[Item], max_new_tokens: int) -> list[Scored]:
    """Answers and judges the items."""
    scored: list[Scored] = []
    for batch in _batches(items):
        prompts = [prompt_ids(encoder, item) for item in batch]
        answers = generate(model, prompts, max_new_tokens)
        for item, prompt, ids in zip(batch, prompts, answers, strict=True):
            ended = ids[-1] == END_ID
            text = encoder.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
            scored.append(Scored(item, prompt, ids, text, is_right(item, text, ended)))
    return scored


def prompt_ids(encoder: Encoder, item: Item) -> list[int]:
    """Token ids of the conversation up to the start of the last answer."""
    opened = Item(item.domain, item.turns[:-1])
    ids = [token & (SPOKEN_BIT - 1) for token in encoder.encode_many([opened])[0]]
    return [*ids, encoder.roles["assistant"]]


def draft_agreement(draft: DemoModel, scored: list[Scored]) -> dict[str, float]:
    """Share of the target's tokens that the draft would propose.

    Also the tokens per verification with PROPOSED drafts.
    """
    agreed, tokens, steps = 0, 0, 0
    for start in range(0, len(scored), AGREEMENT_BATCH):
        part = scored[start : start + AGREEMENT_BATCH]
        choices = greedy_choices(draft, [one.prompt + one.produced for one in part])
        for one, choice in zip(part, choices, strict=True):
            first = len(one.prompt)
            same = [choice[first + i - 1] == token for i, token in enumerate(one.produced)]
            agreed, tokens, steps = agreed + sum(same), tokens + len(same), steps + verifications(same)
    return {"agreement": agreed / tokens, "tokens_per_step": tokens / steps}


def verifications(same: list[bool]) -> int:
    """Target steps needed if each step checks PROPOSED drafted tokens and adds one of its own."""
    position, steps = 0, 0
    while position < len(same):
        accepted = 0
        while accepted < PROPOSED and position + accepted < len(same) and same[position + accepted]:
            accepted += 1
        position, steps = position + accepted + 1, steps + 1
    return steps


def score_split(model: DemoModel, draft: DemoModel, encoder: Encoder, split: Split, scale: float) -> dict[str, object]:
    """Scores all domains of one split.

    Returns:
        Right and total of every domain and of all, agreement of the draft by domain, wrong answers
        and stories to read.
    """
    domains: dict[str, dict[str, float]] = {}
    wrong: list[dict[str, str]] = []
    stories: list[str] = []
    for domain in DOMAINS:
        draw = Draw(EVALUATION_SEED, split)
        items = [evaluation_item(draw, domain) for _ in range(max(2, int(COUNTS[domain] * scale)))]
        scored = score_domain(model, encoder, items, MAX_NEW_TOKENS.get(domain) or _longest(encoder, items))
        right = sum(one.is_right for one in scored)
        domains[domain] = {"right": right, "total": len(scored), **draft_agreement(draft, scored)}
        failed = [one for one in scored if not one.is_right][:6]
        wrong.extend({"question": _last_question(one), "expected": one.item.answer, "got": one.text} for one in failed)
        if domain == "story":
            stories = [f"{_last_question(one)}\n\n{one.text}" for one in scored[:4]]
    right, total = (sum(int(row[key]) for row in domains.values()) for key in ("right", "total"))
    return {"right": right, "total": total, "domains": domains, "wrong": wrong, "stories": stories}


@dataclass
class FirstConversation:
    """One conversation of the first questions as far as it has come.

    Attributes:
        turns: What was said; a system message may stand first, and a plain text stands alone.
        asked: Questions that are still to come, each with a text that its answer has to contain.
    """

    turns: list[tuple[str, str]]
    asked: list[tuple[str, str]]


def first_conversations() -> list[FirstConversation]:
    """The conversations of `first_questions.toml`; a plain text is one with the role `text`."""
    table = tomllib.loads(FIRST_QUESTIONS.read_text(encoding="utf-8"))
    begun = [FirstConversation([], [(ask, part) for ask, part in chat]) for chat in table["chats"]]
    system = [("system", BRIEFLY)]
    begun += [FirstConversation(list(system), [(ask, part) for ask, part in chat]) for chat in table["briefly"]]
    return begun + [FirstConversation([("text", text)], [("", part)]) for text, part in table["texts"]]


def _first_prompt(encoder: Encoder, one: FirstConversation) -> list[int]:
    """Token ids up to where the model goes on; asks the next question in a chat."""
    if one.turns and one.turns[0][0] == "text":
        text = encoder.tokenizer.encode(one.turns[0][1], add_special_tokens=False).ids
        return [encoder.special["bos"], *text]
    one.turns += [("user", one.asked[0][0]), ("assistant", "")]
    return prompt_ids(encoder, Item("first", tuple(one.turns)))


def score_first_questions(model: DemoModel, encoder: Encoder) -> dict[str, object]:
    """Asks the first questions, each conversation with the model's own answers before it."""
    left, right, total = first_conversations(), 0, 0
    wrong: list[dict[str, str]] = []
    while left:
        prompts = [_first_prompt(encoder, one) for one in left]
        for one, ids in zip(left, generate(model, prompts, MAX_FIRST_TOKENS), strict=True):
            text = encoder.tokenizer.decode(ids, skip_special_tokens=True)
            question, part = one.asked.pop(0)
            total, right = total + 1, right + (part in text)
            if part not in text:
                wrong.append({"question": question or one.turns[0][1], "expected": part, "got": text})
            one.turns[-1] = (one.turns[-1][0], text)
        left = [one for one in left if one.asked]
    return {"right": right, "total": total, "wrong": wrong}


def _longest(encoder: Encoder, items: list[Item]) -> int:
    """Tokens within which a right answer to any of the items ends, whatever spaces its JSON has."""
    answers = [text for item in items for text in (item.answer, *item.accepted)]
    return max(len(row.ids) for row in encoder.tokenizer.encode_batch_fast(answers, add_special_tokens=False)) + 16


def _last_question(one: Scored) -> str:
    return one.item.turns[-2][1]


def evaluate(folder: Path, device: torch.device, scale: float) -> dict[str, object]:
    """Scores both splits, writes eval.json and README.md into the folder and returns the scores."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, draft = load_folder(folder, device, dtype), load_folder(folder / "draft", device, dtype)
    encoder = Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    started = time.monotonic()
    scores: dict[str, object] = {"dtype": str(dtype).removeprefix("torch."), "device": device.type}
    for split in ("heldout", "phrasing"):
        result = score_split(model, draft, encoder, split, scale)
        scores[split] = result
        print(f"{split}: {result['right']}/{result['total']} {time.monotonic() - started:.0f} s", flush=True)
    scores["first_questions"] = score_first_questions(model, encoder)
    (folder / "eval.json").write_text(json.dumps(scores, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_card(folder, scores)
    return scores


def print_scores(scores: dict[str, object]) -> None:
    """Prints the table of the model card, some wrong answers and the sample stories."""
    for split in ("heldout", "phrasing"):
        result = scores[split]
        assert isinstance(result, dict)
        print(f"\n{split}: {100 * result['right'] / result['total']:.1f}% of {result['total']}")
        for domain, row in result["domains"].items():
            print(
                f"  {domain:16} {row['right']:4}/{row['total']:<4} draft agrees {row['agreement']:.3f}, "
                f"{row['tokens_per_step']:.2f} tokens/step"
            )
        for wrong in result["wrong"][:14]:
            print(
                f"  Q {wrong['question'][:110]!r}\n    expected {wrong['expected'][:90]!r}\n    got      "
                f"{wrong['got'][:90]!r}"
            )
    for story in scores["heldout"]["stories"][:3]:  # type: ignore[index]
        print(f"\n--- {story}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Score a demo model folder and write its model card.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of items")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    print_scores(evaluate(options.model, torch.device(options.device), options.scale))


if __name__ == "__main__":
    main()
