"""A service process that speaks OpenAI's HTTP API.

Owns the listener. How the process begins and ends is `service_process`'s, what it shares with
services that speak gRPC is `service_core`'s: engines, models, tokenizers, templates, streams.
"""

from __future__ import annotations

import asyncio

from headrace_service.config import ServiceConfig
from headrace_service.openai import app
from headrace_service.openai.http.http_server import HttpServer
from headrace_service.service_process import ServiceProcess


class Door(ServiceProcess):
    """A service process that speaks OpenAI's HTTP API, once started."""

    def __init__(self, config: ServiceConfig) -> None:
        super().__init__(config)
        tls = self._credentials.tls
        self._http = HttpServer(
            config, app.application(config, self._core, self._credentials), tls.ssl_context if tls else None
        )

    async def _listen(self) -> list[str]:
        addresses = self._http.bind()
        self._tasks.append(asyncio.create_task(self._http.serve(), name="http"))
        while not self._http.started:
            await asyncio.sleep(0)
        return addresses

    def _served(self) -> dict[str, object]:
        return {"wire": "http"}

    async def _close_listeners(self) -> None:
        self._http.should_exit = True
        (serving,) = [task for task in self._tasks if task.get_name() == "http"]
        await asyncio.wait([serving])
