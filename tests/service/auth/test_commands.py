"""`headrace keys` and `headrace certs`: what they write is what a server takes."""

from __future__ import annotations

import concurrent.futures
import datetime
import pathlib
import stat
import subprocess

import click.testing
import pytest
import structlog
from cryptography import x509
from tests.service.auth.credentials_case import replace

from headrace_credentials.server_tls import ServerTls, TlsFiles
from headrace_service.auth import certificates
from headrace_service.auth.api_keys import ApiKey, KeyFile, Limits
from headrace_service.auth.certs_command import certs
from headrace_service.auth.key_ring import KeyRing
from headrace_service.auth.keys_command import keys
from headrace_service.errors import ServiceError


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "keys.json"


def run_keys(path: pathlib.Path, *arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(keys, [*arguments, "--keys-file", str(path)])


def new_key(path: pathlib.Path, *arguments: str) -> str:
    """The key that the command prints, alone on its standard output."""
    made = run_keys(path, "new", *arguments)
    assert made.exit_code == 0, made.output
    (key,) = made.stdout.splitlines()
    return key


def entries(path: pathlib.Path) -> dict[str, ApiKey]:
    return {key.id: key for key in KeyFile.parse(path.read_bytes()).keys}


def opens(path: pathlib.Path, key: str) -> bool:
    try:
        KeyRing(path).authenticate([("authorization", f"Bearer {key}")])
    except ServiceError:
        return False
    return True


def test_a_new_key_opens_the_server_and_stands_nowhere(path: pathlib.Path) -> None:
    key = new_key(path, "team")
    assert opens(path, key)
    assert key not in path.read_text() and key not in run_keys(path, "list").output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["keys.json"]


def test_options_become_the_entry(path: pathlib.Path) -> None:
    before = datetime.datetime.now(datetime.UTC)
    new_key(
        path, "team", "--allow", "read", "--allow", "admin", "--model", "one", "--model", "two", "--expires", "90d",
        "--requests-per-minute", "60", "--concurrent-streams", "8", "--tokens-per-minute", "100000",
        "--kv-cache-share", "0.5",
    )  # fmt: skip
    made = entries(path)["team"]
    assert (made.permissions, made.models) == (("read", "admin"), ("one", "two"))
    assert made.limits == Limits(60, 8, 100_000, 0.5)
    assert made.expires is not None
    assert abs(made.expires - before - datetime.timedelta(days=90)) < datetime.timedelta(minutes=1)
    new_key(path, "plain")
    plain = entries(path)["plain"]
    assert (plain.permissions, plain.models) == (("generate", "read"), ("*",))
    assert (plain.limits, plain.expires) == (Limits(), None)
    listed = run_keys(path, "list").output
    assert "team" in listed and "plain" in listed


def test_a_revoked_key_opens_nothing_and_its_id_is_not_used_again(path: pathlib.Path) -> None:
    key, other = new_key(path, "team"), new_key(path, "other")
    assert run_keys(path, "revoke", "team").exit_code == 0
    assert not opens(path, key) and opens(path, other)
    assert "revoked" in run_keys(path, "list").output
    for command in ("new", "rotate"):
        refused = run_keys(path, command, "team")
        assert refused.exit_code == 1 and refused.stdout == ""
    assert not opens(path, key)


def test_a_rotated_key_follows_the_old_one_with_its_rights(path: pathlib.Path) -> None:
    old = new_key(path, "team", "--allow", "read", "--requests-per-minute", "5")
    rotated = run_keys(path, "rotate", "team", "--keep-old", "1h")
    new = rotated.stdout.strip()
    assert opens(path, old) and opens(path, new)
    assert (entries(path)["team"].permissions, entries(path)["team"].limits) == (("read",), Limits(5))
    newest = run_keys(path, "rotate", "team").stdout.strip()
    assert [opens(path, key) for key in (old, new, newest)] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("new", "a b"), "id"),
        (("new", "team", "--allow", "write"), "write"),
        (("new", "team", "--requests-per-minute", "-1"), "requests_per_minute"),
        (("new", "team", "--kv-cache-share", "2"), "kv_cache_share"),
        (("new", "team", "--kv-cache-share", "nan"), "kv_cache_share"),
        (("new", "team", "--expires", "soon"), "soon"),
        (("new", "team", "--expires", "0d"), "0d"),
        (("new", "team", "--model", ""), "models"),
        (("revoke", "nobody"), "nobody"),
        (("rotate", "nobody"), "nobody"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line_and_changes_nothing(
    path: pathlib.Path, arguments: tuple[str, ...], names: str
) -> None:
    new_key(path, "there")
    before = path.read_bytes()
    refused = run_keys(path, *arguments)
    assert refused.exit_code in (1, 2) and refused.stdout == ""
    assert names in refused.stderr.splitlines()[-1]
    assert path.read_bytes() == before


@pytest.mark.parametrize("key_id", ["a/b", ".a", "", "x" * 65])
def test_an_id_that_no_key_may_have_is_refused_with_the_rule(path: pathlib.Path, key_id: str) -> None:
    refused = run_keys(path, "new", key_id)
    assert refused.exit_code == 1 and "must be 1 to 64 of A-Z a-z 0-9 . _ -" in refused.stderr
    assert not path.exists()


def test_an_empty_key_file_is_said_to_be_empty(path: pathlib.Path) -> None:
    path.write_bytes(b"\n")
    assert f"{path}: is empty" in run_keys(path, "list").stderr


def test_a_file_that_is_broken_or_missing_is_named_and_left(path: pathlib.Path) -> None:
    assert "keys.json" in run_keys(path, "list").stderr
    assert run_keys(path, "revoke", "a").exit_code == 1
    path.write_text("{")
    path.chmod(0o600)
    for command in ("new", "revoke", "rotate"):
        refused = run_keys(path, command, "a")
        assert refused.exit_code == 1 and "keys.json" in refused.stderr
    assert path.read_text() == "{"
    assert "absent" in run_keys(path.parent / "absent" / "k.json", "new", "a").stderr


def test_who_may_read_the_file_stays_and_links_are_followed(path: pathlib.Path) -> None:
    new_key(path, "one")
    path.chmod(0o640)
    link = path.parent / "link.json"
    link.symlink_to(path)
    new_key(link, "two")
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert set(entries(path)) == {"one", "two"}


def test_commands_at_the_same_time_lose_no_entry(path: pathlib.Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        # click's runner swaps the process's streams, so the callback is called as it is.
        made = [
            pool.submit(keys.commands["new"].callback, f"k{n}", path, ("read",), (), None)  # type: ignore[misc]
            for n in range(24)
        ]
        for one in made:
            one.result()
    assert set(entries(path)) == {f"k{n}" for n in range(24)}


# -- certificates


def run_certs(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(certs, [str(argument) for argument in arguments])


def test_a_first_installation_has_what_a_server_and_openssl_take(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "certs"
    made = run_certs("init", folder, "--host", "llm.example.org", "--host", "10.0.0.7")
    assert made.exit_code == 0, made.output
    assert run_certs("client", folder, "app-1").exit_code == 0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {
        "ca.pem": 0o644, "ca.key": 0o600, "server.pem": 0o644, "server.key": 0o600, "app-1.pem": 0o644,
        "app-1.key": 0o600,
    }  # fmt: skip
    ServerTls(TlsFiles(folder / "server.pem", folder / "server.key", folder / "ca.pem"), structlog.get_logger())
    for purpose, name in (("sslserver", "server"), ("sslclient", "app-1")):
        command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", folder / "ca.pem"]
        subprocess.run([*command, folder / f"{name}.pem"], check=True, capture_output=True, timeout=600)
        other = "sslclient" if purpose == "sslserver" else "sslserver"
        wrong = subprocess.run(
            [*command[:4], other, *command[5:], folder / f"{name}.pem"], check=False, capture_output=True, timeout=60
        )
        assert wrong.returncode != 0
    names = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["llm.example.org", "localhost"]
    assert [str(ip) for ip in names.value.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1", "::1"]


def test_nothing_is_overwritten_unless_asked(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "certs"
    run_certs("init", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run_certs("init", folder).exit_code == 1
    assert run_certs("server", folder).exit_code == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert run_certs("server", folder, "--replace", "--host", "new.example.org").exit_code == 0
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"server.pem", "server.key"}


@pytest.mark.parametrize(
    "arguments", [("client", "../x"), ("client", "ca"), ("client", "server"), ("client", "a/b"), ("client", "")]
)
def test_a_client_has_a_name_that_is_no_path(tmp_path: pathlib.Path, arguments: tuple[str, str]) -> None:
    folder = tmp_path / "certs"
    run_certs("init", folder)
    refused = run_certs(arguments[0], folder, arguments[1])
    assert refused.exit_code == 1 and "must be 1 to 64" in refused.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"certs"} and len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("host", ["a b", "http://x", "x:50051", "", "größe.example"])
def test_a_host_is_a_name_or_an_address(tmp_path: pathlib.Path, host: str) -> None:
    refused = run_certs("init", tmp_path / "certs", "--host", host)
    assert refused.exit_code == 1 and repr(host) in refused.stderr
    assert list((tmp_path / "certs").iterdir()) == []


def test_without_a_ca_nothing_is_signed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "certs").mkdir()
    refused = run_certs("client", tmp_path / "certs", "app")
    assert refused.exit_code == 1 and "ca.key" in refused.stderr
    run_certs("init", tmp_path / "certs")
    (tmp_path / "certs" / "ca.key").chmod(0o644)
    assert "everybody may read it" in run_certs("client", tmp_path / "certs", "app").stderr


def test_no_certificate_outlives_its_ca(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "certs"
    refused = run_certs("init", folder, "--ca-days", 10, "--days", 11)
    assert refused.exit_code == 2 and "--ca-days, 10" in refused.stderr
    assert run_certs("init", folder, "--ca-days", 10, "--days", 10).exit_code == 0
    refused = run_certs("server", folder, "--replace")
    assert refused.exit_code == 1 and "is valid for 10 more days" in refused.stderr
    assert run_certs("server", folder, "--replace", "--days", 10).exit_code == 0
    assert run_certs("client", folder, "app", "--days", 10).exit_code == 0


def test_a_ca_that_nobody_would_trust_signs_nothing(tmp_path: pathlib.Path) -> None:
    folder, other = tmp_path / "certs", tmp_path / "other"
    for each in (folder, other):
        run_certs("init", each)
    key = (folder / "ca.key").read_bytes()
    for wrong, why in (((other / "ca.key").read_bytes(), "is not the key of"), (b"x", "holds no private key")):
        replace(folder / "ca.key", wrong)
        refused = run_certs("client", folder, "app")
        assert refused.exit_code == 1 and f"ca.key: {why}" in refused.stderr
    replace(folder / "ca.key", key)
    expired = certificates.new_ca("CA", 0)
    replace(folder / "ca.key", expired.key_pem())
    replace(folder / "ca.pem", expired.certificate_pem())
    refused = run_certs("client", folder, "app")
    assert refused.exit_code == 1 and "ca.pem: has expired" in refused.stderr
    assert not (folder / "app.pem").exists()
