"""The key file: what may stand in it, which keys it opens to, and how its changes take effect."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from tests.service.auth.credentials_case import bearer, entry, replace, write_keys

from headrace_credentials import files as credential_files
from headrace_credentials.files import CredentialError
from headrace_service.auth import api_keys
from headrace_service.auth.api_keys import ApiKey, InvalidKeyFile, KeyFile, KeyTable, Limits, PreviousSecret
from headrace_service.auth.key_ring import KeyRing
from headrace_service.errors import ServiceError

NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
KEYS = [api_keys.new_key() for _ in range(8)]
DIGESTS = [api_keys.digest_of(key) for key in KEYS]


def an_entry(**changes: Any) -> dict[str, Any]:
    """A valid entry as JSON, but for the changes; None takes a field away."""
    fields = {"id": "a", "sha256": DIGESTS[0].hex(), "permissions": ["generate"], "models": ["*"], **changes}
    return {name: value for name, value in fields.items() if value is not None}


def test_a_new_key_has_256_random_bits_and_is_known_by_its_hash_alone(tmp_path: pathlib.Path) -> None:
    keys = {api_keys.new_key() for _ in range(100)}
    assert len(keys) == 100 and {len(key) for key in keys} == {len("hr-") + 43}
    path = write_keys(tmp_path / "keys.json", *(entry(key, f"k{index}") for index, key in enumerate(keys)))
    assert not any(key in path.read_text() or key[3:] in path.read_text() for key in keys)


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ([an_entry(id="")], "id"),
        ([an_entry(id="a b")], "id"),
        ([an_entry(id="a\n")], "id"),
        ([an_entry(id="x" * 65)], "id"),
        ([an_entry(id="-a")], "id"),
        ([an_entry(id=7)], "id"),
        ([an_entry(sha256="AB" * 32)], "sha256"),
        ([an_entry(sha256="ab" * 31)], "sha256"),
        ([an_entry(sha256=None)], "sha256"),
        ([an_entry(permissions=None)], "permissions"),
        ([an_entry(permissions=["write"])], "permissions"),
        ([an_entry(permissions=["headrace.v1.InferenceService/Nothing"])], "permissions"),
        ([an_entry(permissions="read")], "permissions"),
        ([an_entry(models=None)], "models"),
        ([an_entry(models=[])], "models"),
        ([an_entry(models=[""])], "models"),
        ([an_entry(limits={"requests_per_minute": -1})], "requests_per_minute"),
        ([an_entry(limits={"requests_per_minute": 1 << 32})], "requests_per_minute"),
        ([an_entry(limits={"tokens_per_minute": 1 << 63})], "tokens_per_minute"),
        ([an_entry(limits={"kv_cache_share": 1.01})], "kv_cache_share"),
        ([an_entry(limits={"tokens": 1})], "tokens"),
        ([an_entry(expires="2026-11-21T00:00:00")], "expires"),
        ([an_entry(expires="tomorrow")], "expires"),
        ([an_entry(disabled="no")], "disabled"),
        ([an_entry(key="hr-secret")], "key"),
        ([an_entry(previous={"sha256": "ab" * 32})], "previous"),
        ([an_entry(), an_entry(sha256="ab" * 32)], "id"),
        ([an_entry(), an_entry(id="b")], "sha256"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused_by_field(entries: list[Any], names: str) -> None:
    with pytest.raises(InvalidKeyFile, match=names):
        KeyFile.parse(json.dumps({"keys": entries}).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"{}", b"\xff", b'{"keys": 1}', b'{"keys": [], "more": 1}', b'{"keys": [null]}', b"[" * 100_000],
)
def test_what_is_no_key_file_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidKeyFile):
        KeyFile.parse(data)


def test_more_keys_than_a_match_may_take_are_refused() -> None:
    keys = [an_entry(id=f"k{index}", sha256=f"{index:064x}") for index in range(api_keys.MAX_KEYS + 1)]
    KeyFile.parse(json.dumps({"keys": keys[:-1]}).encode())
    with pytest.raises(InvalidKeyFile, match="4096"):
        KeyFile.parse(json.dumps({"keys": keys}).encode())


_times = st.one_of(st.none(), st.datetimes(datetime.datetime(2026, 1, 1), datetime.datetime(2027, 1, 1)))
_entries = st.lists(st.tuples(st.booleans(), _times, st.booleans(), _times), min_size=1, max_size=len(KEYS) // 2)


@given(drawn=_entries, presented=st.integers(0, len(KEYS) - 1))
def test_a_key_opens_its_own_entry_while_that_is_valid_and_no_other(drawn: list[Any], presented: int) -> None:
    """Entry i has key 2i, and key 2i+1 from before a rotation, if there was one."""
    entries, opened = [], None
    for index, (disabled, expires, rotated, overlap) in enumerate(drawn):
        expires = expires and expires.replace(tzinfo=datetime.UTC)
        ends = (overlap or datetime.datetime(2026, 1, 1)).replace(tzinfo=datetime.UTC)
        previous = PreviousSecret(DIGESTS[2 * index + 1].hex(), ends) if rotated else None
        entries.append(
            ApiKey(f"k{index}", DIGESTS[2 * index].hex(), ("read",), ("*",), Limits(), expires, disabled, previous)
        )
        valid = not disabled and (expires is None or expires > NOW)
        if valid and (presented == 2 * index or (presented == 2 * index + 1 and rotated and ends > NOW)):
            opened = f"k{index}"
    file = KeyFile(tuple(entries))
    assert KeyFile.parse(file.encode()) == file
    found = KeyTable(file).match(DIGESTS[presented], NOW)
    assert (found.id if found else None) == opened


@given(st.text(max_size=50))
def test_no_text_but_the_key_opens_it(text: str) -> None:
    table = KeyTable(KeyFile((entry(KEYS[0], "a"),)))
    assert table.match(api_keys.digest_of(text), NOW) is None


# -- the file


@pytest.fixture
def ring(tmp_path: pathlib.Path) -> KeyRing:
    return KeyRing(write_keys(tmp_path / "keys.json", entry(KEYS[0], "a")))


def caller_of(ring: KeyRing, key: str) -> str | None:
    try:
        return ring.authenticate(bearer(key)).key_id
    except ServiceError:
        return None


def test_a_changed_file_takes_effect_and_an_unchanged_one_is_left(ring: KeyRing, tmp_path: pathlib.Path) -> None:
    with structlog.testing.capture_logs() as lines:
        ring.reload()
        write_keys(tmp_path / "keys.json", entry(KEYS[1], "b"))
        assert caller_of(ring, KEYS[1]) is None
        ring.reload()
        assert (caller_of(ring, KEYS[0]), caller_of(ring, KEYS[1])) == (None, "b")
    assert [line["event"] for line in lines] == ["keys.reloaded"]


def test_a_swap_of_links_above_the_file_is_seen(tmp_path: pathlib.Path) -> None:
    """Orchestrators mount secrets so that a file may be older than what it replaces."""
    for name, key in (("new", KEYS[1]), ("old", KEYS[0])):
        (tmp_path / name).mkdir()
        write_keys(tmp_path / name / "keys.json", entry(key, name))
        os.utime(tmp_path / name / "keys.json", (0, 0))
    (tmp_path / "data").symlink_to("old")
    ring = KeyRing(tmp_path / "data" / "keys.json")
    (tmp_path / "next").symlink_to("new")
    (tmp_path / "next").replace(tmp_path / "data")
    ring.reload()
    assert caller_of(ring, KEYS[1]) == "new"


_INVALID: dict[str, Callable[[pathlib.Path], Any]] = {
    "broken": lambda path: replace(path, b'{"keys": ['),
    "empty": lambda path: replace(path, b""),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a named pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    "writable by others": lambda path: replace(path, path.read_bytes(), mode=0o602),
    "writable by the group": lambda path: replace(path, path.read_bytes(), mode=0o620),
    "huge": lambda path: replace(path, b" " * (5 << 20)),
    "half a rule": lambda path: replace(path, json.dumps({"keys": [an_entry(models=[])]}).encode()),
}


@pytest.mark.parametrize("name", _INVALID)
def test_an_invalid_file_is_logged_once_and_the_keys_in_force_stay(
    ring: KeyRing, tmp_path: pathlib.Path, name: str
) -> None:
    path = tmp_path / "keys.json"
    _INVALID[name](path)
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            ring.reload()
    assert [(line["event"], line["log_level"]) for line in lines] == [("keys.not_reloaded", "error")]
    assert str(path) in lines[0]["why"]
    assert caller_of(ring, KEYS[0]) == "a"
    with pytest.raises(CredentialError, match=r"keys\.json"):
        KeyRing(path)


def test_that_a_file_is_valid_again_is_logged_and_its_next_fault_too(ring: KeyRing, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.json"
    valid = path.read_bytes()
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            for content in (b"", valid):
                replace(path, content)
                ring.reload()
                ring.reload()
    assert [line["event"] for line in lines] == ["keys.not_reloaded", "keys.reloaded"] * 2


def test_a_file_of_another_user_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_keys(tmp_path / "keys.json")
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        assert credential_files.read(path, private=True)
    else:
        with pytest.raises(CredentialError, match="belongs to user"):
            credential_files.read(path, private=True)
    os_stat = os.stat_result((0o100600, 0, 0, 1, owner + 7, 0, 0, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda _: os_stat)
    with pytest.raises(CredentialError, match="belongs to user"):
        credential_files.read(path, private=False)


def test_what_is_readable_by_all_is_no_secret_for_keys_but_for_private_keys(tmp_path: pathlib.Path) -> None:
    path = replace(tmp_path / "file", b"x", mode=0o644)
    assert credential_files.read(path, private=False) == b"x"
    with pytest.raises(CredentialError, match="everybody may read it"):
        credential_files.read(path, private=True)


def test_a_caller_loses_its_rights_with_its_key(ring: KeyRing, tmp_path: pathlib.Path) -> None:
    who = ring.authenticate(bearer(KEYS[0]))
    who.check_method("headrace.v1.InferenceService/Generate")
    assert who.may_use_model("any")
    write_keys(tmp_path / "keys.json", entry(KEYS[0], "a", ["read"], models=("one",)))
    ring.reload()
    assert not who.may_use_model("any")
    with pytest.raises(ServiceError, match="permission generate"):
        who.check_method("headrace.v1.InferenceService/Generate")
    # A new secret for the same id is not the one that this caller has shown.
    write_keys(tmp_path / "keys.json", entry(KEYS[1], "a"))
    ring.reload()
    with pytest.raises(ServiceError, match="a valid API key"):
        who.check_model("one")
