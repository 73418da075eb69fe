"""The keys in force, and their file's changes.

Owns the step from a call's metadata to a caller, and reloading: a new file that is valid takes
effect for the next call and for what open streams begin from then on, and ends calls whose key is
gone; one that is not is logged, and the keys in force stay.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Iterable

from headrace_credentials import files as credential_files
from headrace_credentials.files import CredentialError
from headrace_service.auth import api_keys, audit_log, refusals
from headrace_service.auth.api_keys import ApiKey, InvalidKeyFile, KeyFile, KeyTable
from headrace_service.auth.caller import Caller, OpenCalls, end_invalid

_log = audit_log.logger()
_SCHEME = "bearer "


class KeyRing:
    """The keys of one service process.

    Args:
        path: the key file.

    Raises:
        CredentialError: the file cannot be used.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        data = credential_files.read(path, private=False)
        self._table = _parsed(path, data)
        self._loaded = credential_files.fingerprint(data)
        self._complained_of = ""
        self._open_calls: OpenCalls = {}
        self._judged, self._judged_at = self._table, _now()

    def __len__(self) -> int:
        return len(self._table)

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Returns the caller that a call's metadata names.

        Raises:
            ServiceError: UNAUTHENTICATED; there is no authorization, more than one, none of ours,
                or none that is valid now.
        """
        given = [value for name, value in metadata if name == "authorization"]
        presented = given[0] if len(given) == 1 else ""
        if not isinstance(presented, str) or not presented[: len(_SCHEME)].lower().startswith(_SCHEME):
            raise refusals.unauthenticated()
        digest = api_keys.digest_of(presented[len(_SCHEME) :])
        entry = self._table.match(digest, _now())
        if entry is None:
            raise refusals.unauthenticated()
        return Caller(entry.id, lambda: self._still_valid(entry.id, digest), self._open_calls)

    def reload(self) -> None:
        """Takes the file's keys if it has changed and is valid, or is valid again.

        Blocks on the disk; may run in another thread.
        """
        try:
            data = credential_files.read(self._path, private=False)
            fingerprint = credential_files.fingerprint(data)
            if fingerprint == self._loaded and not self._complained_of:
                return
            # What is in force already is taken anew, once, where the log says that it was not.
            table = _parsed(self._path, data)
        except CredentialError as error:
            self._complain(str(error))
            return
        self._table, self._loaded, self._complained_of = table, fingerprint, ""
        _log.info("keys.reloaded", num_keys=len(table))

    def end_invalid_calls(self) -> None:
        """Ends open calls of keys that were revoked, replaced or expired since the last time.

        Call on the event loop.
        """
        table, now = self._table, _now()
        if table is not self._judged or table.expires_between(self._judged_at, now):
            num_ended = end_invalid(self._open_calls)
            if num_ended:
                _log.info("calls.ended_with_their_key", num_calls=num_ended)
        self._judged, self._judged_at = table, now

    def _still_valid(self, key_id: str, digest: bytes) -> ApiKey | None:
        entry = self._table.get(key_id)
        return entry if entry is not None and entry.accepts(digest, _now()) else None

    def _complain(self, why: str) -> None:
        """Logs once what is wrong with the file, until that changes."""
        if why != self._complained_of:
            _log.error("keys.not_reloaded", why=why, num_keys=len(self._table))
        self._complained_of = why


def _parsed(path: pathlib.Path, data: bytes) -> KeyTable:
    try:
        return KeyTable(KeyFile.parse(data))
    except InvalidKeyFile as error:
        raise CredentialError(f"{path}: {error}") from None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
