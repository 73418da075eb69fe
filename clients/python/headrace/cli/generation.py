"""`headrace generate | submit | subscribe | cancel`: one generation, attached or detached.

Owns these four commands. Options are shared (options.py), printing too (output.py,
ledger_table.py). The command line comes in, calls of the sync client go out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import click

from headrace.cli.help import SectionedCommand
from headrace.cli.ledger_table import print_ledger
from headrace.cli.options import (
    Connection,
    Seconds,
    TokenIdList,
    generation_options,
    prompt_text,
    server_options,
    trace_option,
)
from headrace.cli.output import echo_json, ids_of, show_json, show_text
from headrace.cli.trace_hint import TraceHint
from headrace.connections.channel import RetryPolicy
from headrace.events import Event, Reconnecting
from headrace.spec import GenerationOptions
from headrace.streams.stream import Stream
from headrace.timing import StreamTimer
from headrace.trace_context import new_traceparent


@click.command(cls=SectionedCommand)
@click.argument("prompt", required=False)
@click.option("--token-ids", type=TokenIdList(), help="The prompt as token ids, used as they are.")
@generation_options
@click.option("--timeout", type=Seconds(), help="Seconds for the whole call. Default: no limit.")
@click.option("--ledger", is_flag=True, help="Afterwards show latencies and where the time went, on stderr.")
@trace_option
@server_options
def generate(
    connection: Connection,
    options: GenerationOptions,
    prompt: str | None,
    token_ids: list[int] | None,
    timeout: float | None,
    ledger: bool,
    trace: bool,
) -> None:
    """Continue PROMPT and print the text as it arrives ("-": from standard input)."""
    text = prompt_text(prompt, token_ids)
    traceparent = new_traceparent() if trace else None
    try:
        with connection.client() as client:
            show_stream(
                lambda: client.generate(text, token_ids=token_ids, traceparent=traceparent, timeout=timeout, **options),
                as_json=connection.as_json,
                with_ledger=ledger,
                as_ids=bool(options.get("token_ids_only")),
            )
    finally:
        # Of a call that failed, it is wanted most.
        if traceparent is not None:
            TraceHint(connection).show(traceparent)


@click.command(cls=SectionedCommand)
@click.argument("prompt", required=False)
@click.option("--token-ids", type=TokenIdList(), help="The prompt as token ids, used as they are.")
@generation_options
@click.option("--idempotency-key", help="Sent twice with the same key and options, it is one request. Default: drawn.")
@server_options
def submit(
    connection: Connection,
    options: GenerationOptions,
    prompt: str | None,
    token_ids: list[int] | None,
    idempotency_key: str | None,
) -> None:
    """Start a generation that outlives its readers and print its request id."""
    text = prompt_text(prompt, token_ids)
    with connection.client() as client:
        submitted = client.submit(text, token_ids=token_ids, idempotency_key=idempotency_key, **options)
    if connection.as_json:
        echo_json(submitted)
    else:
        click.echo(submitted.request_id)


@click.command(cls=SectionedCommand)
@click.argument("request_id")
@click.option("--output-index", type=int, help="Only this output. Default: all.")
@click.option("--from-token", type=int, default=0, show_default=True, help="The first token wanted in each output.")
@click.option("--timeout", type=Seconds(), help="Seconds to read; the generation goes on after it. Default: no limit.")
@click.option("--ledger", is_flag=True, help="Afterwards show latencies and where the time went, on stderr.")
@server_options
def subscribe(
    connection: Connection,
    request_id: str,
    output_index: int | None,
    from_token: int,
    timeout: float | None,
    ledger: bool,
) -> None:
    """Read the generation REQUEST_ID from any token on; a broken connection is opened again."""
    with connection.client(RetryPolicy()) as client:
        show_stream(
            lambda: client.subscribe(request_id, output_index=output_index, from_token=from_token, timeout=timeout),
            as_json=connection.as_json,
            with_ledger=ledger,
        )


def _begun(events: Iterable[Event]) -> Iterator[Event]:
    """Passes events on; a subscription that never had a connection fails at once.

    In front of a terminal the first failure is the answer, here too.
    """
    begun = False
    for event in events:
        if isinstance(event, Reconnecting):
            if not begun:
                raise event.error
        else:
            begun = True
        yield event


@click.command(cls=SectionedCommand)
@click.argument("request_ids", nargs=-1, required=True, metavar="REQUEST_ID...")
@server_options
def cancel(connection: Connection, request_ids: tuple[str, ...]) -> None:
    """End generations of one's own."""
    with connection.client() as client:
        for request_id in request_ids:
            cancelled = client.cancel(request_id)
            if connection.as_json:
                echo_json({"request_id": request_id, "cancelled": cancelled})
            else:
                click.echo(f"{request_id} {'cancelled' if cancelled else 'had ended already'}")


def show_stream(open_stream: Callable[[], Stream], *, as_json: bool, with_ledger: bool, as_ids: bool = False) -> None:
    """Opens a stream, prints its text or its token ids, and if asked to, where its time went."""
    timer = StreamTimer()
    with open_stream() as stream:
        events = _begun(timer.observe(stream))
        if as_json:
            show_json(events)
        elif as_ids:
            show_text(events, ids_of)
        else:
            show_text(events)
        if with_ledger and stream.usage and stream.ledger:
            print_ledger(timer, stream.usage, stream.ledger)
