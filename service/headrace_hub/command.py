"""`headrace pull`: a model from a hub, by its name, into the cache of this machine.

Owns the command line's edge. stdout has the model's place alone, for programs; what a user reads is
on stderr.
"""

from __future__ import annotations

import sys
import time

import click

from headrace_hub.errors import BadName, HubRefused
from headrace_hub.names import parsed
from headrace_hub.variables import check_variables

EXIT_ERROR = 1
EXIT_USAGE = 2


@click.command(context_settings={"help_option_names": ["--help", "-h"]})
@click.argument("name", metavar="ORG/NAME[@REVISION][:FILE]")
@click.option("--revision", help="branch, tag or commit, as after the @ of the name; default: main")
@click.option("--file", help="GGUF file, or a part of its name such as Q4_K_M, as after the : of the name")
def pull(name: str, revision: str | None, file: str | None) -> None:
    """Fetches a model from a hub, and prints where it is.

    Safetensors or GGUF weights, tokenizer and configuration; never pickles, never code. A download
    that was cut off goes on where it stopped, and every hash is checked. Afterwards headrace serve
    ORG/NAME needs no network; pull again for a newer commit.

    HF_TOKEN (or the file HF_TOKEN_PATH), HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are the ones of
    all programs that use this cache.

    Example: headrace pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
    """
    started = time.monotonic()
    try:
        wanted = parsed(name, revision, file)
        check_variables()
        # The hub's library reads its variables when it is imported.
        from headrace_hub import models

        found = models.pull(wanted)
    except HubRefused as refused:
        click.echo(f"headrace: {refused}", err=True)
        sys.exit(EXIT_USAGE if isinstance(refused, BadName) else EXIT_ERROR)
    took = f"{time.monotonic() - started:.1f} s"
    click.echo(f"headrace: {wanted.repo} is here after {took}; serve it: headrace serve {wanted}", err=True)
    click.echo(found.path)
