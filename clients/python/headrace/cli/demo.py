"""`headrace demo`: an answer from a real server within seconds, and nothing left behind.

Owns the story that `make demo` tells. The server is a private one of headrace.local, the question goes through Chat over gRPC, and the
figures are the ones of every other command (ledger_table.py).
"""

from __future__ import annotations

import shlex
import time

import click

from headrace.cli.ledger_table import print_ledger
from headrace.cli.output import show_text, warn
from headrace.client import DEFAULT_SERVER, Client
from headrace.local_server import local
from headrace.timing import StreamTimer

DEFAULT_MODEL = "models/demo"
DEFAULT_PROMPT = "What is a KV cache?"
# One of each kind that the demo model was trained for.
NEXT_PROMPTS = (
    "Why is the KV cache cut into blocks?",
    "Extract name, age and city as JSON: Clara Weber is 34 years old and lives in Lisbon.",
    "Tell me a story about a fox named Ruben and a lantern.",
)


@click.command()
@click.option("--prompt", envvar="PROMPT", show_envvar=True, default=DEFAULT_PROMPT, show_default=True)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Folder of the model.")
@click.option("--max-tokens", type=int, default=200, show_default=True, help="Most tokens of the answer.")
def demo(prompt: str, model: str, max_tokens: int) -> None:
    """Start a server with the demo model, stream one answer, show where the time went, and stop the server."""
    warn(f"starting a server for {model} on a private socket ...")
    begun = time.monotonic()
    with local(model, on_line=lambda line: warn(f"  | {line}")) as client:
        warn(f"ready after {time.monotonic() - begun:.1f} s")
        _describe(client)
        _answer(client, prompt, max_tokens)
        warn("stopping the server ...")
    _what_next(model)


def _describe(client: Client) -> None:
    model = client.get_model()
    warn(
        f"{model.name}: {model.architecture}, {model.parameter_count / 1e6:.1f} M parameters, {model.dtype} on {model.device}, "
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
    warn("worth trying next:")
    for prompt in NEXT_PROMPTS:
        warn(f"  PROMPT={shlex.quote(prompt)} make demo")
    warn("to keep a server running, and to talk to it from a second terminal:")
    warn(f"  .venv/bin/headrace serve --model {shlex.quote(model)} --listen {DEFAULT_SERVER}")
    warn("  .venv/bin/headrace chat")
