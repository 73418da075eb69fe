"""What JSON Schemas that others wrote cost: each file of a folder, as a request would bring it.

Owns the way of one schema through the entrance's rules, the trial in its process, compiling and the
first mask, and what is said of many. Files are read where they lie and are no part of Headrace.
"""

from __future__ import annotations

import collections
import pathlib
import time
from array import array
from collections.abc import Iterator
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher

from headrace_backend.step.masks import mask_words
from headrace_backend.structured_output.forms import grammar_of
from headrace_backend.structured_output.output_place import CompiledGrammar
from headrace_backend.structured_output.trial import LIMITS
from headrace_backend.structured_output.trial_process import TrialProcess
from headrace_backend.structured_output.vocabulary import Vocabulary
from headrace_request import limits
from headrace_request.rule_kinds import Bounds
from headrace_request.structured_output import StructuredOutput
from headrace_request.structured_rules import StructuredText

_RULE = StructuredText(limits.MAX_STRUCTURED_BYTES, limits.MAX_STRUCTURED_DEPTH)
# No rule of a form reads them.
_BOUNDS = Bounds(vocabulary_size=1, max_context_tokens=1, max_outputs=1)
_NUM_SLOWEST = 5
_NUM_REASONS = 8


def measure_files(vocabulary: Vocabulary, tokenizer: llguidance.LLTokenizer, folder: pathlib.Path) -> dict[str, Any]:
    """Sends every `*.json` below a folder the way of a request.

    Returns:
        Counts, why schemas were refused and how often, and of those that are taken CPU milliseconds
        to compile with the first mask, with the slowest files.
    """
    trial = TrialProcess(vocabulary)
    reasons: collections.Counter[str] = collections.Counter()
    taken: list[tuple[float, str]] = []
    waited_ms: list[float] = []
    for path, asked in _schemas(folder):
        began_ns = time.monotonic_ns()
        error = _refusal(asked) or trial.try_grammar(asked).error
        waited_ms.append((time.monotonic_ns() - began_ns) / 1e6)
        if error:
            reasons[_kind(error)] += 1
        else:
            taken.append((_first_mask_ms(vocabulary, tokenizer, asked), path))
    trial.close()
    times = [took_ms for took_ms, _ in taken]
    return {
        "vocabulary": vocabulary.size,
        "schemas": len(waited_ms),
        "taken": len(taken),
        "refused": reasons.most_common(_NUM_REASONS),
        **{f"compile_and_mask_p{share}_ms": float(np.percentile(times, share)) for share in (50, 90, 99, 100)},
        **{f"verdict_wall_p{share}_ms": float(np.percentile(waited_ms, share)) for share in (50, 99, 100)},
        "slowest": sorted(taken, reverse=True)[:_NUM_SLOWEST],
    }


def _schemas(folder: pathlib.Path) -> Iterator[tuple[str, StructuredOutput]]:
    for path in sorted(folder.rglob("*.json")):
        yield str(path.relative_to(folder)), StructuredOutput("json_schema", path.read_text("utf-8", "surrogateescape"))


def _refusal(asked: StructuredOutput) -> str:
    """Returns what the entrance's rules say of a schema; "": nothing."""
    broken = _RULE.broken("spec.structured_output", asked, _BOUNDS)
    return next((violation.description for violation in broken), "")


def _first_mask_ms(vocabulary: Vocabulary, tokenizer: llguidance.LLTokenizer, asked: StructuredOutput) -> float:
    """Returns CPU milliseconds of this thread, compiling included."""
    words, end_ids = np.empty(mask_words(vocabulary.size), np.int32), frozenset(vocabulary.end_ids)
    began_ns = time.thread_time_ns()
    matcher = LLMatcher(tokenizer, grammar_of(asked), log_level=0, limits=LIMITS)
    CompiledGrammar(matcher, vocabulary.end_ids).new_output().fill_mask(words, 0, array("i"), end_ids, 0)
    return (time.thread_time_ns() - began_ns) / 1e6


def _kind(error: str) -> str:
    """Returns the sentence without what is the schema's own: names, numbers, paths."""
    return " ".join(word for word in error.split() if word.isalpha())[:60]
