"""`headrace requests | models | load`: what the server has and does.

Owns these three commands and their tables. Answers of the sync client come in; tables, or JSON
lines with --json, go to stdout.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from itertools import islice

import click
from rich import box
from rich.console import Console
from rich.table import Table

from headrace.answers import Load, MeasuredLoss, MemoryPlan, Model, Quantization, RequestState, RequestSummary
from headrace.cli.help import SectionedCommand
from headrace.cli.options import Connection, server_options
from headrace.cli.output import echo_json


@click.command(cls=SectionedCommand)
@click.option(
    "--state",
    type=click.Choice([state.value for state in RequestState]),
    help="Only requests in this state. Default: all.",
)
@click.option("--model", help="Only requests of this model. Default: of all models.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Most rows, newest first.")
@server_options
def requests(connection: Connection, state: str | None, model: str | None, limit: int) -> None:
    """List one's own generations: waiting, running, and ended ones whose log is still kept."""
    with connection.client() as client:
        rows = list(islice(client.list_requests(state=state, model=model, page_size=min(limit, 1000)), limit))
    if connection.as_json:
        for row in rows:
            echo_json(row)
    else:
        show(_request_table(rows))


@click.command(cls=SectionedCommand)
@server_options
def models(connection: Connection) -> None:
    """List the models of the server and what they allow."""
    with connection.client() as client:
        rows = client.list_models()
    if connection.as_json:
        for row in rows:
            echo_json(row)
    else:
        show(_model_table(rows))


@click.command(cls=SectionedCommand)
@click.option("--model", help="Name of the model. Default: the server's.")
@server_options
def load(connection: Connection, model: str | None) -> None:
    """Show how busy the server is."""
    with connection.client() as client:
        answer = client.load(model)
    if connection.as_json:
        echo_json(answer)
    else:
        show(_load_table(answer))


def _request_table(rows: list[RequestSummary]) -> Table:
    """One row a request, narrow enough for 80 columns.

    Ids are whole however narrow a terminal is: they are there to be copied.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("request", no_wrap=True, min_width=max((len(row.request_id) for row in rows), default=0))
    for column in ("state", "age", "prompt", "output"):
        table.add_column(column, no_wrap=True, justify="left" if column == "state" else "right")
    # Several sequences may have ended in several ways, which go on below each other.
    words = [word for row in rows for word in _endings(row).split()]
    table.add_column("ended", min_width=max(map(len, words), default=0))
    table.add_column("made by", min_width=len("stream"))
    now = datetime.datetime.now(datetime.UTC)
    for row in rows:
        table.add_row(
            row.request_id,
            row.state or "?",
            _age((now - row.create_time).total_seconds()),
            str(row.prompt_tokens),
            str(row.output_tokens),
            _endings(row),
            "submit" if row.detached else "stream",
        )
    return table


def _endings(row: RequestSummary) -> str:
    return ", ".join(sorted(set(row.finish_reasons)))


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _model_table(rows: tuple[Model, ...]) -> Table:
    """One column a model."""
    table = Table(box=box.SIMPLE, show_header=False)
    for label, value in _MODEL_ROWS:
        table.add_row(label, *(value(row) for row in rows))
    if any(row.engines_left_out for row in rows):
        table.add_row("engines left out", *("\n".join(row.engines_left_out) for row in rows))
    return table


_MODEL_ROWS: tuple[tuple[str, Callable[[Model], str]], ...] = (
    ("model", lambda row: row.name),
    ("revision", lambda row: row.revision),
    ("architecture", lambda row: row.architecture),
    ("parameters", lambda row: f"{row.parameter_count / 1e6:,.1f} M"),
    ("computed in", lambda row: f"{row.dtype} on {row.device}"),
    ("quantized", lambda row: quantization_line(row.quantization) if row.quantization else "-"),
    ("vocabulary", lambda row: f"{row.vocabulary_size:,}"),
    ("context", lambda row: f"{row.max_context_tokens:,} tokens"),
    ("outputs at most", lambda row: str(row.max_outputs)),
    ("chat template", lambda row: "yes" if row.has_chat_template else "no"),
    ("default sampling", lambda row: ", ".join(f"{k} {v:g}" for k, v in row.default_sampling.items()) or "-"),
    ("not followed", lambda row: "\n".join(row.not_followed) or "-"),
    ("KV cache", lambda row: f"{row.kv_blocks:,} blocks of {row.kv_block_tokens} tokens{kv_bytes_text(row)}"),
    ("memory", lambda row: memory_line(row.memory_plan) if row.memory_plan else "-"),
)


def kv_bytes_text(row: Model) -> str:
    """Returns the KV cache's dtype and what a token takes on each rank's device.

    It is empty where the server does not report them.
    """
    return (
        f", {row.kv_dtype}, {row.kv_bytes_per_token:,} bytes a token on each device" if row.kv_bytes_per_token else ""
    )


def quantization_line(report: Quantization) -> str:
    """Returns how a model's weights are quantized, in one line.

    The line has scheme, bits and distance from the folder's weights, for the layers and for an
    output layer that has its own; how activations are rounded; and what the folder says that it
    cost.
    """
    head = (
        f"{report.head_scheme}, {report.head_bits_per_weight:.2f} bits a weight of the output layer, off by "
        f"{report.head_relative_error:.2%}"
        if report.head_scheme
        else ""
    )
    measured = _measured_line(report.measured) if report.measured else ""
    activations = f"activations {report.activations}" if report.activations else ""
    return "; ".join(filter(None, (_layers_line(report) if report.scheme else "", head, activations, measured)))


def _layers_line(report: Quantization) -> str:
    groups = f" in groups of {report.group_size}" if report.group_size else ""
    line = f"{report.scheme}{groups}, {report.bits_per_weight:.2f} bits a weight of the layers"
    if not report.worst_tensor:
        # Another tool's numbers: what they were made of is not known.
        return line
    return (
        f"{line}; weights off by {report.mean_relative_error:.2%} on average,"
        f" by {report.worst_relative_error:.2%} in {report.worst_tensor}"
    )


def _measured_line(measured: MeasuredLoss) -> str:
    interval = "" if measured.divergence_interval is None else f" ± {measured.divergence_interval:.5f}"
    return (
        f"by the folder's report of {measured.method}, on {measured.tokens:,} tokens of text: perplexity "
        f"{measured.perplexity_before:.4f} before,"
        f" {measured.perplexity_after:.4f} after, divergence {measured.divergence:.5f}{interval} nats"
    )


def memory_line(plan: MemoryPlan) -> str:
    """What the device's memory holds, largest room first."""
    parts = (
        ("KV cache", plan.kv_cache_bytes),
        ("weights", plan.weight_bytes),
        ("activations", plan.activation_bytes),
        ("graphs", plan.graph_bytes),
        ("other", plan.other_bytes),
        ("reserve", plan.reserve_bytes),
    )
    held = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sorted(parts, key=lambda p: -p[1]) if size)
    return f"{held} of {plan.total_bytes / 2**30:.2f} GiB, {'measured' if plan.measured else 'estimated'}"


def _load_table(load: Load) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_row("model", load.model)
    table.add_row(
        "serving", ("yes" if load.serving else "no") + (", drained: no new generations" if load.draining else "")
    )
    table.add_row("running sequences", f"{load.running_sequences:,} of at most {load.max_running_sequences:,}")
    table.add_row("waiting requests", f"{load.waiting_requests:,} of at most {load.max_waiting_requests:,}")
    table.add_row("waiting prompt tokens", f"{load.waiting_tokens:,}")
    table.add_row("KV cache in use", f"{load.kv_cache_usage:.1%} of {load.kv_blocks:,} blocks")
    table.add_row("prefix cache hits", f"{load.prefix_cache_hit_rate:.1%} of prompt tokens")
    table.add_row("output tokens/s (last 10 s)", f"{load.output_tokens_per_second:,.1f}")
    table.add_row("expected wait", f"{load.expected_wait_ns / 1e6:,.1f} ms")
    table.add_row("calls open (this service)", f"{load.open_calls:,} of at most {load.max_open_calls:,}")
    return table


def show(table: Table) -> None:
    """Prints a table on stdout."""
    TableConsole().print(table)


class TableConsole(Console):
    """A console whose broken pipe ends the command as that of any other output does."""

    def on_broken_pipe(self) -> None:
        """Lets the BrokenPipeError pass that is being handled."""
        raise
