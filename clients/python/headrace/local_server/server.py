"""headrace.local: a server for the length of a `with` block, and a client connected to it.

Owns waiting until the server answers (grpc.health.v1) and pairing it with a sync or asyncio client.
Does not own the process (process.py). A model folder goes in, a connected client comes out;
the server is gone when the block is left, however it is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import grpc

from headrace.aio import AsyncClient
from headrace.client import Client
from headrace.connections.channel import RetryPolicy, channel_options
from headrace.local_server.installed import require_server, require_worker
from headrace.local_server.process import FlagValue, LocalServerError, ServerProcess, serve_command

POLL_SECONDS = 0.05
HEALTH_RPC = "/grpc.health.v1.Health/Check"
# HealthCheckResponse{status: SERVING} and an empty HealthCheckRequest, by hand: two messages are
# not worth a dependency.
_SERVING = b"\x08\x01"
_WHOLE_SERVER = b""


class LocalServer:
    """A private server: `with local(...) as client` gives a Client, `async with` an AsyncClient.

    To be entered once.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, FlagValue],
        *,
        start_timeout: float,
        stop_grace: float,
        on_line: Callable[[str], None] | None,
    ) -> None:
        self._model = model
        self._options = options
        self._start_timeout = start_timeout
        self._stop_grace = stop_grace
        self._on_line = on_line
        self._server: ServerProcess | None = None
        self._client: Client | None = None
        self._async_client: AsyncClient | None = None

    def __enter__(self) -> Client:
        server = self._start()
        try:
            deadline = time.monotonic() + self._start_timeout
            while not self._is_ready(server, deadline):
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._stop()
            raise
        self._client = Client(server.target)
        return self._client

    def __exit__(self, *_: object) -> None:
        try:
            if self._client is not None:
                self._client.close()
        finally:
            self._stop()

    async def __aenter__(self) -> AsyncClient:
        server = self._start()
        try:
            deadline = time.monotonic() + self._start_timeout
            while not await asyncio.to_thread(self._is_ready, server, deadline):
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            self._stop()
            raise
        self._async_client = AsyncClient(server.target)
        return self._async_client

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._async_client is not None:
                await self._async_client.close()
        finally:
            # Not shielded by to_thread alone: a cancelled task must still leave no server behind.
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._stop))

    def _start(self) -> ServerProcess:
        if self._server is not None:
            raise RuntimeError("a LocalServer can be entered once; call headrace.local again")
        require_server()
        require_worker()
        self._server = ServerProcess(lambda folder: serve_command(self._model, folder, self._options), self._on_line)
        return self._server

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop(self._stop_grace)

    def _is_ready(self, server: ServerProcess, deadline: float) -> bool:
        """Whether the server serves.

        Raises:
            LocalServerError: It ended, or did not serve in time.
        """
        message = server.exit_message()
        if message is not None:
            raise LocalServerError(message)
        if is_serving(server.target):
            return True
        if time.monotonic() >= deadline:
            last = server.lines[-1] if server.lines else "it printed nothing"
            raise LocalServerError(f"the server was not ready after {self._start_timeout:g} s: {last}")
        return False


def local(
    model: str,
    *,
    start_timeout: float = 600.0,
    stop_grace: float = 10.0,
    on_line: Callable[[str], None] | None = None,
    **options: FlagValue,
) -> LocalServer:
    """A server for scripts: started on a private socket, stopped at the end of the block.

        with headrace.local("models/demo") as client:
            print(client.complete("Once upon a time", max_tokens=40).text)

    Args:
        model: The model's folder or its name on a hub, as for `headrace serve --model`.
        start_timeout: Seconds until the server must be ready; loading a large model takes minutes,
            and one that is not here yet is fetched within that time, too.
        stop_grace: Seconds between SIGTERM and SIGKILL.
        on_line: Called, in a thread of its own, with each line that the server prints.
        **options: Flags of `headrace serve`: num_blocks=64 is `--num-blocks 64`, True a bare flag,
            False `--no-...`, a list repeats it.

    Raises (on entering):
        LocalServerError: headrace-server or its extra `worker` is not installed, or the server
            ended before it was ready (with its last line).
    """
    return LocalServer(model, options, start_timeout=start_timeout, stop_grace=stop_grace, on_line=on_line)


def is_serving(target: str, timeout: float = 1.0) -> bool:
    """Returns whether a server answers the standard health check with SERVING in time."""
    with grpc.insecure_channel(target, channel_options(target, RetryPolicy(max_attempts=1))) as channel:
        check = channel.unary_unary(
            HEALTH_RPC, request_serializer=lambda message: message, response_deserializer=lambda message: message
        )
        try:
            return bool(check(_WHOLE_SERVER, timeout=timeout) == _SERVING)
        except grpc.RpcError:
            return False
