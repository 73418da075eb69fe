"""How many outputs violate the schema that they were asked for: none may.

    python -m benchmarks.bench_schemas --answers FILE [--schemas 1000] [--outputs 10] [--json FILE]
    python -m benchmarks.bench_schemas --check FILE [--json FILE]

The first has the demo model answer at temperature 1 under schemas of our own (`made_schemas`), each
of them several times, and writes a line of JSON for each output. Both then parse the outputs that
came to their end and validate them with `jsonschema`, formats included. Where that package is not
installed the first says so and leaves it to the second, on a machine that has it. Outputs that
`--max-tokens` cut are counted apart; one that ends otherwise is an error and counts as a violation.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from benchmarks import figures
from benchmarks.made_schemas import make_schema
from headrace import Client, HeadraceError, local

DEMO: Final = figures.ROOT / "models" / "demo"
PROMPT: Final = "Once upon a time"
# Requests at a time: fewer than forms may wait to be compiled.
_REQUESTS: Final = 32
_FORMATS: Final = ("date", "uuid", "ipv4")
_SHOWN: Final = 5

Validate = Callable[[Any, dict[str, Any]], bool]


def answer(client: Client, seed: int, num_outputs: int, max_tokens: int) -> list[dict[str, Any]]:
    """The outputs under one schema, as they are written."""
    asked: dict[str, Any] = {"json_schema": make_schema(seed), "n": num_outputs, "seed": seed + 1}
    try:
        completion = client.complete(PROMPT, temperature=1.0, max_tokens=max_tokens, **asked)
    except HeadraceError as error:
        return [{"schema": seed, "finish": "error", "text": str(error)}] * num_outputs
    return [
        {"schema": seed, "finish": output.finish_reason.name.lower(), "text": output.text}
        for output in completion.outputs
    ]


def generate(options: argparse.Namespace) -> dict[str, float]:
    """Writes all outputs, and says how long that took."""
    began_s = time.monotonic()
    with (
        local(str(options.model), device=options.device) as client,
        ThreadPoolExecutor(_REQUESTS) as pool,
        options.answers.open("w") as lines,
    ):
        ready_s = time.monotonic()
        one = lambda seed: answer(client, seed, options.outputs, options.max_tokens)  # noqa: E731
        for found in pool.map(one, range(options.schemas)):
            lines.writelines(json.dumps(line) + "\n" for line in found)
        ended_s = time.monotonic()
    return {"start_s": round(ready_s - began_s, 1), "answers_s": round(ended_s - ready_s, 1)}


def read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The outputs of a file, in order."""
    with path.open() as lines:
        yield from map(json.loads, lines)


def validator() -> Validate | None:
    """Says whether a value keeps a schema; None where there is nothing that knows."""
    try:
        library = importlib.import_module("jsonschema")
    except ImportError:
        return None
    formats = library.FormatChecker(_FORMATS)
    formats.checks("date", raises=ValueError)(_is_date)
    return lambda value, schema: library.Draft202012Validator(schema, format_checker=formats).is_valid(value)


def _is_date(value: object) -> bool:
    """Whether it is no text or a date by RFC 3339, which has a year 0000 where Python has none.

    Raises:
        ValueError: There is no such day.
    """
    if isinstance(value, str):
        # Both are leap years of the proleptic Gregorian calendar.
        datetime.date.fromisoformat(re.sub(r"^0000-", "2000-", value))
    return not isinstance(value, str) or bool(re.fullmatch(r"\d{4}-\d{2}-\d{2}", value, re.ASCII))


def check(path: pathlib.Path, validate: Validate) -> dict[str, int]:
    """Counts outputs by how they ended, and those that violate their schema."""
    counts = {"outputs": 0, "schemas": 0, "whole": 0, "cut": 0, "violations": 0}
    seen = set()
    for output in read(path):
        counts["outputs"] += 1
        seen.add(output["schema"])
        if output["finish"] == "length":
            counts["cut"] += 1
        elif keeps(output, validate):
            counts["whole"] += 1
        else:
            counts["violations"] += 1
            if counts["violations"] <= _SHOWN:
                print(f"violates schema {output['schema']} ({output['finish']}): {output['text']}", file=sys.stderr)
    return counts | {"schemas": len(seen)}


def keeps(output: dict[str, Any], validate: Validate) -> bool:
    """Whether an output came to its end and is a value that its schema allows."""
    try:
        return output["finish"] == "stop" and validate(json.loads(output["text"]), make_schema(output["schema"]))
    except ValueError:
        return False


def main() -> int:
    """Command line; 1 if an output violates its schema."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=pathlib.Path, help="file to write the outputs to")
    parser.add_argument("--check", type=pathlib.Path, help="file of outputs to validate, instead of new ones")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--outputs", type=int, default=10, help="outputs of each schema")
    parser.add_argument("--max-tokens", type=int, default=400, help="most tokens of an output")
    parser.add_argument("--model", type=pathlib.Path, default=DEMO)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if (options.answers is None) == (options.check is None):
        parser.error("name --answers or --check")
    took = generate(options) if options.answers else {}
    validate = validator()
    if validate is None:
        print(f"jsonschema is not installed: validate {options.answers or options.check} with --check elsewhere")
        return 0 if options.answers else 1
    counts = check(options.answers or options.check, validate)
    figures.report("schemas", {**counts, **took}, options.json)
    return 1 if counts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
