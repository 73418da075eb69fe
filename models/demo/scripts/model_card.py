"""Writes the demo model's README.md from its scores.

The text is ours, every number comes from eval.json or the files.
"""

from __future__ import annotations

import json
from pathlib import Path

from corpus_stories import all_parts

CARD = """---
license: apache-2.0
language: en
---

# Headrace demo model

A very small Llama-architecture model and a smaller draft of the same vocabulary, trained from
scratch by the scripts in `scripts/` on text that this repository generates. They let anybody try
the server without a download. They know short stories, questions about LLM inference, small sums,
extraction to JSON and list tasks, and say so when they are asked about anything else.

| | parameters | file | layers | hidden | heads / KV heads | context |
|---|---|---|---|---|---|---|
{sizes}

License of the weights: Apache-2.0, ours. No outside text, weights or data went into them.

## Limits

- It knows nothing but the subjects above, in English. Asked about anything else it should say so,
  but it may answer with a fact about LLM inference instead. Do not rely on any answer: it is there
  to exercise a server, not to inform anybody.
- Sums have operands of at most three digits, products a factor of one digit. Longer numbers are not
  worked out rightly.
- Wordings that are far from those it was trained on often fail; the second column below is the
  honest measure of that.
- Stories follow one of {plots} plots. The same request gives the same story unless the server
  samples.
- Conversations longer than 2,048 tokens do not fit. There was no tuning for safety beyond the
  harmless subjects of the corpus.

## Scores

Greedy decoding of the bf16 checkpoint in {dtype} on {device}. *Held-out values*: numbers, names and
combinations that training never saw, in phrasings it did see. *Unseen phrasings*: the phrasing was
kept back as well. (Whoever wrote the training grammars knew the phrasings kept back; the grammars
reject them, so they are new to the model, not to its authors.) An answer counts if it ends by
itself and is exactly right (JSON: equal value; LLM questions: exactly a known answer to that topic;
stories: at least five sentences, with the hero and the thing that were asked for). *Draft*: share
of the target's tokens that the draft model proposes, and tokens per target step with four proposed
tokens.

| domain | held-out values | unseen phrasings | draft agrees | tokens per step |
|---|---|---|---|---|
{scores}

## Training

{training}

From nothing, on one GPU, from the repository root:

    {command}

This generates the corpus (paraphrase grammars over our own templates, topics and story parts),
trains the tokenizer, the target (next token, Muon and AdamW, a quarter of the steps on rows of
2,048 tokens) and then the draft (to imitate the target's distribution). Held-out values and
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


def _training(folder: Path) -> str:
    path = folder / "training.json"
    if not path.exists():
        return "No record of the training lies beside this folder."
    record = json.loads(path.read_text())
    lines = [
        f"- {name}: {record[name]['steps']:,} steps, {record[name]['tokens'] / 1e6:,.0f} M tokens, "
        f"{record[name]['seconds']:.0f} s, last loss {record[name]['loss']:.3f}"
        for name in ("target", "draft")
    ]
    date = f"; {record['date']}" if "date" in record else ""
    lines.append(f"- hardware: one {record['device']}; torch {record['torch']}; seed {record['seed']}{date}")
    return "\n".join(lines)


def _command(folder: Path) -> str:
    path = folder / "training.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    return str(record.get("command", "python models/demo/scripts/make.py --out models/demo"))


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
        command=_command(folder),
        plots=len(all_parts().plots),
        story=held["stories"][0].replace("\n", "\n> "),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
