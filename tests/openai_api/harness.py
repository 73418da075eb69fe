"""A whole service that speaks OpenAI's HTTP API, in the test's own process.

Fake engine, service, and an HTTP client, over real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from tests.service.fake_engine import FakeEngine, Request
from tests.service.harness import ANSWER, engine_model, quick_start
from tests.support.engine_requests import asked
from tokenizers import Tokenizer

from headrace_request.request import Request as Asked
from headrace_service.config import ServiceConfig
from headrace_service.openai.door import Door

# Of every request that must end by itself; generous, because the machine may be busy.
TIMEOUT_S = 240.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@dataclasses.dataclass
class Running:
    """Fake engine, service and client of one test, or of a module's tests."""

    engine: FakeEngine
    door: Door
    client: httpx2.AsyncClient
    tokenizer: Tokenizer
    address: str

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        """The answer to a JSON body."""
        return await self.client.post(path, json=body, headers=headers)

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON of all events of a stream, which must end as streams do."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        *events, last, rest = response.text.split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    @property
    def newest(self) -> Request:
        """The request that the engine got last."""
        return list(self.engine.requests.values())[-1]

    @property
    def newest_asked(self) -> Asked:
        """What the engine was asked for last."""
        return asked(self.newest.add)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        encoded: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return encoded

    async def until(self, condition: Any) -> None:
        """Waits until a condition of the test holds."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_door(
    folder: pathlib.Path, sockets: pathlib.Path, *, client: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Running]:
    """Starts everything and waits until the service serves; `client` are httpx2's own options."""
    with quick_start():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        answer = tokenizer.encode(ANSWER, add_special_tokens=False).ids
        engine = FakeEngine(engine_model(folder), lambda add, index: answer)
        await engine.start(f"unix:{sockets}/engine.sock")
        values = {"shutdown_grace_s": 1.0, "template_timeout_s": 30.0, "openai_listen": ("127.0.0.1:0",), **config}
        door = Door(ServiceConfig(engine=(engine.address,), **values))
        (address,) = await door.start()
        scheme = "https" if "tls_cert" in config else "http"
        options = {"base_url": f"{scheme}://{address}", "timeout": TIMEOUT_S, "trust_env": False, **(client or {})}
        try:
            async with httpx2.AsyncClient(**options) as http:
                running = Running(engine, door, http, tokenizer, address)
                await running.until(lambda: door.core.serving)
                yield running
        finally:
            await door.stop(0)
            await engine.stop()
