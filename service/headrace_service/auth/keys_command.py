"""`headrace keys`: makes, lists, revokes and rotates API keys in a key file.

Owns the file's changes: under a lock, whole or not at all, readable by its owner alone when it is
new. A running server follows within `credentials_reload_s`. A key is printed once, alone on
standard output, and stands nowhere afterwards.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec
import rich.box
import rich.console
import rich.table

from headrace_credentials import files as credential_files
from headrace_credentials.files import CredentialError
from headrace_service.auth import api_keys
from headrace_service.auth.api_keys import ALL_MODELS, ApiKey, InvalidKeyFile, KeyFile, Limits, PreviousSecret
from headrace_service.auth.permissions import Permission

_HELP = {"help_option_names": ["--help", "-h"]}
_NEW_FILE_MODE = 0o600
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}

_file_option = click.option(
    "--keys-file",
    "path",
    required=True,
    envvar="HEADRACE_KEYS_FILE",
    type=click.Path(path_type=pathlib.Path, dir_okay=False),
    help="the key file, as the server's --keys-file; also HEADRACE_KEYS_FILE",
)


def _span(_: click.Context, __: click.Parameter, text: str | None) -> datetime.timedelta | None:
    """The type of an option that takes a length of time."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,5})([mhd])", text)
    if not found:
        raise click.BadParameter(f"{text!r} is no length of time, as in 30m, 12h or 90d")
    return datetime.timedelta(**{_UNITS[found[2]]: int(found[1])})


@click.group(context_settings=_HELP)
def keys() -> None:
    """Makes, lists, revokes and rotates the API keys of a server."""


@keys.command(context_settings=_HELP)
@click.argument("key_id", metavar="ID")
@_file_option
@click.option(
    "--allow",
    multiple=True,
    default=(Permission.GENERATE.value, Permission.READ.value),
    show_default=True,
    help=(
        f"a group of methods ({', '.join(Permission)}) or one method, as headrace.v1.InferenceService/Tokenize; may be "
        "repeated"
    ),
)
@click.option("--model", "models", multiple=True, help="name of a model the key may use; may be repeated; default: all")
@click.option(
    "--expires", callback=_span, metavar="TIME", help="refuse the key after this time, as in 90d; default: never"
)
@click.option("--requests-per-minute", type=int, default=0, help="requests accepted per minute; default: no limit")
@click.option(
    "--concurrent-streams", type=int, default=0, help="requests and subscriptions at one time; default: no limit"
)
@click.option("--tokens-per-minute", type=int, default=0, help="prompt and output tokens per minute; default: no limit")
@click.option("--kv-cache-share", type=float, default=0.0, help="share of the KV cache, up to 1; default: no limit")
def new(
    key_id: str,
    path: pathlib.Path,
    allow: tuple[str, ...],
    models: tuple[str, ...],
    expires: datetime.timedelta | None,
    **limits: Any,
) -> None:
    """Makes a key for ID, which names its holder from then on.

    Example: headrace keys new team-search --keys-file keys.json --requests-per-minute 600
    """
    if not api_keys.is_id(key_id):
        raise click.ClickException(f"{key_id!r}: an id {api_keys.ID_RULE}")
    key = api_keys.new_key()
    entry = ApiKey(
        id=key_id,
        sha256=api_keys.digest_of(key).hex(),
        permissions=tuple(dict.fromkeys(allow)),
        models=tuple(dict.fromkeys(models)) or (ALL_MODELS,),
        limits=Limits(**limits),
        expires=_now() + expires if expires else None,
    )

    def add(file: KeyFile) -> KeyFile:
        if any(known.id == key_id for known in file.keys):
            raise click.ClickException(
                f"{key_id}: stands in {path} already; ids are not used again, `keys rotate` gives a holder a new key"
            )
        return KeyFile((*file.keys, entry))

    _change(path, add, may_be_new=True)
    _show(key, f"{key_id}: the key above is shown once; {path} holds its SHA-256")


@keys.command(name="list", context_settings=_HELP)
@_file_option
def list_keys(path: pathlib.Path) -> None:
    """Lists the entries of a key file."""
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False, collapse_padding=True)
    for title in ("id", "state", "may call", "models", "limits", "expires"):
        table.add_column(title, overflow="fold", no_wrap=title == "limits")
    for key in _read(path).keys:
        expires = f"{key.expires:%Y-%m-%d %H:%M} UTC" if key.expires else "never"
        table.add_row(
            key.id, _state(key), "\n".join(key.permissions), "\n".join(key.models), _limits(key.limits), expires
        )
    rich.console.Console(highlight=False, markup=False).print(table)


@keys.command(context_settings=_HELP)
@click.argument("key_id", metavar="ID")
@_file_option
def revoke(key_id: str, path: pathlib.Path) -> None:
    """Disables ID's key, for good.

    The entry stays, so that nobody else gets its name and its requests.
    """
    _change(path, lambda file: _replaced(file, key_id, lambda key: msgspec.structs.replace(key, disabled=True)))
    click.echo(f"{key_id}: revoked; servers refuse it once they have looked at the file again", err=True)


@keys.command(context_settings=_HELP)
@click.argument("key_id", metavar="ID")
@_file_option
@click.option(
    "--keep-old",
    callback=_span,
    metavar="TIME",
    help="let the old key be valid this long, as in 24h; default: not at all",
)
def rotate(key_id: str, path: pathlib.Path, keep_old: datetime.timedelta | None) -> None:
    """Gives ID a new key with the rights of the old one."""
    key = api_keys.new_key()

    def rotated(entry: ApiKey) -> ApiKey:
        if entry.disabled:
            raise click.ClickException(f"{key_id}: was revoked")
        previous = PreviousSecret(entry.sha256, _now() + keep_old) if keep_old else None
        return msgspec.structs.replace(entry, sha256=api_keys.digest_of(key).hex(), previous=previous)

    _change(path, lambda file: _replaced(file, key_id, rotated))
    _show(key, f"{key_id}: the key above is shown once; the old one is valid {_until(keep_old)}")


def _until(keep_old: datetime.timedelta | None) -> str:
    return f"until {(_now() + keep_old).isoformat(timespec='seconds')}" if keep_old else "no more"


def _show(key: str, note: str) -> None:
    click.echo(key)
    click.echo(note, err=True)


def _read(path: pathlib.Path) -> KeyFile:
    try:
        return KeyFile.parse(credential_files.read(path, private=False))
    except (CredentialError, InvalidKeyFile) as error:
        raise click.ClickException(str(error) if isinstance(error, CredentialError) else f"{path}: {error}") from None


def _replaced(file: KeyFile, key_id: str, change: Callable[[ApiKey], ApiKey]) -> KeyFile:
    if all(key.id != key_id for key in file.keys):
        raise click.ClickException(f"{key_id}: no such entry; `keys list` shows them")
    return KeyFile(tuple(change(key) if key.id == key_id else key for key in file.keys))


def _change(path: pathlib.Path, change: Callable[[KeyFile], KeyFile], *, may_be_new: bool = False) -> None:
    """Reads the file, changes it and writes it, while nobody else does."""
    try:
        with _locked(path.absolute().parent):
            file = KeyFile(()) if may_be_new and not path.exists() else _read(path)
            data = change(file).encode()
            KeyFile.parse(data)
            _write(path.resolve(), data)
    except InvalidKeyFile as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or path}: {error.strerror}") from None


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Holds the lock on a folder, which needs no file of its own."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: pathlib.Path, data: bytes) -> None:
    """Replaces a file in one step.

    An existing one keeps its owner, as far as that is allowed, and who may read it.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            _take_over(file.fileno(), path)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _take_over(descriptor: int, path: pathlib.Path) -> None:
    os.fchmod(descriptor, _NEW_FILE_MODE)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        before = path.stat()
        os.fchown(descriptor, before.st_uid, before.st_gid)
        os.fchmod(descriptor, _NEW_FILE_MODE | before.st_mode & 0o044)


def _state(key: ApiKey) -> str:
    if key.disabled:
        return "revoked"
    if key.expires is not None and key.expires <= _now():
        return "expired"
    return "valid, old key too" if key.previous is not None and key.previous.expires > _now() else "valid"


def _limits(limits: Limits) -> str:
    set_ones = {name: value for name, value in msgspec.structs.asdict(limits).items() if value}
    return "\n".join(f"{name} {value}" for name, value in set_ones.items()) or "none"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
