"""API keys, and the file that lists them.

Owns the key's form, the file's schema (JSON, checked field by field), and the match of a presented
key against all entries. Where the file lies and when it is read again is `key_ring`'s and
`keys_command`'s business.

A key is 32 random bytes. The file holds the SHA-256 of its text and nothing else of it: a slow hash
protects secrets that can be guessed, and nobody guesses 256 random bits, so that a plain one, which
costs a call a microsecond, is right here. Presented keys are compared by `hmac.compare_digest` with
every entry, without leaving at the first that matches.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import secrets
from typing import Annotated

import msgspec

from headrace_service.auth import permissions

# A match takes 0.1 us for each entry, on the event loop.
MAX_KEYS = 4096
# So that a key in a log or a repository is found by those who look for such things.
_KEY_PREFIX = "hr-"
_KEY_BYTES = 32
_MAX_U32 = (1 << 32) - 1
_MAX_I63 = (1 << 63) - 1
ALL_MODELS = "*"

_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
ID_RULE = "must be 1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first"
KeyId = Annotated[str, msgspec.Meta(pattern=_ID_PATTERN)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Time = Annotated[datetime.datetime, msgspec.Meta(tz=True)]


class InvalidKeyFile(ValueError):
    """A key file breaks a rule; the text names entry and rule, and holds no secret."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one key may take of each model, over all services and engines of it; 0: no limit.

    Attributes:
        requests_per_minute: requests accepted.
        concurrent_streams: requests waiting or running, and subscriptions, at one time.
        tokens_per_minute: prompt and output tokens.
        kv_cache_share: share of the blocks of each engine's KV cache, above 0 to 1.
    """

    requests_per_minute: Annotated[int, msgspec.Meta(ge=0, le=_MAX_U32)] = 0
    concurrent_streams: Annotated[int, msgspec.Meta(ge=0, le=_MAX_U32)] = 0
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=0, le=_MAX_I63)] = 0
    kv_cache_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class PreviousSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The secret before a rotation, good until it expires."""

    sha256: Sha256
    expires: Time


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One API key of a key file: its secret's hash, tenant, rights and quotas.

    Attributes:
        id: names the caller: its tenant, and its name in the audit log. Never used again for
            somebody else.
        sha256: hex digest of the key's text.
        permissions: groups and full method names; see `permissions`.
        models: names of models, or "*" for all.
        limits: quotas.
        expires: from when on the key is refused.
        disabled: whether it is refused in any case.
        previous: what `headrace keys rotate` left valid for a while.
    """

    id: KeyId
    sha256: Sha256
    permissions: tuple[str, ...]
    models: tuple[str, ...]
    limits: Limits = Limits()
    expires: Time | None = None
    disabled: bool = False
    previous: PreviousSecret | None = None

    def allows_model(self, model: str) -> bool:
        """Returns whether the key may use a model."""
        return ALL_MODELS in self.models or model in self.models

    def accepts(self, digest: bytes, now: datetime.datetime) -> bool:
        """Returns whether a key of this digest (32 bytes) opens this entry now.

        Takes the same time whether it does or not.
        """
        current = hmac.compare_digest(bytes.fromhex(self.sha256), digest)
        previous = self.previous is not None and hmac.compare_digest(bytes.fromhex(self.previous.sha256), digest)
        in_time = self.expires is None or now < self.expires
        overlap = self.previous is not None and now < self.previous.expires
        return not self.disabled and in_time and (current or (previous and overlap))


def is_id(text: str) -> bool:
    """Whether an entry may have this id."""
    return re.match(_ID_PATTERN, text) is not None


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a key file."""

    keys: tuple[ApiKey, ...]

    @staticmethod
    def parse(data: bytes) -> KeyFile:
        """Returns the entries that a key file's content holds.

        Raises:
            InvalidKeyFile: it is no JSON, a field is unknown, missing or out of range, or an entry
                contradicts another.
        """
        if not data.strip():
            raise InvalidKeyFile('is empty; a file without keys is {"keys": []}')
        try:
            file = msgspec.json.decode(data, type=KeyFile)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidKeyFile(str(error)) from None
        file._check()
        return file

    def encode(self) -> bytes:
        """Returns the content of the key file that holds these entries."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def _check(self) -> None:
        if len(self.keys) > MAX_KEYS:
            raise InvalidKeyFile(f"keys: has {len(self.keys)} entries; must have at most {MAX_KEYS}")
        _refuse_twice("id", [key.id for key in self.keys])
        _refuse_twice("sha256", [key.sha256 for key in self.keys])
        for key in self.keys:
            unknown = permissions.unknown(key.permissions)
            if unknown:
                groups = ", ".join(permissions.Permission)
                raise InvalidKeyFile(
                    f"keys: {key.id}: permissions: {unknown[0]!r} is neither a group ({groups}) nor a full method name"
                )
            if not key.models or "" in key.models:
                raise InvalidKeyFile(f'keys: {key.id}: models: must name at least one model, or "*"')


class KeyTable:
    """The entries of a key file, ready to be matched with keys that callers send.

    Args:
        file: where they stand.
    """

    def __init__(self, file: KeyFile) -> None:
        self._by_id = {key.id: key for key in file.keys}
        self._ends = [key.expires for key in file.keys if key.expires is not None]
        self._ends += [key.previous.expires for key in file.keys if key.previous is not None]
        self._digests = [
            (bytes.fromhex(secret), key)
            for key in file.keys
            for secret in (key.sha256, *([key.previous.sha256] if key.previous else ()))
        ]

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, key_id: str) -> ApiKey | None:
        """Returns the entry whose key has this id."""
        return self._by_id.get(key_id)

    def expires_between(self, begin: datetime.datetime, end: datetime.datetime) -> bool:
        """Returns whether a key ends after `begin` and not after `end`.

        A key from before a rotation counts too.
        """
        return any(begin < moment <= end for moment in self._ends)

    def match(self, digest: bytes, now: datetime.datetime) -> ApiKey | None:
        """Returns the entry that a presented key's digest opens now."""
        found = None
        for secret, key in self._digests:
            if hmac.compare_digest(secret, digest):
                found = key
        return found if found is not None and found.accepts(digest, now) else None


def new_key() -> str:
    """Returns a new random key."""
    return _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> bytes:
    """Returns the SHA-256 (32 bytes) of a key's text."""
    return hashlib.sha256(key.encode()).digest()


def _refuse_twice(field: str, values: list[str]) -> None:
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise InvalidKeyFile(f"keys[{index}]: {field}: stands in an earlier entry too")
        seen.add(value)
