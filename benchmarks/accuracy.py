"""What quantizing costs in answers, on the same generated questions and the same held-out text; writes a table of docs/accuracy.md.

    --of weights (the default)  the demo model unquantized, in every scheme of --quantize and in folders of `headrace quantize`
    --of cache                  over every --kv-dtype, weights unquantized

python -m benchmarks.accuracy --questions 5120 --documents 300 --threads 1 --json FILE --table docs/accuracy.md
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import uvloop

from benchmarks.accuracy_divergence import Divergence, diverge, load
from benchmarks.accuracy_folders import written_folders
from benchmarks.accuracy_tasks import DEMO, documents, questions, right_answers
from benchmarks.figures import provenance, write_json
from headrace_backend.kv_bytes import kv_token_bytes
from headrace_backend.quantization.self_check import QuantizationSummary
from headrace_backend.weights.scheme import Scheme
from headrace_model_folder import ModelFolder

# EngineConfig's quantize and quantize_group. The demo model's MLP has 704 inputs, which groups of 128 do not divide.
SCHEMES = (("off", 128), ("int8", 128), ("fp8", 128), ("int4", 32), ("int4", 64))
KV_DTYPES = ("auto", "int8", "fp8")
# What the tables of the document begin with, by what is measured.
_BEGIN = {name: f"<!-- table: benchmarks.accuracy{more} -->\n" for name, more in (("weights", ""), ("cache", " cache"))}
_END = "<!-- end of table -->\n"
# Two-sided 95%.
_DEVIATIONS = 1.96


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One scheme. Accuracy in percent, differences in points of it."""

    scheme: str
    bits_per_weight: float
    # Of tensors, see GetModel. None where the original was not at hand.
    mean_relative_error: float | None
    questions: int
    accuracy: float
    # Of a token in the KV cache, all layers.
    kv_bytes_per_token: int
    # Against the unquantized model, question by question, with half the width of the 95% interval.
    difference: float
    interval: float
    divergence: Divergence


def paired_difference(right: Sequence[bool], before: Sequence[bool]) -> tuple[float, float]:
    """Mean difference in points, and half the width of its 95% interval, from question by question."""
    differences = [100.0 * (now - then) for now, then in zip(right, before, strict=True)]
    mean = sum(differences) / len(differences)
    variance = sum((value - mean) ** 2 for value in differences) / (len(differences) - 1)
    return mean, _DEVIATIONS * math.sqrt(variance / len(differences))


class Case(NamedTuple):
    """What is asked."""

    name: str
    folder: pathlib.Path
    quantize: str = "off"
    group: int = 128
    kv_dtype: str = "auto"


def variants(what: str) -> list[Case]:
    """The demo model's rows of a table, the plain one first: every type of cache, or every scheme."""
    if what == "cache":
        return [Case(kv_dtype, DEMO, kv_dtype=kv_dtype) for kv_dtype in KV_DTYPES]
    names = [f"int4, groups of {group}" if quantize == "int4" else quantize for quantize, group in SCHEMES]
    return [Case(name, DEMO, *scheme) for name, scheme in zip(names, SCHEMES, strict=True)]


def cases(what: str, root: pathlib.Path, threads: int) -> Iterator[Case]:
    """All rows of a table; folders are made in `root` when it is their turn."""
    yield from variants(what)
    if what == "weights":
        for name, folder in written_folders(root, threads):
            yield Case(name, folder)


def measure(what: str, num_questions: int, num_documents: int, threads: int) -> list[Result]:
    """Every case, one after the other."""
    with tempfile.TemporaryDirectory() as root:
        return _measure(cases(what, pathlib.Path(root), threads), what, num_questions, num_documents, threads)


def _measure(
    all_cases: Iterator[Case], what: str, num_questions: int, num_documents: int, threads: int
) -> list[Result]:
    torch.set_num_threads(threads)
    asked, texts, plain = questions(num_questions), documents(num_documents), load(DEMO, None)
    results: list[Result] = []
    before: list[bool] = []
    for case in all_cases:
        began = time.monotonic()
        model = load(case.folder, Scheme.named(case.quantize, case.group))
        right = uvloop.run(right_answers(_settings(case, threads), asked))
        before = before or right
        summary = model.quantization
        results.append(
            Result(
                case.name,
                summary.bits_per_weight if summary else 8.0 * model.lm_head.weight.itemsize,
                summary.mean_relative_error if isinstance(summary, QuantizationSummary) else None,
                len(asked),
                100.0 * sum(right) / len(right),
                kv_token_bytes(ModelFolder.open(DEMO).config, model.lm_head.weight.itemsize, case.kv_dtype),
                *paired_difference(right, before),
                diverge(model, plain, texts, case.kv_dtype),
            )
        )
        print(f"{row(results[-1], what)} {time.monotonic() - began:.0f} s", flush=True)
    return results


def _settings(case: Case, threads: int) -> dict[str, Any]:
    return {
        "model": str(case.folder),
        "device": "cpu",
        "quantize": case.quantize,
        "quantize_group": case.group,
        "kv_dtype": case.kv_dtype,
        "worker_threads": threads,
        "max_num_seqs": 256,
        "max_waiting_requests": 1 << 16,
        "kv_memory": 1 << 30,
    }


def row(result: Result, what: str) -> str:
    """A line of the table."""
    text, error = result.divergence, result.mean_relative_error
    change = f"{result.difference:+.2f} ± {result.interval:.2f}"
    size = f"{result.bits_per_weight:.2f} | {'-' if error is None else f'{error:.2%}'}"
    if what == "cache":
        size = f"{result.kv_bytes_per_token:,}"
    return (
        f"| {result.scheme} | {size} | {result.accuracy:.2f}% | {'-' if result.scheme in ('off', 'auto') else change} "
        f"| {text.perplexity:.4f} | {text.kl:.5f} | {text.same_choice:.2%} |"
    )


def table(results: Sequence[Result], about: str, what: str) -> str:
    """The table as docs/accuracy.md has it."""
    size = "KV cache | bytes a token" if what == "cache" else "scheme | bits a weight | weights off by"
    head = f"| {size} | right | difference, points | perplexity | divergence, nats | same choice |"
    lines = [head, "|---" * (head.count("|") - 1) + "|", *(row(result, what) for result in results)]
    return "\n".join([about, "", *lines, ""])


def replace_table(path: pathlib.Path, text: str, what: str) -> None:
    """Puts the table between its marks in a document."""
    begin = _BEGIN[what]
    before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
    if not mark or _END not in rest:
        raise ValueError(f"{path} has no place for the table: {begin.strip()} ... {_END.strip()}")
    path.write_text(f"{before}{begin}\n{text}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=tuple(_BEGIN), default="weights", help="what is quantized")
    parser.add_argument("--questions", type=int, default=5120, help="about so many, half in unseen phrasings")
    parser.add_argument("--documents", type=int, default=300, help="held-out texts for perplexity and divergence")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--git", default="", help="the commit, where the tree has no history")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, help="document whose table is replaced")
    options = parser.parse_args()
    results = measure(options.of, options.questions, options.documents, options.threads)
    about = provenance(options.git)
    write_json(
        {"name": "accuracy", "of": options.of, **about, "results": [dataclasses.asdict(result) for result in results]},
        options.json,
    )
    if options.table:
        first = results[0]
        head = f"{first.questions:,} questions, {first.divergence.tokens:,} tokens of text; {str(about['date'])[:10]}, commit {about['git']}."
        replace_table(options.table, table(results, head, options.of), options.of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
