"""What quantizing costs in answers, on generated questions and held-out text.

It writes a table of docs/accuracy.md.

    --of weights (the default)  the demo model unquantized, in every scheme of --quantize and
    --quantize-head, and in folders of `headrace quantize`
    --of cache                  over every --kv-dtype, weights unquantized

Each row is kept in a folder as soon as it is measured; where code and model are the same, it is not
measured again. `--only` measures some rows (and the plain one, which all are compared with) and
leaves the document alone.

python -m benchmarks.accuracy --questions 5120 --documents 300 --threads 1 --json FILE --table
docs/accuracy.md python -m benchmarks.accuracy --only nf4 --only "output layer int8"
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import uvloop

from benchmarks.accuracy_divergence import Divergence, diverge, load
from benchmarks.accuracy_folders import WRITTEN, Written, write_folder
from benchmarks.accuracy_rows import Row, Rows
from benchmarks.accuracy_tasks import DEMO, documents, questions, right_answers
from benchmarks.figures import ROOT, provenance, write_json
from headrace_backend.kv_bytes import kv_token_bytes
from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.quantization.summaries import QuantizationSummary
from headrace_backend.weights.scheme import Schemes
from headrace_model_folder import ModelFolder

# EngineConfig's quantize, quantize_group, quantize_head and quantize_activations. The demo model's
# MLP has 704 inputs, which groups of 128 do not divide.
SCHEMES = {
    "off": ("off", 128, "off", "auto"),
    "int8": ("int8", 128, "off", "auto"),
    "fp8": ("fp8", 128, "off", "auto"),
    "int4, groups of 32": ("int4", 32, "off", "auto"),
    "int4, groups of 64": ("int4", 64, "off", "auto"),
    "int4, groups of 64, activations fp8": ("int4", 64, "off", "fp8"),
    "nf4": ("nf4", 128, "off", "auto"),
    "output layer int8": ("off", 128, "int8", "auto"),
    "output layer fp8": ("off", 128, "fp8", "auto"),
    "int4, groups of 64, output layer int8": ("int4", 64, "int8", "auto"),
}
KV_DTYPES = ("auto", "int8", "fp8")
# What the tables of the document begin with, by what is measured.
_BEGIN = {name: f"<!-- table: benchmarks.accuracy{more} -->\n" for name, more in (("weights", ""), ("cache", " cache"))}
_END = "<!-- end of table -->\n"
# Two-sided 95%.
_DEVIATIONS = 1.96


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One row of a table. Accuracy in percent, differences in points of it."""

    scheme: str
    bits_per_weight: float
    # See `Row`.
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
    """Mean difference in points, question by question, and half the width of its 95% interval."""
    differences = [100.0 * (now - then) for now, then in zip(right, before, strict=True)]
    mean = sum(differences) / len(differences)
    variance = sum((value - mean) ** 2 for value in differences) / (len(differences) - 1)
    return mean, _DEVIATIONS * math.sqrt(variance / len(differences))


class Case(NamedTuple):
    """What is asked: the demo model, or a folder that is made of it."""

    name: str
    quantize: str = "off"
    group: int = 128
    head: str = "off"
    activations: str = "auto"
    kv_dtype: str = "auto"
    written: Written | None = None

    @property
    def schemes(self) -> Schemes:
        """What weights are rounded to as they are read."""
        return Schemes.named(self.quantize, self.group, self.head, self.activations)

    def key(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        options = list(self.written.options) if self.written else None
        return self._asdict() | {"written": options}

    def folder(self, root: pathlib.Path, threads: int) -> pathlib.Path:
        """The model's folder, made inside `root` if it is another than the demo model's."""
        return DEMO if self.written is None else write_folder(self.written, root, threads)


def cases(what: str) -> list[Case]:
    """The rows of a table, the plain one first: every type of cache, or every scheme and folder."""
    if what == "cache":
        return [Case(kv_dtype, kv_dtype=kv_dtype) for kv_dtype in KV_DTYPES]
    return [
        *(Case(name, *scheme) for name, scheme in SCHEMES.items()),
        *(Case(written.name, written=written) for written in WRITTEN),
    ]


def chosen(what: str, only: Sequence[str]) -> list[Case]:
    """The plain case and those of these names; all if there are none.

    Raises:
        ValueError: There is no case of a name; says which there are.
    """
    plain, *others = cases(what)
    names = [plain.name, *(case.name for case in others)]
    for name in only:
        if name not in names:
            raise ValueError(f"there is no row {name!r}, only {'; '.join(names)}")
    return [plain, *(case for case in others if not only or case.name in only)]


class Measurement:
    """Questions and texts, and how cases are measured with them."""

    def __init__(self, num_questions: int, num_documents: int, threads: int, git: str = "") -> None:
        """`git`: the commit, where the tree has no history."""
        torch.set_num_threads(threads)
        self._threads, self._git = threads, git
        self._asked, self._texts = questions(num_questions), documents(num_documents)
        self._plain = load(DEMO, None)

    def row(self, case: Case) -> Row:
        """Measures one case."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as root:
            folder = case.folder(pathlib.Path(root), self._threads)
            model = load(folder, *case.schemes)
            right = uvloop.run(right_answers(_settings(case, folder, self._threads), self._asked))
        divergence = diverge(model, self._plain, self._texts, case.kv_dtype)
        return Row(
            case.name,
            _bits_per_weight(model),
            _mean_error(model),
            kv_token_bytes(ModelFolder.open(DEMO).config.description, model.dtype.itemsize, case.kv_dtype),
            right,
            divergence,
            round(time.monotonic() - began, 1),
            provenance(self._git) | {"threads": self._threads},
        )


def _bits_per_weight(model: CausalLM) -> float:
    """In memory, of what was quantized; of a plain model all."""
    low_bits = [*model.low_bit_weights.values(), *filter(None, [model.head_weight])]
    blocks = model.block_weights.values()
    num_weights = sum(w.num_weights for w in low_bits) + sum(w.num_block_weights for w in blocks)
    num_bytes = sum(w.num_bytes for w in low_bits) + sum(w.num_bytes for w in blocks)
    return 8 * num_bytes / num_weights if num_weights else 8.0 * model.dtype.itemsize


def _mean_error(model: CausalLM) -> float | None:
    """Mean relative error of the layers' tensors, or of the output layer's if it alone was rounded.

    0: nothing was; None: what the folder was made of is not at hand.
    """
    if model.quantization is not None:
        return model.quantization.mean_relative_error if isinstance(model.quantization, QuantizationSummary) else None
    return model.head_quantization.mean_relative_error if model.head_quantization else 0.0


def measured_rows(wanted: Iterable[Case], rows: Rows, measurement: Callable[[], Measurement]) -> Iterator[Row]:
    """The rows of these cases, those that were measured before as they are."""
    for case in wanted:
        row = rows.find(case.key())
        if row is None:
            row = measurement().row(case)
            rows.keep(case.key(), row)
        yield row


def result_of(row: Row, plain: Row) -> Result:
    """A row beside the plain one."""
    return Result(
        row.name,
        row.bits_per_weight,
        row.mean_relative_error,
        len(row.right),
        100.0 * sum(row.right) / len(row.right),
        row.kv_bytes_per_token,
        *paired_difference(row.right, plain.right),
        row.divergence,
    )


def _settings(case: Case, folder: pathlib.Path, threads: int) -> dict[str, Any]:
    return {
        "model": str(folder),
        "device": "cpu",
        "quantize": case.quantize,
        "quantize_group": case.group,
        "quantize_head": case.head,
        "quantize_activations": case.activations,
        "kv_dtype": case.kv_dtype,
        "worker_threads": threads,
        # Weights of few bits are restored anew in each step: the more rows, the fewer steps.
        "max_num_seqs": 1024,
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


def heading(rows: Sequence[Row]) -> str:
    """What is said of a table: how much, when, at which commits, on what."""
    about = [row.about for row in rows]
    dates, commits, machines = (
        ", ".join(dict.fromkeys(words)) for words in (
            (str(one["date"])[:10] for one in about),
            (str(one["git"]) for one in about),
            (f"{one['cpu']}, {one['threads']} of {one['cores']} cores" for one in about),
        )
    )  # fmt: skip
    first = rows[0]
    return (
        f"{len(first.right):,} questions, {first.divergence.tokens:,} tokens of text; {dates}, commit {commits}, on "
        f"{machines}."
    )


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
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="measure this row; may be repeated")
    parser.add_argument(
        "--rows", type=pathlib.Path, default=ROOT / "build" / "accuracy", help="folder of measured rows"
    )
    options = parser.parse_args()
    if options.only and options.table:
        parser.error("--table takes all rows, not --only some")
    try:
        wanted = chosen(options.of, options.only)
    except ValueError as error:
        parser.error(str(error))
    sizes = (options.questions, options.documents)
    measurement = functools.cache(lambda: Measurement(*sizes, options.threads, options.git))
    found: list[Row] = []
    results: list[Result] = []
    for measured in measured_rows(wanted, Rows(options.rows, options.of, *sizes), measurement):
        found.append(measured)
        results.append(result_of(measured, found[0]))
        print(f"{row(results[-1], options.of)} {measured.seconds:.0f} s", flush=True)
    write_json(
        {
            "name": "accuracy",
            "of": options.of,
            **provenance(options.git),
            "results": [dataclasses.asdict(result) for result in results],
            "measured": {each.name: each.about for each in found},
        },
        options.json,
    )
    if options.table:
        replace_table(options.table, table(results, heading(found), options.of), options.of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
