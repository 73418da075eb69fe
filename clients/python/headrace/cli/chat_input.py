"""What a person or a pipe says to `headrace chat`: lines, and messages of several lines.

Owns the reading. In a terminal prompt_toolkit edits the line: a paste of several lines is one
message (bracketed paste), Alt-Enter begins a new line, and the keys of a shell find what was typed
before. Everywhere else lines are read as they are, and nothing but an answer is written. Text comes
in from stdin, an Input goes out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO

import click

from headrace.cli.chat_history import HistoryFile
from headrace.cli.failures import os_sentence
from headrace.cli.output import warn

FENCE = '"""'
PROMPT, CONTINUED = "> ", ". "
# Reads a line, or several that were pasted, after showing a prompt. Raises EOFError at the end, and
# KeyboardInterrupt for Ctrl-C.
ReadLine = Callable[[str], str]


class Input(NamedTuple):
    """What was said. A `message` is never a command, whatever it begins with."""

    text: str
    message: bool = False


def read_input(read_line: ReadLine) -> Input:
    '''Reads a line, or what stands between two """.

    Raises:
        EOFError: There is no more.
        KeyboardInterrupt: Ctrl-C at the prompt.
        click.UsageError: The input ends before the second """.
    '''
    line = read_line(PROMPT)
    if not line.lstrip().startswith(FENCE):
        return Input(line)
    text = line.lstrip().removeprefix(FENCE)
    while not text.rstrip().endswith(FENCE):
        try:
            text += "\n" + read_line(CONTINUED)
        except EOFError:
            raise click.UsageError(f"the message that {FENCE} began has no {FENCE} at its end") from None
    return Input(text.rstrip().removesuffix(FENCE).strip("\n"), message=True)


def read_piped(_: str) -> str:
    """Reads the next line of standard input, without its end, and shows no prompt.

    Raises:
        EOFError: There is none.
        click.UsageError: It is no UTF-8.
    """
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not line:
        raise EOFError
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is no UTF-8 text: see {error.object[error.start :][:1]!r}") from None


def screen() -> TextIO | None:
    """The stream that prompts go to; None: nobody types, or nobody would see it."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None
    return next((stream for stream in (sys.stdout, sys.stderr) if stream is not None and stream.isatty()), None)


def prompt_in(stream: TextIO, history: HistoryFile | None, words: Sequence[str]) -> ReadLine:
    """Returns a reader of lines that are typed, with history and editing.

    Args:
        stream: Terminal that the prompt is shown on.
        history: What was typed before, which typed lines are added to; None: this chat's only.
        words: What Tab completes at the beginning of a line.
    """
    # It takes as long to import as the rest of the client: only a person who chats waits for it.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.vt100 import Vt100_Output
    from prompt_toolkit.shortcuts import CompleteStyle
    from prompt_toolkit.utils import is_dumb_terminal

    if is_dumb_terminal():
        return lambda prompt: _read_plainly(stream, prompt)
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output(stdout=stream)
    if isinstance(output, Vt100_Output):
        # Without menus nobody needs to know where the cursor is, and a terminal that does not say
        # would be complained about.
        output.enable_cpr = False
    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory(history.entries if history is not None else ()),
        completer=WordCompleter(list(words), sentence=True),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        enable_suspend=True,
        key_bindings=keys,
        output=output,
        prompt_continuation=CONTINUED,
    )

    def read_line(prompt: str) -> str:
        text = session.prompt(prompt)
        if history is not None:
            _keep(history, text)
        return text

    return read_line


def _read_plainly(stream: TextIO, prompt: str) -> str:
    """Reads a line on a terminal that knows no escape codes, as in an editor's window."""
    stream.write(prompt)
    stream.flush()
    return read_piped(prompt)


def _keep(history: HistoryFile, text: str) -> None:
    try:
        history.add(text)
    except OSError as error:
        warn(f"[this line is not kept in the history: {os_sentence(error)}]")
