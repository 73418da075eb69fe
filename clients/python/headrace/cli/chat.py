"""`headrace chat`: a conversation in the terminal.

Owns the loop, its slash commands and the conversation so far. What is said comes from chat_input.py
(a terminal or a pipe), options are kept by chat_settings.py, answers of the sync client go to
stdout as they arrive, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Sequence

import click

from headrace.cli.chat_history import HistoryFile, default_path
from headrace.cli.chat_input import Input, ReadLine, prompt_in, read_input, read_piped, screen
from headrace.cli.chat_settings import FIELD_NAMES, NOT_FOR_CHAT, SETTABLE, Settings
from headrace.cli.chat_tools import OpenCalls, read_tools
from headrace.cli.failures import CallFacts, os_sentence, sentence
from headrace.cli.help import SectionedCommand
from headrace.cli.ledger_table import print_ledger
from headrace.cli.options import (
    Connection,
    generation_options,
    server_options,
    trace_option,
)
from headrace.cli.output import echo_aside, echo_json, echo_text, note, warn
from headrace.cli.trace_hint import TraceHint
from headrace.client import Client
from headrace.completion import OutputTranscript
from headrace.conversations.messages import Message, Tool
from headrace.errors import HeadraceError
from headrace.events import Delta, Done, Event, FinishReason, OutputFinished
from headrace.spec import GenerationOptions
from headrace.streams.stream import Stream
from headrace.timing import StreamTimer
from headrace.trace_context import new_traceparent

HELP = """\
/system TEXT       set the system message (nothing: remove it) and start afresh
/reset             forget the conversation
/set OPTION VALUE  set a generation option, which the server checks at once
                   (nothing: list them; no value: back to the default)
/ledger            where the time of the last answer went
/help              this list
/quit              leave (so does Ctrl-D)
Several lines are one message when they are pasted, when Alt-Enter (or Esc and
then Enter) ends each but the last, or between \"\"\" and \"\"\".
Up and Ctrl-R find what was typed, also in earlier chats (--no-history: not).
Ctrl-C stops an answer; what it said so far stays in the conversation."""


class Quit(Exception):
    """The person wants to leave."""


class Conversation:
    """What has been said, and the figures of the last answer."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        system: str | None,
        *,
        as_json: bool,
        on_traced: Callable[[str], None] | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> None:
        """Begins with nothing said.

        `on_traced` takes the trace context of each answer; None: none is traced. `tools` are the
        functions that the model may call.
        """
        self._client = client
        self._on_traced = on_traced
        self._settings = settings
        self._system = system
        self._as_json = as_json
        self._tools = tools
        self._said: list[Message] = []
        # Calls whose results the person is asked for.
        self._open_calls = OpenCalls()
        self._last: tuple[StreamTimer, Done] | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: warn(HELP),
            "/system": self._set_system,
            "/reset": lambda _: self._reset(),
            "/set": settings.set,
            "/ledger": lambda _: self._show_ledger(),
            "/quit": lambda _: _quit(),
        }

    @property
    def commands(self) -> tuple[str, ...]:
        """The slash commands."""
        return tuple(self._commands)

    def handle(self, said: Input) -> None:
        """Runs a slash command, or asks the model.

        Raises:
            Quit: The person wants to leave.
            HeadraceError: The call failed; the conversation is as it was before.
            KeyboardInterrupt: The answer was stopped; what there is of it was said.
        """
        text = said.text.strip()
        if not text:
            return
        if said.message or not text.startswith("/"):
            self._say(text)
            return
        name, _, rest = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            warn(f'there is no command {name}; /help lists them, and """ begins a message that looks like one')
        else:
            command(rest.strip())

    def _say(self, text: str) -> None:
        """Asks a question, or takes the result of a call."""
        if not self._open_calls:
            self._ask([Message("user", text)])
            return
        results = self._open_calls.answer(text)
        if results is not None:
            self._ask(results)

    def _ask(self, new: list[Message]) -> None:
        """Has the model answer what is new."""
        system = [Message("system", self._system)] if self._system else []
        messages = [*system, *self._said, *new]
        timer = StreamTimer()
        answer = OutputTranscript()
        traceparent = new_traceparent() if self._on_traced is not None else None
        try:
            options = self._settings.options
            with self._client.chat(messages, tools=self._tools, traceparent=traceparent, **options) as stream:
                self._show(stream, timer, answer)
        except HeadraceError:
            answer = OutputTranscript()
            raise
        finally:
            if answer.token_ids:
                calls = tuple(call for call in answer.content.tool_calls() if call.valid)
                self._said += [*new, Message("assistant", "".join(answer.text), calls)]
                self._open_calls.begin(calls)
            if self._on_traced is not None and traceparent is not None:
                self._on_traced(traceparent)

    def _show(self, stream: Stream, timer: StreamTimer, answer: OutputTranscript) -> None:
        """Prints the first output as it arrives and keeps it in `answer`."""
        try:
            for event in timer.observe(stream):
                if self._as_json:
                    echo_json(event)
                self._take(event, timer, answer)
        finally:
            # What comes next, also of a failure, begins a line of its own.
            if not self._as_json:
                click.echo()

    def _take(self, event: Event, timer: StreamTimer, answer: OutputTranscript) -> None:
        if isinstance(event, Delta) and event.output_index == 0:
            is_first_text = bool(event.text) and not any(answer.text)
            answer.add(event)
            if self._as_json:
                return
            echo_aside(event.reasoning)
            if is_first_text and answer.content.reasoning:
                # The answer begins a line of its own.
                warn("")
            echo_text(event.text)
        elif isinstance(event, OutputFinished):
            self._note_end(event)
        elif isinstance(event, Done):
            self._last = (timer, event)
        elif not self._as_json:
            note(event)

    def _note_end(self, finished: OutputFinished) -> None:
        if finished.error is not None:
            raise finished.error
        if finished.reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS) and not self._as_json:
            warn(f"\n[ended: {finished.reason}]")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._reset()

    def _reset(self) -> None:
        self._said.clear()
        self._open_calls.forget()
        warn("[new conversation]")

    def _show_ledger(self) -> None:
        if self._last is None:
            warn("there is no whole answer yet")
        else:
            timer, done = self._last
            print_ledger(timer, done.usage, done.ledger)


@click.command(cls=SectionedCommand)
@generation_options
@click.option("--system", help="The system message. Default: none.")
@click.option(
    "--history/--no-history",
    "with_history",
    default=True,
    envvar="HEADRACE_CHAT_HISTORY",
    show_envvar=True,
    help="Keep what is typed, in a file of the user's own, for later chats. Default: keep.",
)
@click.option(
    "--tools",
    "tools_file",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="A JSON file with a list of functions that the model may call; what they return is typed. Default: none.",
)
@trace_option
@server_options
def chat(
    connection: Connection,
    options: GenerationOptions,
    system: str | None,
    with_history: bool,
    tools_file: pathlib.Path | None,
    trace: bool,
) -> None:
    """Talk to the model, line by line; /help lists what else can be typed."""
    for name, reason in NOT_FOR_CHAT.items():
        if name in options:
            raise click.UsageError(f"a conversation goes on from {reason}")
    tools = read_tools(tools_file) if tools_file is not None else None
    with connection.client() as client:
        settings = Settings(client, options)
        # Now, and not when the first question has been typed.
        settings.check()
        on_traced = TraceHint(connection).show if trace else None
        conversation = Conversation(
            client, settings, system, as_json=connection.as_json, on_traced=on_traced, tools=tools
        )
        stream = screen()
        with contextlib.suppress(Quit, EOFError):
            if stream is None:
                while True:
                    conversation.handle(read_input(read_piped))
            _greet(client, settings, connection.server)
            words = [*conversation.commands, *(f"/set {name}" for name in SETTABLE)]
            read_line = prompt_in(stream, _history() if with_history else None, words)
            while True:
                _turn(conversation, read_line)


def _greet(client: Client, settings: Settings, server: str) -> None:
    """Says who answers, where the key may ask for that, and how to leave."""
    with contextlib.suppress(HeadraceError):
        warn(f"{client.get_model(settings.options.get('model')).name} on {server}")
    warn("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")


def _history() -> HistoryFile | None:
    try:
        return HistoryFile(default_path())
    except OSError as error:
        warn(f"[the history is not kept: {os_sentence(error)}]")
        return None


def _turn(conversation: Conversation, read_line: ReadLine) -> None:
    """Reads and handles what a person says; errors end the turn and not the loop."""
    try:
        said = read_input(read_line)
    except KeyboardInterrupt:
        warn("[/quit or Ctrl-D leaves]")
        return
    try:
        conversation.handle(said)
    except KeyboardInterrupt:
        warn("[stopped]")
    except HeadraceError as error:
        warn(f"error: {error.code.name}: {sentence(error, CallFacts(names=FIELD_NAMES))}")


def _quit() -> None:
    raise Quit
