"""A host that shows the wrong certificate, or sees one, is refused by name; the right one joins."""

from __future__ import annotations

import pathlib
from typing import Any

from tests.backend.backend_harness import until
from tests.backend.hosts.host_harness import backend_of_hosts, running_agent, write_secret, write_two_layers

from headrace_service.auth.certificates import Identity, new_ca, new_client, new_server


def written(folder: pathlib.Path, name: str, identity: Identity) -> dict[str, str]:
    """Writes an identity; the paths of its certificate and key."""
    paths = {"cert": identity.certificate_pem(), "key": identity.key_pem()}
    for kind, data in paths.items():
        path = folder / f"{name}.{kind}"
        path.write_bytes(data)
        path.chmod(0o600)
    return {kind: str(folder / f"{name}.{kind}") for kind in paths}


async def test_certificates_of_another_authority_are_named_and_never_taken(tmp_path: pathlib.Path) -> None:
    model = write_two_layers(tmp_path / "layers")
    ours, theirs = new_ca("CA", 2), new_ca("CA", 2)
    authorities = {name: written(tmp_path, name, ca)["cert"] for name, ca in (("ours", ours), ("theirs", theirs))}
    engine = written(tmp_path, "engine", new_server(ours, ("127.0.0.1",), 2))
    good, strange = (written(tmp_path, name, new_client(ca, name, 2)) for name, ca in (("good", ours), ("bad", theirs)))

    def shows(identity: dict[str, str], trusts: str = "ours") -> dict[str, Any]:
        tls = {"ca": authorities[trusts], **identity}
        return {f"engine_tls_{kind}": path for kind, path in tls.items()}

    tls = {"tls_cert": engine["cert"], "tls_key": engine["key"], "tls_client_ca": authorities["ours"]}
    async with backend_of_hosts(tmp_path, model, pp=2, backend=tls) as (backend, address):
        for settings, said in (
            (shows(good, trusts="theirs"), "the TLS handshake fails: another authority's certificate"),
            (shows(strange), "it may not trust this host's certificate (its tls_client_ca)"),
        ):
            with running_agent(tmp_path, model, address, **settings) as agent:
                await until(lambda agent=agent, said=said: said in agent.log)
                assert not agent.log_lines("joined")
        # A secret is asked for behind the certificate.
        wrong = write_secret(tmp_path / "wrong", "another secret of sixteen bytes")
        with running_agent(tmp_path, model, address, **shows(good), engine_token_file=str(wrong)) as agent:
            assert await agent.wait_exit() == 2
            assert "refuses this host: a valid bearer token is required" in agent.log
        assert not backend.log_lines("host joined")
        # Elsewhere the engine has another name than in its certificate.
        named = {"join": f"localhost:{address.rpartition(':')[2]}", "engine_tls_name": "127.0.0.1"}
        with running_agent(tmp_path, model, address, **shows(good), **named):
            await until(lambda: backend.log_lines("ready"))
