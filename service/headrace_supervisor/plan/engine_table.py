"""The table of `headrace plan`: which engines hold a model and its users, and what the others lack.

Owns columns and words. What stands in them is `command`'s to ask for.
"""

from __future__ import annotations

from typing import Any

import rich.box
import rich.console
import rich.table

# The value of an option that stands for every kind.
ANY = "any"
# Most engines that are tried for users whose answers take too long.
MOST_REPLICAS = 64
_GIB = 1 << 30
# Of columns that are called otherwise than their fields.
_TITLES = {"kv_dtype": "KV", "replicas": "engines"}
# Columns that the table needs.
_LEAST_WIDTH = 150


def print_engines(rows: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Prints a row for each kind of engine and number of ranks, and what they lack.

    Args:
        rows: What is known of each.
        options: The command's.
    """
    has_choice = ANY in (options["quantize"], options["kv_dtype"])
    holding = [row for row in rows if row["holds"]]
    # Of many the ones that hold are what was asked for.
    shown = holding if has_choice and holding else rows
    table = rich.table.Table(box=rich.box.SIMPLE)
    kinds = ("quantize", "kv_dtype") if has_choice else ()
    ranks = ("pp", "tp") if options["pp"] > 1 else ("tp",)
    sizes = ("weights", "rotary", "steps", "cache")
    figures = (*sizes, "held", "active", "ITL ms", "answer s", "p95", "first ms p95", "tok/s")
    for title in (*(_TITLES.get(name, name) for name in (*kinds, *ranks, "replicas")), *figures):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in shown:
        table.add_row(*(str(row[name]) for name in (*kinds, *ranks, "replicas")), *_cells(row), _verdict(row))
    console = rich.console.Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(table)
    for row in shown:
        if row["refused"]:
            console.print(f"{_named(row)}: {row['refused']}", markup=False, soft_wrap=True)
        elif "enough_replicas" in row:
            console.print(_missing(row, options), markup=False, soft_wrap=True)
    if has_choice and holding:
        console.print(_best(holding), soft_wrap=True)
    elif not holding and not has_choice:
        console.print(
            "None holds; --quantize any --kv-dtype any tries weights and caches of fewer bits.", soft_wrap=True
        )
    console.print(
        "Weights, tables of rotary embeddings, a step's memory with graphs, and cache with the states of recurrent "
        "layers (of rows, and kept for prefixes): GiB of each of "
        f"{options['gpus']} {options['gpu']}, as a worker estimates them. Sequences that an engine runs at once (its "
        "cache holds them, and a step has that many rows), and that are active of its share of "
        f"{options['users']:,} users; several engines are --replicas. Times are arithmetic with rates that our steps "
        "reached on H200s: the means of a balance, and of 95 in 100 what a simulation of an engine's steps with these "
        "lengths finds.",
        soft_wrap=True,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    if row["refused"]:
        return [""] * 11
    steps = row["activation_bytes"] + row["graph_bytes"]
    cache = row["kv_cache_bytes"] + row["state_bytes"] + row["checkpoint_bytes"]
    sizes = row["weight_bytes"], row["rotary_bytes"], steps, cache
    rows, times = (row["rows_held"], row["active"]), (f"{row['itl_ms']:.2f}", f"{row['answer_s']:.1f}")
    means = [*(f"{size / _GIB:.1f}" for size in sizes), *(f"{count:,.0f}" for count in rows), *times]
    if "answer_p95_s" not in row:
        return [*means, "", "", ""]
    waits = (f"{row['answer_p95_s']:.1f}", f"{row['ttft_p95_ms']:,.0f}", f"{row['output_tokens_per_s']:,.0f}")
    return [*means, *waits]


def _missing(row: dict[str, Any], options: dict[str, Any]) -> str:
    """What an engine lacks for the times that were asked for, in seconds and in cards."""
    lacks = []
    for target, found, unit in (("target_answer_s", "answer_p95_s", "s"), ("target_ttft_ms", "ttft_p95_ms", "ms")):
        asked, waited = options[target], row.get(found)
        if asked is not None and waited is not None and waited > asked:
            what = "whole answers" if unit == "s" else "first tokens"
            lacks.append(f"95 in 100 {what} take {waited:,g} {unit}, {waited - asked:,.4g} {unit} too long")
    reason = "; ".join(lacks) or "users wait for each other"
    enough, ranks = row["enough_replicas"], row["tp"] * row["pp"]
    if enough is None:
        most = min(MOST_REPLICAS, options["users"])
        return f"{_named(row)}: {reason}; no number of such engines up to {most} keeps to it"
    return f"{_named(row)}: {reason}; {enough} such engines, {enough * ranks} GPUs, keep to it"


def _named(row: dict[str, Any]) -> str:
    kinds = (
        "" if (row["quantize"], row["kv_dtype"]) == ("off", "auto") else f", {row['quantize']}, KV {row['kv_dtype']}"
    )
    stages = "" if row["pp"] == 1 else f"pp {row['pp']}, "
    return f"{stages}tp {row['tp']}{kinds}"


def _best(holding: list[dict[str, Any]]) -> str:
    """What to take, for whom loss counts most and for whom time does.

    Rows come from the most bits to the fewest.
    """
    most_bits = [
        row for row in holding if (row["quantize"], row["kv_dtype"]) == (holding[0]["quantize"], holding[0]["kv_dtype"])
    ]
    first, quickest = (min(found, key=lambda row: float(row["answer_s"])) for found in (most_bits, holding))
    return (
        f"With the most bits {_named(first)} holds ({first['answer_s']} s an answer); the quickest is "
        f"{_named(quickest)} ({quickest['answer_s']} s). What bits cost in answers: docs/accuracy.md."
    )


def _verdict(row: dict[str, Any]) -> str:
    if row["refused"]:
        return "refused"
    return "holds" if row["holds"] else "users wait" if row["overloaded"] else "too slow"
