"""`headrace doctor` on the command line: what is to be examined in, an exit code out.

Owns the flags. What is looked at, and how it is shown, is in `doctor`.
"""

from __future__ import annotations

import pathlib
import sys

import click

from headrace_supervisor import doctor as health
from headrace_supervisor.options import Refusal, ServerCommand, files, model_argument, typed_model


@click.command(cls=ServerCommand, context_settings={"help_option_names": ["--help", "-h"]})
@model_argument
@click.option("--listen", default="127.0.0.1:50051", show_default=True, help="the address to look at")
@click.option(
    "--model",
    shell_complete=files,
    metavar="MODEL",
    help="a model to check as well: its folder, or the name of one that was pulled",
)
@click.option("--model-repository", type=click.Path(path_type=pathlib.Path), help="a folder of models to check as well")
@click.option(
    "--weights",
    is_flag=True,
    help=(
        "load the weights of MODEL as well, and look for mistakes of the tool that packed them: takes as long as a "
        "server's start"
    ),
)
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")
def doctor(
    listen: str,
    named_model: str | None,
    model: str | None,
    model_repository: pathlib.Path | None,
    weights: bool,
    as_json: bool,
) -> None:
    """Says what this machine can run, and why not.

    MODEL is one to check as well. Exit code 1 if it can't serve at all, or if weights are damaged.
    """
    chosen = typed_model(named_model, model)
    if weights and chosen is None:
        raise Refusal("--weights needs a model")
    findings = health.examine(listen, chosen, model_repository, weights)
    health.report(findings, as_json=as_json)
    sys.exit(0 if health.can_serve(findings) else 1)
