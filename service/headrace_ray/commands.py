"""`headrace ray`: a deployment on a Ray cluster, brought up, looked at and taken down.

Owns the command line's edge. The file is read before Ray is imported, which takes a second and is
an extra of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import click

from headrace_ray import config as configs
from headrace_ray.errors import DeploymentError
from headrace_ray.reports import Report, Status
from headrace_supervisor.options import Refusal
from headrace_supervisor.settings import ConfigError

_HELP = {"help_option_names": ["--help", "-h"]}
_NO_RAY = "Ray is not installed here: pip install 'headrace-server[ray]'"


def _finite(_: click.Context, __: click.Parameter, value: float) -> float:
    """Refuses nan, which every range lets through and no deadline passes."""
    if math.isnan(value):
        raise Refusal("--wait-s: must be a number of seconds, not nan")
    return value


_address = click.option(
    "--address", metavar="HOST:PORT", help="the cluster's head; default: RAY_ADDRESS, or the cluster of this machine"
)
_name = click.argument("name", default="headrace")


@click.group(context_settings=_HELP)
def ray() -> None:
    """Runs engines and services on a Ray cluster."""


@ray.command(context_settings=_HELP)
@click.argument("file", metavar="CONFIG", type=click.Path(path_type=pathlib.Path, dir_okay=False))
@_address
@click.option(
    "--wait-s",
    type=click.FloatRange(0, 86_400),
    callback=_finite,
    default=600.0,
    show_default=True,
    help="seconds until the first engine must serve; afterwards the deployment goes on trying by itself",
)
def up(file: pathlib.Path, address: str | None, wait_s: float) -> None:
    """Has the deployment of the TOML file CONFIG run on a cluster.

    Where it runs already, [engines] and [autoscaling] are changed to the file's. Exit code 1:
    nothing serves; 2: the file or the cluster makes no sense.
    """
    with _sentences():
        config = configs.load(file)
        said: list[str] = []
        status = _deployment().up(config, address, wait_s=wait_s, progress=lambda found: _say_news(found, said))
    _show(status)


@ray.command(context_settings=_HELP)
@_name
@_address
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")
def status(name: str, address: str | None, as_json: bool) -> None:
    """Says what the deployment NAME is now ("headrace" if none is named)."""
    with _sentences():
        checked = _checked(name)
        found = _deployment().status(checked, address)
    if as_json:
        click.echo(json.dumps(_plain(found), indent=2))
    else:
        _show(found)


@ray.command(context_settings=_HELP)
@_name
@_address
def down(name: str, address: str | None) -> None:
    """Ends the deployment NAME ("headrace" if none is named).

    Services end first and let open streams go on for their --shutdown-grace-s.
    """
    with _sentences():
        checked = _checked(name)
        _deployment().down(checked, address)
    click.echo(f"{name} is down")


def _deployment() -> Any:
    """Returns the module that speaks to Ray. Raises Refusal: Ray is not installed."""
    try:
        return importlib.import_module("headrace_ray.deployment")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise Refusal(_NO_RAY) from None


def _checked(name: str) -> str:
    try:
        configs.check_name(name)
    except ValueError as error:
        raise Refusal(str(error)) from None
    return name


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """Ends a command with one sentence for what the file, the cluster or the deployment lacks."""
    try:
        yield
    except (ConfigError, DeploymentError) as error:
        raise Refusal(str(error)) from None
    except TimeoutError as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(1)


def _say_news(status: Status, said: list[str]) -> None:
    """Prints a line whenever the states of engines and services have changed."""
    states = sorted(report.state for report in status.engines.values())
    line = f"{status.name}: engines {', '.join(states) or 'none'}; {status.wanted} wanted, each takes {status.takes}"
    if status.failures:
        line += f"; {status.failures} did not start: {status.why}"
    if [line] != said:
        click.echo(line, err=True)
        said[:] = [line]


def _show(status: Status) -> None:
    serving = sum(report.state == "serving" for report in status.engines.values())
    click.echo(f"{status.name}: {serving} of {status.wanted} engines serve, each takes {status.takes}")
    for name, report in status.engines.items():
        click.echo(f"  {name:12} {_shown(report)}")
    for address, report in status.services.items():
        click.echo(f"  service      {_shown(report)}" if report.address else f"  service      {address} {report.state}")
    if status.failures:
        click.echo(f"  {status.failures} engines did not start: {status.why}")


def _shown(report: Report) -> str:
    load = report.load
    parts = [f"{report.address or '-':22}", report.state]
    if load is not None:
        parts.append(f"{load.running} of {load.rows} rows, {load.waiting_tokens} tokens wait")
    if report.restarts:
        parts.append(f"started again {report.restarts} times")
    if report.why and report.state != "serving":
        parts.append(report.why)
    return "  ".join(parts)


def _plain(status: Status) -> dict[str, Any]:
    """Returns a status as JSON has it."""
    members = {
        kind: {name: {**report._asdict(), "load": report.load and report.load._asdict()} for name, report in of.items()}
        for kind, of in (("engines", status.engines), ("services", status.services))
    }
    return {**status._asdict(), **members}
