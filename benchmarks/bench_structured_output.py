"""What structured output costs: compiling a schema, its first mask, and each mask after it.

    python -m benchmarks.bench_structured_output --json FILE

The schemas are our own (`made_schemas`). With `--schemas-from FOLDER` also those that lie there as
files, such as guidance-ai's JSONSchemaBench.
Vocabularies: the demo model's 4,096 tokens, and a synthetic one of 128,256 (`synthetic_tokenizer`).
Texts are drawn at random from the masks, which is harder for a lexer than what a model writes.

All figures are CPU time of the thread that does the work: trial (compiling and four tokens, as the
process for it does), compile (again, where it is used), first mask, and the masks after it with the
token before each. Reading pipes between the processes is not in them.

With `--rows 64,256` also what the masks of a step of so many rows take together (`MaskPool`): CPU
microseconds of all threads for a row, and wall milliseconds from the call to the record that the
workers are sent; `ahead` where tokens that must come are looked for.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import llguidance
import numpy as np
from llguidance import LLMatcher

from benchmarks import figures
from benchmarks.made_schemas import long_schema, make_schema
from benchmarks.schema_files import measure_files
from benchmarks.shapes import write_model_folder
from headrace_backend.engine.output_grammar import MASKED, MaskOutcome
from headrace_backend.engine.scheduling.masks import MaskCall, MaskJob
from headrace_backend.step.masks import StepMasks, mask_words
from headrace_backend.structured_output.forms import grammar_of
from headrace_backend.structured_output.mask_pool import MaskPool
from headrace_backend.structured_output.output_place import CompiledGrammar, OutputPlace
from headrace_backend.structured_output.trial import LIMITS, try_grammar
from headrace_backend.structured_output.vocabulary import (
    Vocabulary,
    folder_tokenizer,
    read_vocabulary,
)
from headrace_model_folder import ModelFolder
from headrace_request.structured_output import StructuredOutput

LARGE_SHAPE = "llama-3.1-8b"
MAX_TOKENS = 120
STEPS = 120
WARM_STEPS = 20
T = TypeVar("T")
DEMO = figures.ROOT / "models" / "demo"


def demo_tokenizer() -> tuple[Vocabulary, llguidance.LLTokenizer]:
    """The demo model's vocabulary."""
    folder = ModelFolder.open(DEMO)
    vocabulary = read_vocabulary(folder)
    assert vocabulary is not None, "the demo model has a tokenizer"
    return vocabulary, folder_tokenizer(vocabulary, folder)


def large_tokenizer() -> tuple[Vocabulary, llguidance.LLTokenizer]:
    """A synthetic vocabulary of as many tokens as Llama 3.1's."""
    with tempfile.TemporaryDirectory() as parent:
        path = write_model_folder(LARGE_SHAPE, pathlib.Path(parent), tokenizer=True)
        folder = ModelFolder.open(path, require_weights=False)
        vocabulary = read_vocabulary(folder)
        assert vocabulary is not None, "the shape has a tokenizer"
        return vocabulary, folder_tokenizer(vocabulary, folder)


def timed_ms(act: Callable[[], T]) -> tuple[float, T]:
    """CPU milliseconds of this thread that `act` takes, and what it gives."""
    began_ns = time.thread_time_ns()
    result = act()
    return (time.thread_time_ns() - began_ns) / 1e6, result


def walk_ms(place: OutputPlace, vocabulary: Vocabulary, draw: random.Random) -> list[float]:
    """CPU milliseconds of each mask of a text drawn at random; the first of them is the first."""
    words = np.empty(mask_words(vocabulary.size), np.int32)
    end_ids, tokens, times = frozenset(vocabulary.end_ids), array("i"), []
    while len(tokens) < MAX_TOKENS:
        first = max(len(tokens) - 1, 0)
        new = tokens[first:]
        elapsed_ms, outcome = timed_ms(lambda new=new, first=first: place.fill_mask(words, first, new, end_ids, 0))
        assert outcome is MASKED, outcome.error
        times.append(elapsed_ms)
        bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        ids = [token for token in bits.tolist() if token not in end_ids]
        if not ids:
            break
        tokens.append(draw.choice(ids))
    return times


def measure(vocabulary: Vocabulary, tokenizer: llguidance.LLTokenizer, num_schemas: int) -> dict[str, float]:
    """Figures in CPU milliseconds over schemas, and over all masks but the first of each."""
    columns: dict[str, list[float]] = {"trial": [], "compile": [], "first_mask": [], "all": [], "later_mask": []}
    for seed in range(num_schemas):
        asked = StructuredOutput("json_schema", json.dumps(make_schema(seed)))
        trial_ms, verdict = timed_ms(lambda asked=asked: try_grammar(tokenizer, asked))
        assert not verdict.error, verdict.error
        compile_ms, matcher = timed_ms(
            lambda asked=asked: LLMatcher(tokenizer, grammar_of(asked), log_level=0, limits=LIMITS)
        )
        place = CompiledGrammar(matcher, vocabulary.end_ids).new_output()
        first_ms, *later = walk_ms(place, vocabulary, random.Random(seed))
        for name, value in (("trial", trial_ms), ("compile", compile_ms), ("first_mask", first_ms)):
            columns[name].append(value)
        columns["all"].append(trial_ms + compile_ms + first_ms)
        columns["later_mask"] += later
    found: dict[str, float] = {
        "vocabulary": vocabulary.size,
        "schemas": num_schemas,
        "masks": len(columns["later_mask"]),
    }
    for name, values in columns.items():
        for share in (50, 99):
            found[f"{name}_p{share}_ms"] = float(np.percentile(values, share))
    found["later_mask_mean_ms"] = float(np.mean(columns["later_mask"]))
    return found


class StepRows:
    """Rows that each follow a schema, and draw at random from their masks, step by step."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: llguidance.LLTokenizer, num_rows: int) -> None:
        """Compiles up to 64 schemas, which rows take in turn."""
        self._vocabulary = vocabulary
        forms = [StructuredOutput("json_schema", long_schema(seed, STEPS)) for seed in range(min(num_rows, 64))]
        matchers = [LLMatcher(tokenizer, grammar_of(form), log_level=0, limits=LIMITS) for form in forms]
        grammars = [CompiledGrammar(matcher, vocabulary.end_ids) for matcher in matchers]
        self._places = [grammars[row % len(grammars)].new_output() for row in range(num_rows)]
        self._tokens = [array("i") for _ in range(num_rows)]
        self._draw = random.Random(0)

    def call(self, step: int, looks_ahead: bool) -> MaskCall:
        """The step's call, as an engine makes it."""
        end_ids = frozenset(self._vocabulary.end_ids)
        jobs = []
        for row, (place, tokens) in enumerate(zip(self._places, self._tokens, strict=True)):
            first = max(len(tokens) - 1, 0)
            jobs.append(MaskJob(row, place, first, tokens[first:], end_ids, 0, looks_ahead))
        return MaskCall(step, 0, jobs, [], looks_ahead)

    def go_on(self, masks: StepMasks) -> None:
        """Draws one of a few tokens that each mask allows."""
        for tokens, words in zip(self._tokens, masks.masks, strict=True):
            place = self._draw.choice(np.flatnonzero(words).tolist())
            word = int(words.view(np.uint32)[place])
            tokens.append(self._draw.choice([32 * place + bit for bit in range(32) if word >> bit & 1]))


def measure_step(
    vocabulary: Vocabulary, tokenizer: llguidance.LLTokenizer, num_rows: int, looks_ahead: bool
) -> dict[str, Any]:
    """What the masks of a step take, over some steps; the first ones count for none."""
    rows, pool = StepRows(vocabulary, tokenizer, num_rows), MaskPool(vocabulary.size)
    cpu_us, wall_ms = [], []
    for step in range(STEPS):
        call, there = rows.call(step, looks_ahead), threading.Event()
        sent: list[tuple[int, StepMasks]] = []

        def masked(
            call: MaskCall, masks: StepMasks, _: list[MaskOutcome], sent: list[tuple[int, StepMasks]] = sent
        ) -> None:
            masks.encode()
            sent.append((time.monotonic_ns(), masks))

        def computed(call: MaskCall, outcomes: list[MaskOutcome], there: threading.Event = there) -> None:
            there.set()

        began_cpu_ns, began_ns = time.process_time_ns(), time.monotonic_ns()
        pool.start(call, masked, computed)
        there.wait()
        wall_ms.append((sent[0][0] - began_ns) / 1e6)
        cpu_us.append((time.process_time_ns() - began_cpu_ns) / 1e3 / num_rows)
        rows.go_on(sent[0][1])
    pool.close()
    found: dict[str, Any] = {"vocabulary": vocabulary.size, "rows": num_rows, "ahead": looks_ahead}
    for share in (50, 99):
        found[f"row_cpu_us_p{share}"] = round(float(np.percentile(cpu_us[WARM_STEPS:], share)), 1)
        found[f"step_wall_ms_p{share}"] = round(float(np.percentile(wall_ms[WARM_STEPS:], share)), 3)
    return found


def main() -> None:
    """Measures both vocabularies, prints them, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=300, help="schemas of each vocabulary")
    parser.add_argument(
        "--rows", type=lambda text: [int(part) for part in text.split(",")], default=[], help="rows of whole steps"
    )
    parser.add_argument("--schemas-from", type=pathlib.Path, help="a folder of schemas in *.json files")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results, steps, files = [], [], []
    for make in (demo_tokenizer, large_tokenizer):
        took_ms, (vocabulary, tokenizer) = timed_ms(make)
        if options.schemas:
            results.append({"tokenizer_ms": took_ms, **measure(vocabulary, tokenizer, options.schemas)})
        if options.schemas_from is not None:
            files.append(measure_files(vocabulary, tokenizer, options.schemas_from))
        steps += [measure_step(vocabulary, tokenizer, rows, ahead) for rows in options.rows for ahead in (False, True)]
    figures.report("structured_output", {"results": results, "files": files, "steps": steps}, options.json)


if __name__ == "__main__":
    main()
