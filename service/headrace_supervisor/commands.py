"""The commands that the server distribution adds to `headrace`.

They are serve, service, backend, telemetry, doctor, bench and quantize.

Owns the command line's edge: flags in, exit codes out, one line for a mistake. What a command does
is in the module that it calls.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click
import pydantic

from headrace_supervisor import config as configs
from headrace_supervisor import doctor as health
from headrace_supervisor import logs, supervisor
from headrace_supervisor.bench.command import bench
from headrace_supervisor.options import GroupedCommand, given, settings_options
from headrace_supervisor.quantize_command import quantize
from headrace_supervisor.settings import ConfigError

__all__ = ["backend", "bench", "doctor", "quantize", "serve", "service", "telemetry"]

_config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=pathlib.Path),
    help="TOML file of settings; also HEADRACE_CONFIG",
)
Config = TypeVar("Config", bound=pydantic.BaseModel)
_HELP = {"help_option_names": ["--help", "-h"]}


@settings_options(configs.SERVE)
@click.command(cls=GroupedCommand, context_settings=_HELP)
@_config_option
def serve(config_file: pathlib.Path | None, **flags: Any) -> None:
    """Runs a server: backends, the services that speak gRPC, and telemetry.

    Each model has a backend with its workers (several with --replicas).

    Example: headrace serve --model models/demo --listen 127.0.0.1:50051
    """
    config = _loaded(configs.load_server, config_file, flags)
    logs.configure(config.supervisor.log_format, config.supervisor.log_level)
    try:
        sys.exit(supervisor.serve(config))
    except supervisor.StartRefused as error:
        _refuse(str(error))


@settings_options(configs.SERVICE)
@click.command(cls=GroupedCommand, context_settings=_HELP)
@_config_option
def service(config_file: pathlib.Path | None, **flags: Any) -> None:
    """Runs one service process alone: gRPC for clients, on behalf of a backend elsewhere."""
    _become("headrace_service", _loaded(configs.load_service, config_file, flags))


@settings_options(configs.BACKEND)
@click.command(cls=GroupedCommand, context_settings=_HELP)
@_config_option
def backend(config_file: pathlib.Path | None, **flags: Any) -> None:
    """Runs one backend alone, with its worker: the engine that services connect to."""
    _become("headrace_backend", _loaded(configs.load_backend, config_file, flags), "--outlive-parent")


@settings_options(configs.TELEMETRY)
@click.command(cls=GroupedCommand, context_settings=_HELP)
@_config_option
def telemetry(config_file: pathlib.Path | None, **flags: Any) -> None:
    """Runs the telemetry process alone.

    Traces and metrics of the services and backends that have its --telemetry-socket.
    """
    _become("headrace_telemetry", _loaded(configs.load_telemetry, config_file, flags))


@click.command(context_settings=_HELP)
@click.option("--listen", default="127.0.0.1:50051", show_default=True, help="the address to look at")
@click.option("--model", type=click.Path(path_type=pathlib.Path), help="a model folder to check as well")
@click.option("--model-repository", type=click.Path(path_type=pathlib.Path), help="a folder of models to check as well")
@click.option(
    "--weights",
    is_flag=True,
    help=(
        "load the weights of --model as well, and look for mistakes of the tool that packed them: takes as long as a "
        "server's start"
    ),
)
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")
def doctor(
    listen: str, model: pathlib.Path | None, model_repository: pathlib.Path | None, weights: bool, as_json: bool
) -> None:
    """Says what this machine can run, and why not.

    Exit code 1 if it can't serve at all, or if weights are damaged.
    """
    if weights and model is None:
        _refuse("--weights needs --model")
    findings = health.examine(listen, model, model_repository, weights)
    health.report(findings, as_json=as_json)
    sys.exit(0 if health.can_serve(findings) else 1)


def _loaded(
    load: Callable[[dict[str, Any], pathlib.Path | None], Config],
    config_file: pathlib.Path | None,
    flags: dict[str, Any],
) -> Config:
    try:
        return load(given(flags), config_file)
    except ConfigError as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    click.echo(f"headrace: {reason}", err=True)
    sys.exit(2)


def _become(module: str, config: pydantic.BaseModel, *arguments: str) -> NoReturn:
    """Replaces this process by a module that reads its configuration from an anonymous file."""
    descriptor = os.memfd_create("headrace-config", 0)
    os.write(descriptor, config.model_dump_json().encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [sys.executable, "-m", module, "--config-json", f"/proc/self/fd/{descriptor}", *arguments])
