"""What it brings that tokens which a form leaves no choice about are not drawn, and drafts beside.

Rows of the demo model on this machine's CPU answer side by side: under a JSON Schema as users write
them, with such tokens skipped and with each drawn (`max_drafts=0`), and without a form, in turns
against one server. A second server drafts (`--speculate`): the same schema, with such tokens
skipped there too. `--array` has each row answer an array of objects under a schema of its own, in
which little must come and much was there before. Answers under a form are the same all ways, which
is checked.

    python -m benchmarks.bench_forced_tokens [--rows 16] [--rounds 5] [--speculate ngram] [--array]
    [--json FILE]

Prints for each way the tokens that an output settles in a step of its request and tokens per
second, and the ratio of tokens per second to that of drawing each token, round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from benchmarks import figures
from benchmarks.made_schemas import long_schema
from headrace import Client, Completion, local

DEMO: Final = figures.ROOT / "models" / "demo"
PROMPT: Final = "Once upon a time"
# Names of properties of several tokens, enums, and values of which a model writes most.
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "customer_reference": {"type": "integer", "minimum": 1000, "maximum": 9999},
        "full_name": {"type": "string", "maxLength": 16},
        "delivery_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 16},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["Netherlands", "Switzerland", "Luxembourg"]},
            },
            "required": ["street_and_number", "postal_code", "country"],
            "additionalProperties": False,
        },
        "payment_method": {"enum": ["credit_card", "bank_transfer", "invoice"]},
        "is_returning_customer": {"type": "boolean"},
    },
    "required": [
        "customer_reference",
        "full_name",
        "delivery_address",
        "payment_method",
        "is_returning_customer",
    ],
    "additionalProperties": False,
}
# A server, and what is asked of it; the form is added where there is one.
WAYS: Final[dict[str, dict[str, Any]]] = {"skipped": {}, "drawn": {"max_drafts": 0}, "free": {"ignore_eos": True}}
DRAFTED: Final = "drafted"


class Round(NamedTuple):
    """What one way came to with all rows at once."""

    num_tokens: int
    num_steps: int
    duration_s: float
    answers: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all rows per second, by the clock."""
        return self.num_tokens / self.duration_s


class Asked(NamedTuple):
    """What all rounds ask."""

    num_rows: int
    max_tokens: int
    temperature: float
    # Of each row; None: no form.
    schemas: list[Any]


def measure(client: Client, asked: Asked, way: dict[str, Any], seed: int) -> Round:
    """Has rows answer side by side, each with a seed of its own."""
    num_rows = asked.num_rows

    def answer(row: int) -> Completion:
        options = {"temperature": asked.temperature, "max_tokens": asked.max_tokens, **way}
        if "ignore_eos" not in way:
            options["json_schema"] = asked.schemas[row]
        return client.complete(PROMPT, seed=1000 * seed + row, **options)

    with ThreadPoolExecutor(num_rows) as pool:
        began_s = time.monotonic()
        completions = list(pool.map(answer, range(num_rows)))
        duration_s = time.monotonic() - began_s
    answers = [list(completion.outputs[0].token_ids) for completion in completions]
    num_steps = sum(completion.ledger.step_count for completion in completions)
    return Round(sum(map(len, answers)), num_steps, duration_s, answers)


def run(client: Client, drafting: Client | None, asked: Asked, num_rounds: int) -> dict[str, Any]:
    """Figures of each way, after a round that counts for none."""
    ways = [(name, client, way) for name, way in WAYS.items()]
    if drafting is not None:
        ways.append((DRAFTED, drafting, {}))
    rounds: dict[str, list[Round]] = {name: [] for name, _, _ in ways}
    for seed in range(num_rounds + 1):
        for name, server, way in ways:
            rounds[name].append(measure(server, asked, way, seed))
        same = [rounds[name][-1].answers for name, _, way in ways if "ignore_eos" not in way]
        assert same.count(same[0]) == len(same), "a token that nobody drew, or a draft, changed an answer"
    counted = {name: found[1:] for name, found in rounds.items()}
    return {name: _figures(found, counted["drawn"]) for name, found in counted.items()}


def _figures(found: list[Round], drawn: list[Round]) -> dict[str, float]:
    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(found, drawn, strict=True)]
    total: Callable[[str], float] = lambda name: sum(getattr(each, name) for each in found)  # noqa: E731
    return {
        "tokens": total("num_tokens"),
        "tokens_per_step": total("num_tokens") / total("num_steps"),
        "tokens_per_s": statistics.median(each.tokens_per_s for each in found),
        "ratio_to_drawn": statistics.median(ratios),
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
    }


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16, help="outputs at once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each way that count")
    parser.add_argument("--max-tokens", type=int, default=200, help="most tokens of an output")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--array", action="store_true", help="arrays of objects, each row under a schema of its own")
    parser.add_argument("--speculate", default="off", help="who drafts in the second server; off: there is none")
    parser.add_argument("--speculate-tokens", default="4", help="its drafts in a step")
    parser.add_argument("--model", default=str(DEMO), help="a model folder")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    schemas = [long_schema(row, options.max_tokens) if options.array else SCHEMA for row in range(options.rows)]
    asked = Asked(options.rows, options.max_tokens, options.temperature, schemas)
    cpu: dict[str, Any] = {"device": "cpu", "dtype": "fp32"}
    with contextlib.ExitStack() as servers:
        client = servers.enter_context(local(options.model, **cpu))
        drafting = None
        if options.speculate != "off":
            drafts = {"speculate": options.speculate, "speculate_tokens": options.speculate_tokens}
            drafting = servers.enter_context(local(options.model, **cpu, **drafts))
        results = run(client, drafting, asked, options.rounds)
    figures.report("forced_tokens", {"rows": options.rows, "results": results}, options.json)


if __name__ == "__main__":
    main()
