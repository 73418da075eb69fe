"""`headrace demo`: an answer from a real server within seconds, and nothing left behind.

Owns the story that `make demo` tells. The server is a private one of headrace.local that listens on
a free loopback port besides, the question goes through Chat over that port, and the figures are the
ones of every other command (ledger_table.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import click
import rich.console
import rich.progress

from headrace.cli.help import SectionedCommand
from headrace.cli.ledger_table import print_ledger
from headrace.cli.output import show_text, warn
from headrace.client import Client
from headrace.connections.connection import DEFAULT_SERVER
from headrace.local_server.installed import demo_model, require_server, require_worker
from headrace.local_server.process import LocalServerError
from headrace.local_server.server import local
from headrace.timing import StreamTimer

DEFAULT_PROMPT = "What is a KV cache?"
# One of each kind that the demo model was trained for.
NEXT_PROMPTS = (
    "Why is the KV cache cut into blocks?",
    "Extract name, age and city as JSON: Clara Weber is 34 years old and lives in Lisbon.",
    "Tell me a story about a fox named Mina and a lantern.",
)
# The demo model needs little memory. One thread, because the machine may be busy: with all four
# cores taken by others, a token took 8 ms with one thread and 155 ms (median) with two, which wait
# for each other at every operation.
KV_CACHE_BYTES = 256 * 2**20
WORKER_THREADS = 1
ANNOUNCEMENT_SECONDS = 20.0
_ANNOUNCEMENT = re.compile(r"listening on .*?(127\.0\.0\.1:\d+)")


@click.command(cls=SectionedCommand)
@click.option(
    "--prompt", envvar="PROMPT", show_envvar=True, default=DEFAULT_PROMPT, show_default=True, help="What to ask."
)
@click.option("--model", show_default="the one that comes with the server", help="Folder of the model.")
@click.option("--max-tokens", type=int, default=200, show_default=True, help="Most tokens of the answer.")
@click.option(
    "--worker-threads", type=int, default=WORKER_THREADS, show_default=True, help="CPU threads; 0: all cores but one."
)
def demo(prompt: str, model: str | None, max_tokens: int, worker_threads: int) -> None:
    """Start a server with the demo model, stream an answer, show its times, and stop the server."""
    require_server()
    require_worker()
    model = model or shown(demo_model())
    warn(f"starting a server for {model} on a free loopback port: one backend, one worker, one gRPC service ...")
    begun = time.monotonic()
    progress = Progress()
    server = local(
        model,
        listen="127.0.0.1:0",
        log_format="json",
        kv_memory=KV_CACHE_BYTES,
        worker_threads=worker_threads,
        on_line=progress.show,
    )
    with _said_once(progress), server:
        address = progress.wait_for_address()
        warn(f"ready on {address} after {time.monotonic() - begun:.1f} s")
        with Client(address) as client:
            _describe(client)
            _answer(client, prompt, max_tokens)
        warn("stopping the server ...")
    _what_next(model)


@contextlib.contextmanager
def _said_once(progress: Progress) -> Iterator[None]:
    """Shortens the error of a server that ended when its last line, the reason, was shown already.

    Raises LocalServerError.
    """
    try:
        yield
    except LocalServerError as error:
        if not (progress.last_shown and str(error).endswith(progress.last_shown)):
            raise
        raise LocalServerError("the server did not start, for the reason above") from None


class Progress:
    """Turns the server's log lines into what a person wants to know while waiting.

    Once the server is ready it shows warnings only.
    """

    def __init__(self) -> None:
        self.ready = False
        # The last line that was shown as the server had printed it.
        self.last_shown = ""
        # On a terminal every phase of the start has a bar; None: lines.
        self._bars = _bars() if sys.stderr.isatty() else None
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._address = ""
        self._announced = threading.Event()

    def wait_for_address(self) -> str:
        """The HOST:PORT that the server announced; it does so as soon as it is ready.

        Raises:
            LocalServerError: It did not.
        """
        self.ready = True
        if self._bars is not None:
            self._bars.stop()
        if not self._announced.wait(ANNOUNCEMENT_SECONDS):
            raise LocalServerError("the server is ready but did not say on which port")
        return self._address

    def show(self, line: str) -> None:
        """Prints a line of the server, if it says something."""
        announced = _ANNOUNCEMENT.match(line)
        if announced:
            self._address = announced.group(1)
            self._announced.set()
            return
        message = self._message(line)
        if message and self._bars is not None and self._bars.live.is_started:
            self._bars.console.print(f"  {message}", markup=False, highlight=False, soft_wrap=True)
        elif message:
            warn(f"  {message}")

    def _message(self, line: str) -> str | None:
        fields = _log_fields(line)
        if fields is None:
            self.last_shown = "" if self.ready else line.strip()
            return None if self.ready else line
        event = fields.get("event")
        if fields.get("level") in ("warning", "error", "critical"):
            return line
        if self.ready:
            return None
        if event in ("memory plan", "memory plan, measured"):
            names = ("weight", "activation", "graph", "kv_cache")
            return f"{event}: " + ", ".join(f"{name} {fields[name]}" for name in names if name in fields)
        if event == "loading":
            return self._loading(fields)
        return "worker ready" if event == "workers ready" else None

    def _loading(self, fields: dict[str, Any]) -> str | None:
        """Moves the phase's bar, or gives its line."""
        phase, words = str(fields.get("phase", "")), str(fields.get("progress", ""))
        if self._bars is None:
            return f"loading {phase}: {words}"
        self._bars.start()
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(f"  {phase}", total=None, words=words)
        # A phase without figures moves to and fro until it has ended.
        total, done = fields.get("total"), fields.get("done", 0)
        if "seconds" in fields:
            total = done = total or 1
        self._bars.update(self._tasks[phase], completed=done, total=total, words=words)
        return None


def _bars() -> rich.progress.Progress:
    """Bars on stderr; lines that are printed meanwhile go above them."""
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(bar_width=20),
        rich.progress.TextColumn("{task.fields[words]}"),
        console=rich.console.Console(file=sys.stderr),
        redirect_stdout=False,
    )


def _log_fields(line: str) -> dict[str, Any] | None:
    """The fields of a JSON log line; None for any other line."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _describe(client: Client) -> None:
    model = client.get_model()
    warn(
        f"{model.name}: {model.architecture}, {model.parameter_count / 1e6:.1f} M parameters, {model.dtype} on "
        f"{model.device}, "
        f"{model.kv_blocks:,} KV cache blocks of {model.kv_block_tokens} tokens"
    )


def _answer(client: Client, prompt: str, max_tokens: int) -> None:
    """Streams the answer to stdout, then prints latencies and ledger on stderr."""
    warn("asking it over gRPC (headrace.v1.InferenceService/Chat):\n")
    click.echo(f"> {prompt}")
    timer = StreamTimer()
    with client.chat(prompt, max_tokens=max_tokens) as stream:
        show_text(timer.observe(stream))
        if stream.usage and stream.ledger:
            print_ledger(timer, stream.usage, stream.ledger)


def _what_next(model: str) -> None:
    headrace = program()
    warn("worth trying next:")
    for prompt in NEXT_PROMPTS:
        warn(f"  {headrace} demo --prompt {shlex.quote(prompt)}")
    warn("to keep a server running, and to talk to it from a second terminal:")
    warn(f"  {headrace} serve --model {shlex.quote(model)} --listen {DEFAULT_SERVER}")
    warn(f"  {headrace} chat")


def program() -> str:
    """Returns what to type for this `headrace`: the bare name where PATH leads to it."""
    script = pathlib.Path(sys.executable).with_name("headrace")
    found = shutil.which("headrace")
    if found is not None and os.path.realpath(found) == os.path.realpath(script):
        return "headrace"
    if script.exists():
        return shlex.quote(shown(script))
    return f"{shlex.quote(sys.executable)} -m headrace"


def shown(path: pathlib.Path) -> str:
    """Returns the path from the current folder on, where it lies below that."""
    current = pathlib.Path.cwd()
    return str(path.relative_to(current) if path.is_relative_to(current) else path)
