"""Writes the demo model's README.md from its scores.

The text is ours, every number comes from eval.json or the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corpus_stories import all_parts
from corpus_words import CAPITALS
from tool_corpus.kinds import TRAINED

CARD = """---
license: apache-2.0
language: en
---

# Headrace demo model

A very small Llama-architecture model and a smaller draft of the same vocabulary, trained from
scratch by the scripts in `scripts/` on text that this repository generates. They let anybody try
the server without a download. They know short stories, questions about LLM inference and follow-ups
to them, small sums, extraction to JSON, list tasks and most of the capitals of {capitals} countries,
call tools that a request offers, and say so when they are asked about anything else.

| | parameters | file | layers | hidden | heads / KV heads | context |
|---|---|---|---|---|---|---|
{sizes}

License of the weights: Apache-2.0, ours. No outside text, weights or data went into them.

## Limits

- It knows nothing but the subjects above, in English. Asked about anything else it should say so,
  but it may answer with a fact about LLM inference instead. Do not rely on any answer: it is there
  to exercise a server, not to inform anybody.
- Sums have operands of at most three digits, products a factor of one digit. Of longer numbers,
  divisions and percentages it says that they are too hard.
- Without a chat (`Generate`) it goes on with what looks like a story, a sum, a definition or a
  question of its subjects. Any other text it continues somehow.
- Wordings that are far from those it was trained on often fail; the second column below is the
  honest measure of that.
- Tools are shown by name, description and the schemas of their parameters, up to four in training.
  It knows {kinds} kinds of them and such as are like them; how often it calls others right, the row
  "new tool" below says. It never asks back for a value that is missing.
- Stories follow one of {plots} plots. The same request gives the same story unless the server
  samples.
- Conversations longer than 2,048 tokens do not fit. There was no tuning for safety beyond the
  harmless subjects of the corpus.

## Scores

Greedy decoding of the bf16 checkpoint in {dtype} on {device}. *Held-out values*: numbers, names and
combinations that training never saw, in phrasings it did see. *Unseen phrasings*: the phrasing was
kept back as well. (Whoever wrote the training grammars knew the phrasings kept back; the grammars
reject them, so they are new to the model, not to its authors.) With tools these are names,
descriptions and parameters as well; *new tool* is of kinds that training never saw. An answer
counts if it ends by itself and is exactly right (JSON: equal value; LLM questions: exactly a known
answer to that topic; stories: at least five sentences, with the hero and the thing that were asked
for; calls: the same text). *Draft*: share of the target's tokens that the draft model proposes, and
tokens per target step with four proposed tokens.

| domain | held-out values | unseen phrasings | draft agrees | tokens per step |
|---|---|---|---|---|
{scores}

{first}

## Training

{training}

The first of these begins with random weights, each further one with the weights before it, on the
corpus as the scripts made it on that day. Without `--start` one training makes a model from
nothing.

A training generates the corpus (paraphrase grammars over our own templates, topics and story
parts), makes the tokenizer, the target (next token, Muon and AdamW, a quarter of the steps on rows
of 2,048 tokens) and then the draft (to imitate the target's distribution). Held-out values and
phrasings are kept out of the corpus by construction, and `tests/models/test_demo_corpus.py` checks
it.

Only the scores and this page:

    python models/demo/scripts/evaluate.py --model models/demo

The corpus is a function of the seed. The weights are not bit for bit the same from run to run:
training is bounded by the clock, and GPU sums differ in order.

## A story it told

> {story}
"""


def _sizes(folder: Path) -> str:
    rows = []
    for label, path in (("target", folder), ("draft", folder / "draft")):
        config = json.loads((path / "config.json").read_text())
        size = (path / "model.safetensors").stat().st_size
        heads = f"{config['num_attention_heads']} / {config['num_key_value_heads']}"
        rows.append(
            f"| {label} | {size / 2e6:.1f} M | {size / 2**20:.1f} MiB | {config['num_hidden_layers']} | "
            f"{config['hidden_size']} | {heads} | {config['max_position_embeddings']} |"
        )
    return "\n".join(rows)


def _percent(row: dict[str, float]) -> str:
    return f"{100 * row['right'] / row['total']:.1f}% of {int(row['total'])}"


def _scores(scores: dict[str, object]) -> str:
    held, unseen = scores["heldout"], scores["phrasing"]
    assert isinstance(held, dict) and isinstance(unseen, dict)
    rows = []
    for domain, row in held["domains"].items():
        draft = f"{100 * row['agreement']:.1f}% | {row['tokens_per_step']:.2f}"
        rows.append(
            f"| {domain.replace('_', ' ')} | {_percent(row)} | {_percent(unseen['domains'][domain])} | {draft} |"
        )
    rows.append(f"| **all** | **{_percent(held)}** | **{_percent(unseen)}** | | |")
    return "\n".join(rows)


def _first_questions(scores: dict[str, object]) -> str:
    first = scores["first_questions"]
    assert isinstance(first, dict)
    return (
        f"Of {first['total']} questions that newcomers ask (`scripts/first_questions.toml`; training has seen them)\n"
        f"{first['right']} are answered as they should be."
    )


def _one_training(record: dict[str, Any]) -> list[str]:
    """The lines of one training: its command, then what it did."""
    lines = [f"    {record['command']}", ""]
    lines += [
        f"- {name}: {record[name]['steps']:,} steps, {record[name]['tokens'] / 1e6:,.0f} M tokens, "
        f"{record[name]['seconds']:.0f} s, last loss {record[name]['loss']:.3f}"
        for name in ("target", "draft")
        if name in record
    ]
    hardware = f"- hardware: one {record['device']}; torch {record['torch']}; seed {record['seed']}"
    return [*lines, f"{hardware}; {record['date']}", ""]


def _training(folder: Path) -> str:
    path = folder / "training.json"
    if not path.exists():
        return "No record of the training lies beside this folder."
    record = json.loads(path.read_text())
    records = [*record.get("before", []), record]
    return "\n".join(line for one in records for line in _one_training(one)).rstrip()


def write_card(folder: Path, scores: dict[str, object]) -> None:
    """Writes README.md into the folder from the scores, the configs and training.json."""
    held = scores["heldout"]
    assert isinstance(held, dict)
    text = CARD.format(
        sizes=_sizes(folder),
        dtype=scores["dtype"],
        device="a GPU" if scores["device"] == "cuda" else "a CPU",
        scores=_scores(scores),
        training=_training(folder),
        first=_first_questions(scores),
        capitals=len(CAPITALS),
        plots=len(all_parts().plots),
        kinds=len(TRAINED),
        story=held["stories"][0].replace("\n", "\n> "),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
