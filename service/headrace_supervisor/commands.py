"""The commands that run processes of a server: serve, service, backend, ranks and telemetry.

Owns the command line's edge: flags in, exit codes out, one line for a mistake. What a command does
is in the module that it calls. Other commands have a module each, so that a server's start imports
none of them.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click
import pydantic

import headrace_facts.plain_structlog  # noqa: F401  # before anything that imports structlog
from headrace.local_server.installed import require_worker
from headrace.local_server.process import LocalServerError
from headrace_supervisor import config as configs
from headrace_supervisor import logs, supervisor
from headrace_supervisor.options import (
    Refusal,
    ServerCommand,
    given,
    model_argument,
    settings_options,
    typed_model,
)
from headrace_supervisor.processes import early_backend
from headrace_supervisor.settings import ConfigError

_config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=pathlib.Path),
    help="TOML file of settings; also HEADRACE_CONFIG",
)
Config = TypeVar("Config", bound=pydantic.BaseModel)
_HELP = {"help_option_names": ["--help", "-h"]}
# click keeps the lines of a paragraph that begins with \b.
_EXAMPLES = """\b
Examples:
  headrace serve models/demo
  headrace serve path/to/Llama-3.1-8B-Instruct --tp 2
  headrace serve --model-repository models --model demo
"""


@settings_options(configs.SERVE)
@click.command(cls=ServerCommand, context_settings=_HELP, epilog=_EXAMPLES)
@model_argument
@_config_option
def serve(named_model: str | None, config_file: pathlib.Path | None, **flags: Any) -> None:
    """Runs a server: backends, the services that speak gRPC, and telemetry.

    MODEL is a folder, a GGUF file, or ORG/NAME of a hub, as for --model. Each model has a backend
    with its workers (several with --replicas).
    """
    _require_worker()
    config = _loaded(configs.load_server, config_file, flags, named_model)
    logs.configure(config.supervisor.log_format, config.supervisor.log_level)
    try:
        sys.exit(supervisor.serve(config, early_backend.begun()))
    except supervisor.StartRefused as error:
        raise Refusal(str(error)) from None


@settings_options(configs.SERVICE)
@click.command(cls=ServerCommand, context_settings=_HELP)
@_config_option
def service(config_file: pathlib.Path | None, **flags: Any) -> None:
    """Runs one service process alone, on behalf of a backend elsewhere.

    It speaks gRPC, or OpenAI's HTTP API with --openai-listen.
    """
    config = _loaded(configs.load_service, config_file, flags)
    _become("headrace_service" if config.listen else "headrace_service.openai", config)


@settings_options(configs.BACKEND)
@click.command(cls=ServerCommand, context_settings=_HELP)
@model_argument
@_config_option
def backend(named_model: str | None, config_file: pathlib.Path | None, **flags: Any) -> None:
    """Runs one backend alone, with its worker: the engine that services connect to.

    MODEL is a folder, a GGUF file, or ORG/NAME of a hub, as for --model.
    """
    _require_worker()
    config = _loaded(configs.load_backend, config_file, flags, named_model)
    _become("headrace_backend", config, "--outlive-parent", "--early-workers", str(config.engine.ranks_per_host))


@settings_options(configs.RANKS)
@click.command(cls=ServerCommand, context_settings=_HELP)
@model_argument
@_config_option
def ranks(named_model: str | None, config_file: pathlib.Path | None, **flags: Any) -> None:
    """Runs ranks of an engine whose backend is on another host, with --hosts.

    MODEL is the engine's, on this machine: a folder, a GGUF file, or ORG/NAME of a hub. Which ranks
    and with which options, the engine says.
    """
    _require_worker()
    _become("headrace_backend.rank_agent", _loaded(configs.load_ranks, config_file, flags, named_model))


@settings_options(configs.TELEMETRY)
@click.command(cls=ServerCommand, context_settings=_HELP)
@_config_option
def telemetry(config_file: pathlib.Path | None, **flags: Any) -> None:
    """Runs the telemetry process alone.

    Traces and metrics of the services and backends that have its --telemetry-socket.
    """
    _become("headrace_telemetry", _loaded(configs.load_telemetry, config_file, flags))


def _loaded(
    load: Callable[[dict[str, Any], pathlib.Path | None], Config],
    config_file: pathlib.Path | None,
    flags: dict[str, Any],
    named_model: str | None = None,
) -> Config:
    typed = given(flags)
    model = typed_model(named_model, typed.get("model"))
    if model is not None:
        typed["model"] = model
    try:
        return load(typed, config_file)
    except ConfigError as error:
        raise Refusal(str(error)) from None


def _require_worker() -> None:
    """Refuses, before anything starts, what a machine that has services alone cannot do."""
    try:
        require_worker()
    except LocalServerError as error:
        raise Refusal(str(error)) from None


def _become(module: str, config: pydantic.BaseModel, *arguments: str) -> NoReturn:
    """Replaces this process by a module that reads its configuration from an anonymous file."""
    descriptor = os.memfd_create("headrace-config", 0)
    os.write(descriptor, config.model_dump_json().encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [sys.executable, "-m", module, "--config-json", f"/proc/self/fd/{descriptor}", *arguments])
