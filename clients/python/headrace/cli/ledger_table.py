"""The latency figures and the ledger of one generation, as a table on stderr.

Owns this rendering, which generate, subscribe, chat and demo share. Does not measure
(headrace/timing.py). The reader's own timing and the server's ledger come in, a rich table goes
out.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.events import Ledger, Usage
from headrace.timing import StreamTimer

BAR_WIDTH = 24
_PARTS = (
    ("queued", "queued_ns"),
    ("prefill", "prefill_ns"),
    ("decode", "decode_ns"),
    ("preempted", "preempted_ns"),
    ("engine restart", "engine_restart_ns"),
    ("detokenize and send", "detokenize_and_send_ns"),
    ("blocked on reader", "blocked_on_reader_ns"),
)


def print_ledger(timer: StreamTimer, usage: Usage, ledger: Ledger, console: Console | None = None) -> None:
    """Prints the figures seen by the reader and the server's ledger, by default on stderr."""
    console = console or Console(stderr=True)
    console.print(latency_table(timer, usage))
    console.print(ledger_table(ledger))


def latency_table(timer: StreamTimer, usage: Usage) -> Table:
    """Returns TTFT, inter-token latency and rate as this program saw them.

    The tokens are those that the server counted.
    """
    table = Table(title="as the reader saw it", box=box.SIMPLE, show_header=False, title_justify="left")
    table.add_column(min_width=20)
    table.add_column(justify="right")
    table.add_row("TTFT", _milliseconds(timer.ttft))
    table.add_row("ITL p50", _milliseconds(timer.itl(0.5)))
    table.add_row("ITL p90", _milliseconds(timer.itl(0.9)))
    table.add_row("ITL p99", _milliseconds(timer.itl(0.99)))
    rate = timer.tokens_per_second
    table.add_row("output tokens/s", "-" if rate is None else f"{rate:,.1f}")
    table.add_row("prompt tokens", f"{usage.prompt_tokens:,} ({usage.cached_tokens:,} cached)")
    table.add_row("output tokens", f"{usage.output_tokens:,}")
    return table


def ledger_table(ledger: Ledger) -> Table:
    """The parts of the end-to-end time with their shares, and the counters."""
    table = Table(title="where the time went (server)", box=box.SIMPLE, show_header=False, title_justify="left")
    table.add_column(min_width=20)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for label, name in _PARTS:
        nanoseconds = getattr(ledger, name)
        share = nanoseconds / ledger.end_to_end_ns if ledger.end_to_end_ns else 0.0
        table.add_row(label, _milliseconds(nanoseconds / 1e9), f"{share:.1%}", "█" * round(share * BAR_WIDTH))
    table.add_section()
    table.add_row("end to end", _milliseconds(ledger.end_to_end_ns / 1e9), "", "")
    table.add_row("first token computed", _milliseconds(ledger.ttft_ns / 1e9), "", "")
    table.add_row("steps", f"{ledger.step_count:,}", "", f"{ledger.preemptions:,} preemptions")
    if ledger.draft_tokens:
        table.add_row("draft tokens", f"{ledger.draft_tokens:,}", "", f"{ledger.accepted_tokens:,} accepted")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f} ms"
