"""The actor of one node's service: it supervises a `headrace service` process.

Owns the file by which that process learns of engines that come and go, and what is reported of it.
The service listens at the node's own address in the cluster.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_health.address import joined
from headrace_ray import nodes
from headrace_ray.authority import Authority
from headrace_ray.config import service_config
from headrace_ray.reports import Report, State
from headrace_ray.supervised import Supervised
from headrace_service.config import ServiceConfig
from headrace_supervisor.settings import ConfigError

_KILL_AFTER_S = 10.0
_ASKED_TIMEOUT_S = 2.0


class ServiceSpec(NamedTuple):
    """What a service's actor is made from.

    Attributes:
        name: the service's, in logs.
        settings: of `headrace service`, by name.
        authority: signs the certificate that it shows to engines.
        port: where it listens.
    """

    name: str
    settings: Mapping[str, Any]
    authority: Authority
    port: int


class Service:
    """One service. All methods but the first are called by Ray, in one event loop."""

    def __init__(self, spec: ServiceSpec) -> None:
        self._spec = spec
        self._node = nodes.own()
        self._process = Supervised()
        self._file = self._process.folder / "engines"
        self._file.touch(mode=0o600)
        self._probe = f"unix:{self._process.folder / 'probe.sock'}"
        self._grace_s = 0.0
        self._failure = ""
        self._was_started = False

    async def start(self) -> None:
        """Starts the service, once however often this is called."""
        if self._was_started:
            return
        self._was_started = True
        try:
            # Fetching a tokenizer of a hub takes a while.
            config = await asyncio.to_thread(self._config)
        except ConfigError as error:
            self._failure = str(error)
            return
        except Exception as error:
            # Nobody waits for this call: the report says what is wrong with the node.
            self._failure = f"{type(error).__name__}: {error}"
            return
        self._grace_s = config.shutdown_grace_s
        self._process.start(self._spec.name, "headrace_service", config.model_dump_json())

    async def follow(self, engines: Collection[str]) -> None:
        """Has the service know these engines, HOST:PORT each, and no others, within a second."""
        new = self._file.with_name("engines.new")
        new.write_text("".join(f"{address}\n" for address in engines), encoding="utf-8")
        os.replace(new, self._file)

    async def report(self) -> Report:
        """Returns what the service does now; serving: a generation would be computed."""
        failure = self._failure or self._process.failure
        serves = not failure and await self._serves()
        state: State = "failed" if failure else "serving" if serves else "starting"
        return Report(state, self._node.node_id, self._address, None, failure, self._process.restarts)

    async def stop(self) -> None:
        """Ends the service; open streams may go on for its own grace time."""
        await self._process.stop(self._grace_s + _KILL_AFTER_S)

    @property
    def _address(self) -> str:
        return joined(self._node.address, self._spec.port)

    def _config(self) -> ServiceConfig:
        """Returns the settings of the service on this node. Raises ConfigError."""
        files = self._spec.authority.client_files(self._process.folder, "service")
        private = {
            "engines_file": str(self._file),
            "engine_tls_ca": str(files.ca),
            "engine_tls_cert": str(files.certificate),
            "engine_tls_key": str(files.key),
            "probe": self._probe,
            "service_name": self._spec.name[:64],
        }
        return service_config(self._spec.settings, self._address, **private)

    async def _serves(self) -> bool:
        async with grpc.aio.insecure_channel(self._probe, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_ASKED_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
