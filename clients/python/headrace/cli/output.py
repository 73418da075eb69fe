"""What the commands print: streamed text, JSON lines, notes.

Owns the rule that results go to stdout and everything else to stderr, and the JSON shape of events
and answers. Does not call the server. Typed events and answers come in, lines go out.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

from headrace.conversations.content import Content
from headrace.errors import HeadraceError
from headrace.events import Delta, Event, FinishReason, OutputFinished, Reconnecting, Resumed

# Control characters but newline and tab: text of a model must not steer the terminal it is shown
# on.
TERMINAL_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def warn(message: str) -> None:
    """Prints a line on stderr."""
    click.echo(message, err=True)


def echo_text(piece: str) -> None:
    """Prints a piece of a model's text at once.

    On a terminal control characters are left out; a pipe gets the text as it is.
    """
    if sys.stdout is None:
        return
    sys.stdout.write(TERMINAL_CONTROL.sub("\ufffd", piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def echo_aside(piece: str) -> None:
    """Prints a piece of what a model writes for itself on stderr, at once."""
    if piece:
        click.echo(TERMINAL_CONTROL.sub("\ufffd", piece), err=True, nl=False)


def echo_json(value: Any) -> None:
    """Prints one JSON line."""
    click.echo(json.dumps(as_json(value), ensure_ascii=False))


def as_json(value: Any) -> Any:
    """A value of this client as JSON types; events and contents say their kind."""
    if isinstance(value, HeadraceError):
        return error_as_dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        kind = "event" if isinstance(value, Event) else "kind" if isinstance(value, Content) else ""
        return {kind: _snake_case(type(value).__name__), **fields} if kind else fields
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.datetime) else value


def error_as_dict(error: HeadraceError) -> dict[str, Any]:
    """An exception as JSON types."""
    return {
        "code": error.code.name,
        "message": error.message,
        "request_id": error.request_id,
        "violations": [dataclasses.asdict(violation) for violation in error.violations],
        "retry_after": error.retry_after,
    }


def show_json(events: Iterable[Event]) -> None:
    """Prints each event as a JSON line as it arrives.

    An output that failed is raised after the last one.
    """
    failure: HeadraceError | None = None
    for event in events:
        echo_json(event)
        if isinstance(event, OutputFinished):
            failure = failure or event.error
    if failure is not None:
        raise failure


def ids_of(delta: Delta) -> str:
    """Token ids, for streams without text."""
    return "".join(f"{token_id} " for token_id in delta.token_ids)


def show_text(events: Iterable[Event], piece_of: Callable[[Delta], str] = lambda delta: delta.text) -> None:
    """Prints the text of the first output as it arrives and that of the others after it.

    Notes go to stderr.

    Raises:
        HeadraceError: An output ended with an error; the text before it has been printed.
    """
    live: int | None = None
    others: dict[int, list[str]] = {}
    ends: list[OutputFinished] = []
    try:
        for event in events:
            if isinstance(event, Delta):
                live = event.output_index if live is None else live
                if event.output_index == live:
                    echo_text(piece_of(event))
                else:
                    others.setdefault(event.output_index, []).append(piece_of(event))
            elif isinstance(event, OutputFinished):
                ends.append(event)
            else:
                note(event)
    except (HeadraceError, KeyboardInterrupt):
        # What is said of it begins a line of its own.
        if live is not None:
            click.echo()
        raise
    click.echo()
    for index in sorted(others):
        click.echo(f"\n--- output {index} ---")
        echo_text("".join(others[index]))
        click.echo()
    _check_ends(ends)


def note(event: Event) -> None:
    """Says on stderr what interrupted a stream."""
    if isinstance(event, Resumed):
        warn(f"\n[a worker of the server was replaced; the answer goes on after {event.pause_ns / 1e9:.2f} s]")
    elif isinstance(event, Reconnecting):
        warn(f"\n[connection lost ({event.error.message}); trying again in {event.delay:.1f} s]")


def _check_ends(ends: list[OutputFinished]) -> None:
    """Says on stderr which outputs are not whole, and raises the error of the first that failed."""
    for end in ends:
        if end.reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.ERROR):
            warn(f"[output {end.output_index} ended: {end.reason}]")
    for end in ends:
        if end.error is not None:
            raise end.error


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
