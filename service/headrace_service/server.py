"""A service process that speaks gRPC: its server, its interceptors and which services it serves.

Owns the listeners of gRPC. How the process begins and ends is `service_process`'s.
"""

from __future__ import annotations

import asyncio

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace_protos import private_pool
from headrace_service import listening
from headrace_service.api import admin_handlers, inference_service
from headrace_service.config import ServiceConfig
from headrace_service.kserve import service as kserve
from headrace_service.load_reports import open_rca_service
from headrace_service.load_reports.call_reports import CallReportsInterceptor
from headrace_service.load_reports.load_watch import LoadWatch
from headrace_service.messages.descriptor_pools import DescriptorPools
from headrace_service.messages.foreign_parsing import ForeignParsingInterceptor
from headrace_service.messages.one_request import OneRequestInterceptor
from headrace_service.service_process import ServiceProcess
from headrace_service.tracing.interceptor import TracingInterceptor

_HEALTH_NAME = "grpc.health.v1.Health"


class Service(ServiceProcess):
    """A service process that speaks gRPC, once started."""

    def __init__(self, config: ServiceConfig) -> None:
        super().__init__(config)
        self._load_watch = LoadWatch(lambda: self._core.models)
        self._server = grpc.aio.server(
            interceptors=self._interceptors(),
            options=listening.channel_options(config),
        )

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
        """The outermost first."""
        tracer = self._core.tracer
        tracing = [TracingInterceptor(tracer)] if tracer is not None else []
        auth = self._credentials.interceptor(listening.MAX_METADATA_BYTES)
        return [*tracing, OneRequestInterceptor(), auth, *self._call_reports(), ForeignParsingInterceptor()]

    def _call_reports(self) -> list[CallReportsInterceptor]:
        mode = self._config.load_reports
        return [] if mode == "off" else [CallReportsInterceptor(self._load_watch, always=mode == "always")]

    async def _listen(self) -> list[str]:
        names = self._register()
        health_pb2_grpc.add_HealthServicer_to_server(self._health(names), self._server)
        if self._config.reflection:
            pools = DescriptorPools(private_pool.POOL, descriptor_pool.Default())
            reflection.enable_server_reflection([*names, _HEALTH_NAME, reflection.SERVICE_NAME], self._server, pools)  # type: ignore[arg-type]
        self._tasks.append(asyncio.create_task(self._load_watch.run(), name="load-watch"))
        addresses = [listening.bind(self._server, address, self._credentials.tls) for address in self._config.listen]
        await self._server.start()
        return addresses

    def _served(self) -> dict[str, object]:
        return {"admin": self._config.serves_admin, "reflection": self._config.reflection}

    def _register(self) -> list[str]:
        """Adds the services of the configuration; returns their names."""
        inference_service.register(self._server, self._core)
        names = [inference_service.SERVICE_NAME]
        if self._config.serves_admin:
            admin_handlers.register(self._server, self._core)
            names.append(admin_handlers.SERVICE_NAME)
        if self._config.kserve:
            kserve.register(self._server, self._core)
            names.append(kserve.SERVICE_NAME)
        if self._config.load_reports != "off":
            open_rca_service.register(self._server, self._load_watch)
            names.append(open_rca_service.SERVICE_NAME)
        return names

    async def _close_listeners(self) -> None:
        await self._server.stop(listening.STOP_S)
