"""`headrace health`: whether one process of Headrace does its work.

Health checks of containers ask inside them.

Owns the three ways of asking (grpc.health.v1 of a service, the engine's own protocol of a backend,
HTTP of the telemetry process) and the exit code: 0 if it works, 1 and one line if not. Nothing is
inferred from a process being alive.
"""

from __future__ import annotations

import asyncio
import pathlib
import sys
import urllib.error
import urllib.request

import click
import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import grpc_words
from headrace_credentials.client_tls import ClientTlsFiles, channel_credentials, new_channel
from headrace_credentials.files import CredentialError
from headrace_supervisor.processes import engine_probe

_OPTIONS = [("grpc.enable_http_proxy", 0)]
_FILE = click.Path(path_type=pathlib.Path, dir_okay=False)


class NotWell(Exception):  # an outcome
    """A process does not work, or can't be asked; the text says why."""


@click.command(context_settings={"help_option_names": ["--help", "-h"]})
@click.argument("address")
@click.option("--engine", is_flag=True, help="ADDRESS is a backend's; well means that its workers compute")
@click.option("--ca", type=_FILE, help="PEM file of the CA, where ADDRESS speaks TLS")
@click.option("--certificate", type=_FILE, help="PEM file of the certificate to show, where ADDRESS speaks mTLS")
@click.option("--key", type=_FILE, help="PEM file of its private key")
@click.option(
    "--timeout-s", type=click.FloatRange(0.1, 60), default=3.0, show_default=True, help="seconds an answer may take"
)
def health(
    address: str,
    engine: bool,
    ca: pathlib.Path | None,
    certificate: pathlib.Path | None,
    key: pathlib.Path | None,
    timeout_s: float,
) -> None:
    """Asks ADDRESS whether it is well: exit code 0 if it is, 1 if not.

    ADDRESS is unix:PATH or HOST:PORT of a service (its --listen or --probe), with --engine of a
    backend, or http://HOST:PORT/metrics of the telemetry process.
    """
    if not address:
        raise click.UsageError("ADDRESS is empty")
    if address.startswith(("http://", "https://")) and (engine or ca or certificate or key):
        raise click.UsageError("--engine, --ca, --certificate and --key are for gRPC, ADDRESS is http")
    files = _tls_files(ca, certificate, key)
    try:
        if address.startswith(("http://", "https://")):
            _ask_http(address, timeout_s)
        else:
            asyncio.run(_ask_grpc(address, files, timeout_s, engine=engine))
    except (NotWell, CredentialError) as error:
        click.echo(f"headrace: {address}: {error}", err=True)
        sys.exit(1)


def _tls_files(
    ca: pathlib.Path | None, certificate: pathlib.Path | None, key: pathlib.Path | None
) -> ClientTlsFiles | None:
    if (certificate is None) != (key is None):
        raise click.UsageError("--certificate and --key: one needs the other")
    if ca is None:
        if certificate is not None:
            raise click.UsageError("--certificate: needs --ca")
        return None
    return ClientTlsFiles(ca, certificate, key)


def _ask_http(url: str, timeout_s: float) -> None:
    """Raises NotWell unless the answer is 200."""
    # No proxy: what is asked is this machine's or this network's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            if answer.status != 200:
                raise NotWell(f"answers {answer.status}")
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise NotWell(f"no answer ({error})") from None


async def _ask_grpc(address: str, files: ClientTlsFiles | None, timeout_s: float, *, engine: bool) -> None:
    """Raises NotWell unless it says, in time, that it serves."""
    credentials = channel_credentials(files) if files else None
    try:
        async with asyncio.timeout(timeout_s):
            if engine:
                await engine_probe.until_serving(address, credentials)
            else:
                await _check(address, credentials)
    except TimeoutError:
        raise NotWell(f"does not serve, or not within {timeout_s:g} s") from None


async def _check(address: str, credentials: grpc.ChannelCredentials | None) -> None:
    async with new_channel(address, credentials, _OPTIONS) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            said = grpc_words.read(error.code(), error.details() or "")
            raise NotWell(f"{error.code().name}: {said.message}") from None
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise NotWell(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
