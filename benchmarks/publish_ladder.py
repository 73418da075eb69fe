"""The ladder's table in README.md and docs/figures.md, and its picture, of one result file.

Owns the words around the figures; every number is in the JSON of `bench_ladder`. The tables replace
what stands between `<!-- figures: ladder -->` and `<!-- /figures -->`.

    python -m benchmarks.publish_ladder benchmarks/results/2026-11-24-h200-ladder.json
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from benchmarks.placed_text import placed
from benchmarks.plots import DOTS_PER_INCH, ladder

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PICTURE = "docs/images/h200-ladder.png"
_MEANINGS = {
    "recompute": "plain PyTorch, every token computes its whole context again, one request at a time",
    "kv_cache": "a KV cache, one request at a time",
    "static": "static batches of {rows} rows",
    "in_flight": "in-flight batching, {rows} rows in a contiguous cache",
    "paged": "our engine: paged blocks, chunked prompts, fused kernels; {rows} rows",
    "graphs": "the same with CUDA graphs",
    "full": "the default rows, {max_num_seqs}",
}

Record = dict[str, Any]


def table(record: Record) -> str:
    """The rungs as a table of Markdown, under a sentence about model, machine and trace."""
    machine = record["gpu"] or record["cpu"]
    intro = (
        f"Where the speed comes from, rung by rung: {record['shape']} in {record['dtype']} with dummy weights on one "
        f"{machine}, {record['date'][:10]}, commit {record['git']}; the lengths of mix1000, divided by "
        f"{record['shorter']}."
    )
    rows = [_row(rung, record) for rung in record["rungs"]]
    head = "| rung | output tok/s | gain | in all | one at a time, tok/s | MFU |\n|---|---|---|---|---|---|"
    return f"{_wrapped(intro)}\n\n{head}\n" + "\n".join(rows) + "\n"


def _row(rung: Record, record: Record) -> str:
    meaning = _MEANINGS.get(rung["rung"], f"{rung['rung']}, beside full")
    if rung["rung"] == "speculation":
        share = f"{rung['acceptance']:.0%}"
        meaning = f"speculation on {rung['on']}, {share} of drafts right: {rung['single_gain']:g} times"
    cells = [
        meaning.format(**record),
        _number(rung.get("output_tok_s")),
        _number(rung.get("gain"), " x"),
        _number(rung.get("total_gain"), " x"),
        _number(rung.get("single_tok_s")),
        f"{rung['mfu']:.1%}" if "mfu" in rung else "",
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"


def details(record: Record) -> str:
    """What stands beside the rungs: a token by context, one layer's attention, and unused cache."""
    waste = record["kv_waste"]
    sentences = [
        "Cache slots allocated but unused, as the engine plans the same kind of trace: blocks "
        f"{waste['waste_paged']:.1%}, a contiguous prompt and max_tokens "
        f"{waste['waste_contiguous_prompt_and_max_tokens']:.1%}, a contiguous context of 4,096 "
        f"{waste['waste_contiguous_whole_context']:.1%}."
    ]
    if record.get("contexts"):
        gains = ", ".join(f"{each['context']:,}: {each['gain']:.3g}" for each in record["contexts"])
        sentences.append(f"One token without a cache takes so many times one with it, by tokens of context: {gains}.")
    sentences += [
        f"Attention of one layer over {each['tokens']:,} tokens: {each['materialized_ms']:.3g} ms and "
        f"{each['materialized_mib']:,.0f} MiB with its scores in memory, {each['fused_ms']:.3g} ms and "
        f"{each['fused_mib']:,.0f} MiB fused."
        for each in record.get("attention", ())
    ]
    return _wrapped(" ".join(sentences)) + "\n"


def _wrapped(text: str) -> str:
    """The text in lines of at most 100 columns."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= 100:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)


def main() -> int:
    """Command line; 1 if the record lacks a rung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path, help="what bench_ladder wrote")
    parser.add_argument("--root", type=pathlib.Path, default=_ROOT, help="of the repository that is written to")
    options = parser.parse_args()
    record = json.loads(options.file.read_text())
    if not record["rungs"] or "error" in record:
        print(f"{options.file}: not whole: {record.get('error', 'no rungs')}", file=sys.stderr)
        return 1
    picture = options.root / _PICTURE
    ladder(record).savefig(picture, dpi=DOTS_PER_INCH)
    shown = "![The ladder: tokens per second by rung]({})\n".format
    texts = {
        "README.md": f"{table(record)}\n{shown(_PICTURE)}",
        "docs/figures.md": f"{table(record)}\n{details(record)}\n{shown(_PICTURE.removeprefix('docs/'))}",
    }
    for name, text in texts.items():
        page = options.root / name
        page.write_text(placed(page.read_text(), "ladder", text))
        print(page)
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
