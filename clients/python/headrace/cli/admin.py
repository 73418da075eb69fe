"""`headrace admin ...`: what an operator does to a running server.

Owns these commands and their tables. The command line comes in, calls of AdminClient go out;
tables, or JSON lines with --json, go to stdout.
"""

from __future__ import annotations

import re
from typing import Any

import click
from rich import box
from rich.table import Table

from headrace.admin_calls import Draining, RepositoryModel
from headrace.cli.help import SectionedGroup
from headrace.cli.listing import memory_line, show
from headrace.cli.options import Connection, server_options
from headrace.cli.output import echo_json, warn
from headrace.spec import TraceDetailName

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]iB|)", re.IGNORECASE)


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, or of KiB, MiB, GiB or TiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes of a string such as "12GiB"."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            self.fail(f"{value!r} is not a size such as 12GiB or 500MiB, or a number of bytes", param, ctx)
        size = round(float(match[1]) * _UNITS[match[2].upper()])
        if size == 0:
            self.fail(f"{value!r} is no room for a model", param, ctx)
        return size


@click.group(cls=SectionedGroup)
def admin() -> None:
    """Models, drain and memory of a running server; needs a key with the permission "admin"."""


@admin.command()
@click.argument("model")
@click.option(
    "--memory", type=Size(), help="Device memory it may take in all, such as 12GiB. Default: the server's settings."
)
@server_options
def load(connection: Connection, model: str, memory: int | None) -> None:
    """Start the model MODEL of the repository and wait until it serves."""
    with connection.admin() as client:
        loaded = client.load_model(model, memory_bytes=memory)
    if connection.as_json:
        echo_json(loaded)
    else:
        click.echo(f"{loaded.model.name} {'served already' if loaded.existing else 'serves'}")


@admin.command()
@click.argument("model")
@click.option(
    "--grace", type=float, help="Seconds that open generations may go on. Default: the server's shutdown grace."
)
@server_options
def unload(connection: Connection, model: str, grace: float | None) -> None:
    """Take the model MODEL away and wait until its memory is free."""
    with connection.admin() as client:
        client.unload_model(model, grace=grace)
    if connection.as_json:
        echo_json({"model": model, "unloaded": True})
    else:
        click.echo(f"{model} unloaded")


@admin.command()
@server_options
def models(connection: Connection) -> None:
    """List the models of the repository and those served, with their states."""
    with connection.admin() as client:
        rows = client.list_repository()
    if connection.as_json:
        for row in rows:
            echo_json(row)
    else:
        show(_repository_table(rows))


@admin.command()
@server_options
def drain(connection: Connection) -> None:
    """Take no new generations on any model; what runs goes on."""
    with connection.admin() as client:
        _show_draining(connection, client.drain())


@admin.command()
@server_options
def resume(connection: Connection) -> None:
    """Take new generations again."""
    with connection.admin() as client:
        _show_draining(connection, client.resume())


@admin.command()
@click.option("--model", help="Name of the model. Default: the server's.")
@server_options
def memory(connection: Connection, model: str | None) -> None:
    """Show how a model's memory is divided."""
    with connection.admin() as client:
        plan = client.memory_plan(model)
    if connection.as_json:
        echo_json(plan)
    elif plan is None:
        warn("the model loads: there is no plan yet")
    else:
        click.echo(memory_line(plan))


@admin.command("trace-detail")
@click.argument("detail", type=click.Choice(["off", "array", "span"]))
@server_options
def trace_detail(connection: Connection, detail: TraceDetailName) -> None:
    """Trace so much of each token from now on: nothing, arrays, or a span each."""
    with connection.admin() as client:
        client.set_trace_detail(detail)
    if connection.as_json:
        echo_json({"trace_detail": detail})
    else:
        click.echo(f"tokens are traced as: {detail}")


def _show_draining(connection: Connection, draining: Draining) -> None:
    if connection.as_json:
        echo_json(draining)
    else:
        click.echo(f"{draining.running_sequences:,} sequences run, {draining.waiting_requests:,} requests wait")


def _repository_table(rows: tuple[RepositoryModel, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("model", "state", "memory", "why"):
        table.add_column(column, justify="right" if column == "memory" else "left")
    for row in rows:
        memory = f"{row.memory_bytes / 2**30:.2f} GiB" if row.memory_bytes else "-"
        table.add_row(row.name, row.state, memory, row.reason)
    return table
