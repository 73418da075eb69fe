"""`headrace chat`: a conversation in the terminal.

Owns the loop, its slash commands and the conversation so far. Lines come in from the terminal (with
readline's history, kept for this session only) or a pipe, answers of the sync client go to stdout
as they arrive, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import click

from headrace.cli.ledger_table import print_ledger
from headrace.cli.options import (
    GENERATION_OPTIONS,
    Connection,
    generation_options,
    given_options,
    server_options,
    trace_option,
)
from headrace.cli.output import echo_json, echo_text, note, warn
from headrace.cli.trace_hint import TraceHint
from headrace.client import Client
from headrace.errors import HeadraceError
from headrace.events import Delta, Done, FinishReason, OutputFinished
from headrace.spec import GenerationOptions, Message
from headrace.streams.stream import Stream
from headrace.timing import StreamTimer
from headrace.trace_context import new_traceparent

HELP = """\
/system TEXT       set the system message (nothing: remove it) and start afresh
/reset             forget the conversation
/set OPTION VALUE  set a generation option (nothing: show them; no value: back to the default)
/ledger            where the time of the last answer went
/help              this list
/quit              leave (so does Ctrl-D)
Ctrl-C stops an answer; what it said so far stays in the conversation."""

NOT_FOR_CHAT = {
    "n": "one answer: -n is not for chat",
    "token_ids_only": "the text of an answer: --token-ids-only is not for chat",
}


class Quit(Exception):
    """The person wants to leave."""


class Conversation:
    """What has been said, the options in force, and the figures of the last answer."""

    def __init__(
        self,
        client: Client,
        options: GenerationOptions,
        system: str | None,
        *,
        as_json: bool,
        on_traced: Callable[[str], None] | None = None,
    ) -> None:
        """Begins with nothing said.

        `on_traced` takes the trace context of each answer; None: none is traced.
        """
        self._client = client
        self._on_traced = on_traced
        self._values: dict[str, Any] = dict(options)
        self._system = system
        self._as_json = as_json
        self._said: list[Message] = []
        self._last: tuple[StreamTimer, Done] | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: warn(HELP),
            "/system": self._set_system,
            "/reset": lambda _: self._reset(),
            "/set": self._set_option,
            "/ledger": lambda _: self._show_ledger(),
            "/quit": lambda _: _quit(),
        }

    def handle(self, line: str) -> None:
        """Runs a slash command, or asks the model.

        Raises:
            Quit: The person wants to leave.
            HeadraceError: The call failed; the conversation is as it was before.
        """
        line = line.strip()
        if not line:
            return
        if not line.startswith("/"):
            self._ask(line)
            return
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            warn(f"there is no command {name}; /help lists them")
        else:
            command(rest.strip())

    def _ask(self, question: str) -> None:
        system = [Message("system", self._system)] if self._system else []
        messages = [*system, *self._said, Message("user", question)]
        timer = StreamTimer()
        pieces: list[str] = []
        traceparent = new_traceparent() if self._on_traced is not None else None
        try:
            with self._client.chat(messages, traceparent=traceparent, **given_options(self._values)) as stream:
                self._show(stream, timer, pieces)
        except KeyboardInterrupt:
            warn("\n[stopped]")
        finally:
            if self._on_traced is not None and traceparent is not None:
                self._on_traced(traceparent)
        self._said += [Message("user", question), Message("assistant", "".join(pieces))] if pieces else []

    def _show(self, stream: Stream, timer: StreamTimer, pieces: list[str]) -> None:
        """Prints the first output as it arrives and keeps its text in `pieces`."""
        for event in timer.observe(stream):
            if self._as_json:
                echo_json(event)
            if isinstance(event, Delta) and event.output_index == 0:
                pieces.append(event.text)
                if not self._as_json:
                    echo_text(event.text)
            elif isinstance(event, OutputFinished):
                self._note_end(event)
            elif isinstance(event, Done):
                self._last = (timer, event)
            elif not self._as_json:
                note(event)
        if not self._as_json:
            click.echo()

    def _note_end(self, finished: OutputFinished) -> None:
        if finished.error is not None:
            raise finished.error
        if finished.reason is not FinishReason.STOP and not self._as_json:
            warn(f"\n[ended: {finished.reason}]")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._reset()

    def _reset(self) -> None:
        self._said.clear()
        warn("[new conversation]")

    def _set_option(self, line: str) -> None:
        name, _, value = line.partition(" ")
        name = name.replace("-", "_")
        if not name:
            self._show_options()
        elif name not in GENERATION_OPTIONS or name in NOT_FOR_CHAT:
            warn(f"there is no option {name}; /set lists them")
        elif not value:
            self._values.pop(name, None)
        else:
            self._parse_option(name, value.strip())

    def _parse_option(self, name: str, value: str) -> None:
        option = GENERATION_OPTIONS[name]
        try:
            parsed = option.type.convert(value, option, None)
        except click.UsageError as error:
            warn(f"{name}: {error.message}")
            return
        self._values[name] = [parsed] if option.multiple else parsed

    def _show_options(self) -> None:
        for name, option in GENERATION_OPTIONS.items():
            if name not in NOT_FOR_CHAT:
                warn(f"{name:20} {self._values.get(name, '')!s:10} {option.help}")

    def _show_ledger(self) -> None:
        if self._last is None:
            warn("there is no whole answer yet")
        else:
            timer, done = self._last
            print_ledger(timer, done.usage, done.ledger)


@click.command()
@generation_options
@click.option("--system", help="The system message. Default: none.")
@trace_option
@server_options
def chat(connection: Connection, options: GenerationOptions, system: str | None, trace: bool) -> None:
    """Talk to the model, line by line; /help lists what else can be typed."""
    for name, reason in NOT_FOR_CHAT.items():
        if name in options:
            raise click.UsageError(f"a conversation goes on from {reason}")
    interactive = sys.stdin.isatty()
    if interactive:
        # Gives input() its line editing and its history.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        warn("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    with connection.client() as client:
        on_traced = TraceHint(connection).show if trace else None
        conversation = Conversation(client, options, system, as_json=connection.as_json, on_traced=on_traced)
        with contextlib.suppress(Quit, EOFError):
            while True:
                _turn(conversation, interactive=interactive)


def _turn(conversation: Conversation, *, interactive: bool) -> None:
    """Reads and handles one line. In front of a person, errors end the turn and not the loop."""
    try:
        line = input("> " if interactive else "")
    except KeyboardInterrupt:
        if not interactive:
            raise
        warn("\n[/quit or Ctrl-D leaves]")
        return
    try:
        conversation.handle(line)
    except HeadraceError as error:
        if not interactive:
            raise
        warn(f"error: {error.code.name}: {error}")


def _quit() -> None:
    raise Quit
