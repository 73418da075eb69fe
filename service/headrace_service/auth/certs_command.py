"""`headrace certs`: certificates for a first installation, in a folder.

Owns the folder's files and their modes: NAME.pem for everybody, NAME.key for the owner alone.
Nothing is overwritten unless --replace says so; what is replaced is replaced file by file, which a
running server sits out. The CA's key is needed for new certificates only and need not lie on the
server.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator

import click

from headrace_credentials import files as credential_files
from headrace_credentials import pem
from headrace_credentials.files import CredentialError
from headrace_service.auth import certificates
from headrace_service.auth.certificates import Identity

_HELP = {"help_option_names": ["--help", "-h"]}
_CA = "ca"
_SERVER = "server"
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEFAULT_HOSTS = ("localhost", "127.0.0.1", "::1")

_folder = click.argument("folder", type=click.Path(path_type=pathlib.Path, file_okay=False))
_hosts = click.option(
    "--host",
    "hosts",
    multiple=True,
    help=(
        "host name or IP address under which clients reach the server; may be repeated; localhost and loopback are "
        "always in"
    ),
)
_days = click.option(
    "--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="days the certificate is valid"
)
_replace = click.option("--replace", is_flag=True, help="replace files that exist")


@click.group(context_settings=_HELP)
def certs() -> None:
    """Makes a CA, and certificates of servers and clients, in FOLDER."""


@certs.command(context_settings=_HELP)
@_folder
@_hosts
@_days
@click.option("--ca-days", type=click.IntRange(1, 7300), default=3650, show_default=True, help="days the CA is valid")
def init(folder: pathlib.Path, hosts: tuple[str, ...], days: int, ca_days: int) -> None:
    """Makes a CA and a server's certificate.

    Example: headrace certs init certs --host llm.example.org
    """
    with _refusals():
        if days > ca_days:
            raise click.UsageError(f"--days: {days} is beyond the CA's own --ca-days, {ca_days}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        server_hosts = _all_hosts(hosts)
        ca = certificates.new_ca(f"Headrace CA {os.urandom(4).hex()}", ca_days)
        server = certificates.new_server(ca, server_hosts, days)
        _refuse_existing(folder, _CA, _SERVER)
        _store(folder, _CA, ca)
        _store(folder, _SERVER, server)
    click.echo(f"clients need      {folder / 'ca.pem'}")
    click.echo(f"the server needs  --tls-cert {folder / 'server.pem'} --tls-key {folder / 'server.key'}")
    click.echo(f"for mTLS also     --tls-client-ca {folder / 'ca.pem'}, and clients what `headrace certs client` makes")
    click.echo(f"keep apart        {folder / 'ca.key'}: who has it can be any server and any client")


@certs.command(context_settings=_HELP)
@_folder
@_hosts
@_days
@_replace
def server(folder: pathlib.Path, hosts: tuple[str, ...], days: int, replace: bool) -> None:
    """Makes a server's certificate with the folder's CA.

    A running server takes it with --replace.
    """
    with _refusals():
        identity = certificates.new_server(_ca(folder, days), _all_hosts(hosts), days)
        _issue(folder, _SERVER, identity, replace)


@certs.command(context_settings=_HELP)
@_folder
@click.argument("name")
@_days
@_replace
def client(folder: pathlib.Path, name: str, days: int, replace: bool) -> None:
    """Makes the certificate of a client called NAME.

    Servers with --tls-client-ca ask for one. The folder's CA signs it.
    """
    with _refusals():
        if not _CLIENT_NAME.fullmatch(name) or name in (_CA, _SERVER):
            raise click.ClickException(
                f"name {name[:64]!r}: must be 1 to 64 letters, digits, '.', '_' or '-', begin with a letter or digit, "
                "and be neither ca nor server"
            )
        _issue(folder, name, certificates.new_client(_ca(folder, days), name, days), replace)


def _issue(folder: pathlib.Path, name: str, identity: Identity, replace: bool) -> None:
    if not replace:
        _refuse_existing(folder, name)
    _store(folder, name, identity)
    until = identity.certificate.not_valid_after_utc.date().isoformat()
    click.echo(f"{folder / name}.pem and {folder / name}.key, valid to {until}")


def _all_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*hosts, *_DEFAULT_HOSTS)))


def _ca(folder: pathlib.Path, days: int) -> Identity:
    """Returns the folder's CA, if it can sign a certificate of so many days.

    Raises:
        CredentialError: it has expired, its files do not belong together, or one can't be used.
        ValueError: it ends before the certificate would, or has no key as `certs init` makes.
    """
    paths = folder / f"{_CA}.pem", folder / f"{_CA}.key"
    key = credential_files.read(paths[1], private=True)
    certificate = credential_files.read(paths[0], private=False)
    left = pem.checked_pair(paths[0], certificate, paths[1], key).first.not_valid_after_utc - _now()
    days_left = math.ceil(left / datetime.timedelta(days=1))
    if days > days_left:
        raise ValueError(
            f"--days: {paths[0]} is valid for {days_left} more days; clients would trust no longer than that"
        )
    return Identity.from_pem(key, certificate)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _refuse_existing(folder: pathlib.Path, *names: str) -> None:
    for path in (folder / f"{name}{suffix}" for name in names for suffix in (".pem", ".key")):
        if path.exists():
            raise click.ClickException(f"{path} exists")


def _store(folder: pathlib.Path, name: str, identity: Identity) -> None:
    _write(folder / f"{name}.key", identity.key_pem(), 0o600)
    _write(folder / f"{name}.pem", identity.certificate_pem(), 0o644)


def _write(path: pathlib.Path, data: bytes, mode: int) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, path)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turns mistakes into one line."""
    try:
        yield
    except (CredentialError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
