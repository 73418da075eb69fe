"""The actor of one engine: it supervises a backend on the node where Ray has placed it.

Owns the way from settings to a running backend (model fetched, port chosen, certificate made), what
is reported of it, and its end. Ray gives the actor its GPUs, which the backend inherits by
CUDA_VISIBLE_DEVICES. A backend that dies is started again here, at the same address; the actor
itself is never started again by Ray, whose controller here puts another engine in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_backend.config import BackendConfig
from headrace_credentials.client_tls import channel_credentials
from headrace_health.address import joined
from headrace_ray import nodes
from headrace_ray.authority import Authority
from headrace_ray.engine_watch import EngineWatch
from headrace_ray.reports import Report, State
from headrace_ray.supervised import Supervised
from headrace_supervisor import config as configs
from headrace_supervisor.models.model_launches import read_refusal
from headrace_supervisor.settings import ConfigError

# What a backend gets beyond its own grace time before it is killed.
_KILL_AFTER_S = 10.0


class EngineSpec(NamedTuple):
    """What an engine's actor is made from.

    Attributes:
        name: the engine's, in logs.
        settings: of `headrace backend`, by name.
        authority: signs its certificate.
        ports: first and last port at which it may listen.
    """

    name: str
    settings: Mapping[str, Any]
    authority: Authority
    ports: tuple[int, int]


class NoPort(Exception):
    """All ports of the range are taken on this node."""


class Engine:
    """One engine. All methods but the first are called by Ray, in one event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._node = nodes.own()
        self._process = Supervised()
        self._watch: EngineWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._address = ""
        self._grace_s = 0.0
        self._failure = ""
        self._draining = False
        self._was_started = False

    async def start(self) -> None:
        """Starts the backend, once however often this is called."""
        if self._was_started:
            return
        self._was_started = True
        try:
            await self._start()
        except (ConfigError, NoPort) as error:
            self._failure = str(error)
        except Exception as error:
            # Nobody waits for this call: the report says what is wrong with the node.
            self._failure = f"{type(error).__name__}: {error}"

    async def report(self) -> Report:
        """Returns what the engine does now."""
        seen = self._watch.seen if self._watch is not None else None
        failure = self._failure or self._why_given_up()
        serves = seen is not None and seen.serving and not failure
        state: State = "failed" if failure else "draining" if self._draining else "serving" if serves else "starting"
        return Report(
            state,
            self._node.node_id,
            self._address,
            seen.load if seen is not None and serves else None,
            failure or ("" if serves or seen is None else seen.reason),
            self._process.restarts,
        )

    async def stop(self, drain_s: float) -> None:
        """Ends the backend once it has no requests, or `drain_s` seconds from now.

        Services must have left the engine before, or they send it new ones.
        """
        self._draining = True
        if self._watch is not None and not self._why_given_up():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._watch.until_idle(), drain_s)
        if self._watching is not None:
            self._watching.cancel()
        await self._process.stop(self._grace_s + _KILL_AFTER_S)

    async def _start(self) -> None:
        port = _free_port(self._node.address, self._spec.ports)
        self._address = joined(self._node.address, port)
        # Fetching a model of a hub takes minutes.
        config = await asyncio.to_thread(self._config)
        self._grace_s = config.drain_grace_s
        asker = self._spec.authority.client_files(self._process.folder, "controller")
        self._watch = EngineWatch(self._address, channel_credentials(asker))
        self._watching = asyncio.create_task(self._watch.run())
        if not self._draining:
            self._process.start(self._spec.name, "headrace_backend", config.model_dump_json())

    def _config(self) -> BackendConfig:
        """Returns the settings of the backend on this node. Raises ConfigError."""
        files = self._spec.authority.server_files(self._process.folder, self._node.address)
        private = {
            "listen": self._address,
            "tls_cert": str(files.certificate),
            "tls_key": str(files.key),
            "tls_client_ca": str(files.client_ca),
            "refusal_file": str(self._process.refusal()),
        }
        return configs.load_backend({**self._spec.settings, **private}, None)

    def _why_given_up(self) -> str:
        if not self._process.failure:
            return ""
        refused = read_refusal(self._process.refusal())
        return str(refused) if refused is not None else self._process.failure


def _free_port(host: str, ports: tuple[int, int]) -> int:
    """Returns a port of the range that nobody listens at on this node.

    It is below those that the kernel gives to connections, so it stays free while the backend is
    started again. Two engines may choose the same one at the same moment: one of their backends is
    refused it, and its engine replaced.

    Raises:
        NoPort: there is none.
    """
    first, last = ports
    for port in random.sample(range(first, last + 1), last + 1 - first):
        with contextlib.suppress(OSError), socket.create_server((host, port), family=_family(host)):
            return port
    raise NoPort(f"[engines] ports: all of {first} to {last} are taken on {host}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
