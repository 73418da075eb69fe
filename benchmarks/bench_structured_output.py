"""What structured output costs: compiling a schema, its first mask, and each mask after it.

    python -m benchmarks.bench_structured_output --json FILE

The schemas are our own (`made_schemas`), because guidance-ai's JSONSchemaBench lies on a model hub.
Vocabularies: the demo model's 4,096 tokens, and a synthetic one of 131,072 (`synthetic_tokenizer`).
Texts are drawn at random from the masks, which is harder for a lexer than what a model writes.

All figures are CPU time of the thread that does the work: trial (compiling and four tokens, as the
process for it does), compile (again, where it is used), first mask, and the masks after it with the
token before each. Reading pipes between the processes is not in them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import tempfile
import time
from array import array
from collections.abc import Callable
from typing import TypeVar

import llguidance
import numpy as np
from llguidance import LLMatcher

from benchmarks import figures
from benchmarks.made_schemas import make_schema
from benchmarks.synthetic_tokenizer import write_tokenizer
from headrace_backend.engine.output_grammar import MASKED
from headrace_backend.step.masks import mask_words
from headrace_backend.structured_output.forms import grammar_of
from headrace_backend.structured_output.output_place import CompiledGrammar, OutputPlace
from headrace_backend.structured_output.trial import LIMITS, try_grammar
from headrace_backend.structured_output.vocabulary import Vocabulary, folder_encode, make_tokenizer, read_vocabulary
from headrace_model_folder import ModelFolder
from headrace_model_folder.token_table import library_tokenizer, read_token_table
from headrace_request.structured_output import StructuredOutput

LARGE_VOCABULARY = 131_072
MAX_TOKENS = 120
T = TypeVar("T")
DEMO = figures.ROOT / "models" / "demo"


def demo_tokenizer() -> tuple[Vocabulary, llguidance.LLTokenizer]:
    """The demo model's vocabulary."""
    folder = ModelFolder.open(DEMO)
    vocabulary = read_vocabulary(folder)
    assert vocabulary is not None, "the demo model has a tokenizer"
    return vocabulary, make_tokenizer(vocabulary, folder_encode(folder))


def large_tokenizer() -> tuple[Vocabulary, llguidance.LLTokenizer]:
    """A synthetic vocabulary, the first of whose special tokens ends texts."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tokenizer.json"
        write_tokenizer(path, LARGE_VOCABULARY)
        table, library = read_token_table(path), library_tokenizer(path.read_bytes())
    special = sorted(table.special_ids)
    vocabulary = Vocabulary([text or b"" for text in table.token_bytes], special, special[:1])
    encode = library.encode
    return vocabulary, make_tokenizer(vocabulary, lambda text: list(encode(text, add_special_tokens=False).ids))


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


def main() -> None:
    """Measures both vocabularies, prints them, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=300, help="schemas of each vocabulary")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results = []
    for make in (demo_tokenizer, large_tokenizer):
        took_ms, (vocabulary, tokenizer) = timed_ms(make)
        results.append({"tokenizer_ms": took_ms, **measure(vocabulary, tokenizer, options.schemas)})
    figures.report("structured_output", {"results": results}, options.json)


if __name__ == "__main__":
    main()
