"""The life of the connection to the backend.

It connects, says hello, is welcomed, reads and writes until the connection breaks, and begins anew
after a pause.

Owns the channel, its secret and the pauses between attempts, which grow while connections do not
last, so that a backend that comes and goes is not stormed. A backend that says nothing for too
long (it sends its state every second) is given up like one that closed the connection. What the
messages mean is `engine_client`'s.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog

from headrace_credentials.client_tls import ClientTlsFiles, channel_credentials, new_channel
from headrace_credentials.files import CredentialError
from headrace_credentials.shared_secret import bearer_metadata
from headrace_model_folder import InvalidModelFolder
from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import LAYOUT
from headrace_service import logs
from headrace_service.config import ServiceConfig
from headrace_service.engines.engine_client import EngineClient
from headrace_service.engines.engine_group import LeftOut

PROTOCOL_VERSION = 4
_FIRST_PAUSE_S = 0.05
# A connection that lasted so many longest pauses is no reason for a long pause.
_LASTING = 10
# An engine that is left out is asked so many times more seldom than one that can't be reached.
_LEFT_OUT = 5
_WELCOME_TIMEOUT_S = 10.0

_log = structlog.get_logger("headrace.service")
_Stream = grpc.aio.StreamStreamCall[Any, Any]
# A backend that hears the hello and does not want it.
_REFUSALS = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)


class EngineConnection:
    """Keeps an `EngineClient` connected.

    Args:
        config: secret, limits and pauses.
        address: where the backend listens.
        tls_name: the name in the backend's certificate; "": the address's.
        client: what messages are dealt to.
        prepare: called with each welcome's model before questions are asked. `LeftOut` ends this
            connection, other exceptions end it for good.
        failed: called when an attempt ended without a welcome, or the engine is left out: with the
            reason to leave it out, "" where there is none.
        is_leaving: returns whether the engine is expected to go.

    Attributes:
        num_attempts: attempts to connect that have begun.
    """

    def __init__(
        self,
        config: ServiceConfig,
        address: str,
        tls_name: str,
        client: EngineClient,
        prepare: Callable[[engine_pb2.EngineModel], Awaitable[None]],
        failed: Callable[[str], None],
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self._address = address
        self._tls_name = tls_name
        self._client = client
        self._prepare = prepare
        self._failed = failed
        self._is_leaving = is_leaving
        self._metadata = bearer_metadata(config.engine_token_file)
        # A file that cannot be used ends the start; later it is tried again.
        engine_tls(config)
        self._has_served = False
        # Why the files of the last attempt can't be used; "" while they can.
        self._no_credentials = ""
        # Of the attempt that is made.
        self._was_welcomed = False
        self._left_out = ""
        self.num_attempts = 0

    async def run(self) -> None:
        """Connects, again and again, until cancelled.

        Raises:
            InvalidModelFolder: the engine's model cannot be served by this process, now or later.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            self._was_welcomed, self._left_out = False, ""
            await self._run_once()
            if not self._was_welcomed:
                self._failed(self._left_out)
            longest_s = self._config.engine_retry_max_s
            if self._was_welcomed and time.monotonic() - began_s > _LASTING * longest_s:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, longest_s * (_LEFT_OUT if self._left_out else 1))

    async def _run_once(self) -> None:
        """One connection from hello to its end, whatever that is."""
        self.num_attempts += 1
        try:
            opened = _channel(self._config, self._address, self._tls_name)
        except CredentialError as error:
            if str(error) != self._no_credentials:
                _log.error("engine.no_credentials", engine=self._address, why=str(error))
            self._no_credentials = str(error)
            return
        self._no_credentials = ""
        async with opened as channel:
            stream: _Stream = _connect(channel)(None, metadata=self._metadata)
            try:
                await self._converse(stream)
            except grpc.aio.AioRpcError as error:
                # A service often starts before its backend listens, and a backend that never served
                # says itself why it ends; only the loss of an engine that served, and that nobody
                # unloads, is worth a warning, and only once.
                level = logging.WARNING if self._has_served and not self._is_leaving() else logging.DEBUG
                self._has_served = False
                _log.log(level, "engine.disconnected", engine=self._address, code=error.code().name)
                self._left_out = _refusal(error)
            except asyncio.CancelledError:
                # grpc.aio raises it in readers of a call that was cancelled here; only a cancelled
                # task must end.
                if _task_is_cancelled():
                    raise
            except InvalidModelFolder:
                raise
            except LeftOut as why:
                self._was_welcomed, self._left_out = False, str(why)
            except Exception as error:
                _log.error("engine.connection_failed", exception_type=type(error).__name__, places=logs.places(error))
            finally:
                self._client.connection_lost()
                stream.cancel()

    async def _converse(self, stream: _Stream) -> None:
        hello = engine_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            request_layout=LAYOUT,
            service_name=self._config.service_name,
            wants_step_records=self._client.wants_step_records,
            guards=self._config.guarded_bytes > 0,
        )
        await stream.write(engine_pb2.ToEngine(hello=hello))
        first = await asyncio.wait_for(stream.read(), _WELCOME_TIMEOUT_S)
        if not isinstance(first, engine_pb2.FromEngine) or not first.HasField("welcome"):
            _log.error("engine.no_welcome", engine=self._address)
            return
        await self._welcomed(first.welcome)
        _log.info("engine.connected", engine=self._address, model=first.welcome.model.revision)
        writer = asyncio.create_task(self._write(stream))
        silence = asyncio.create_task(self._end_on_silence(stream))
        try:
            await self._read(stream)
        finally:
            writer.cancel()
            silence.cancel()
            await asyncio.gather(writer, silence, return_exceptions=True)

    async def _welcomed(self, welcome: engine_pb2.Welcome) -> None:
        await self._prepare(welcome.model)
        self._client.connection_opened(welcome)
        self._was_welcomed = True
        # The engine has blocks once its workers are ready.
        self._has_served = welcome.model.kv_blocks > 0

    async def _read(self, stream: _Stream) -> None:
        received = self._client.received
        while isinstance(from_engine := await stream.read(), engine_pb2.FromEngine):
            if from_engine.HasField("welcome"):
                await self._welcomed(from_engine.welcome)
            else:
                received(from_engine)

    async def _write(self, stream: _Stream) -> None:
        while True:
            await stream.write(await self._client.next_outgoing())

    async def _end_on_silence(self, stream: _Stream) -> None:
        limit_ns = int(self._config.engine_silence_s * 1e9)
        while time.monotonic_ns() - self._client.last_heard_ns < limit_ns:
            await asyncio.sleep(self._config.engine_silence_s / 10)
        _log.error("engine.silent", engine=self._address, silence_s=self._config.engine_silence_s)
        self._client.connection_lost()
        stream.cancel()


def _connect(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamMultiCallable[Any, Any]:
    return channel.stream_stream(
        "/headrace_engine.v1.EngineService/Connect",
        request_serializer=engine_pb2.ToEngine.SerializeToString,
        response_deserializer=engine_pb2.FromEngine.FromString,
    )


def _refusal(error: grpc.aio.AioRpcError) -> str:
    """Returns why an engine is left out whose connection ended so; "": it is not."""
    details = error.details() or ""
    if error.code() in _REFUSALS:
        return f"refuses this service: {details[:256]}"
    if "handshake" in details.lower():
        return "the TLS handshake fails: another authority's certificate, another name in it, or none"
    return ""


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def engine_tls(config: ServiceConfig) -> grpc.ChannelCredentials | None:
    """Returns the credentials that this service shows to a backend with mTLS.

    None stands for a configuration that names none.

    Raises:
        CredentialError: a file cannot be used.
    """
    if config.engine_tls_ca is None or config.engine_tls_cert is None or config.engine_tls_key is None:
        return None
    return channel_credentials(ClientTlsFiles(config.engine_tls_ca, config.engine_tls_cert, config.engine_tls_key))


def _channel(config: ServiceConfig, address: str, tls_name: str) -> grpc.aio.Channel:
    """Returns a new channel. Files are read for each, as they may have changed."""
    credentials = None if address.startswith("unix:") else engine_tls(config)
    named = [("grpc.ssl_target_name_override", tls_name)] if tls_name else []
    return new_channel(address, credentials, [*_channel_options(config), *named])


def _channel_options(config: ServiceConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", config.max_engine_message_bytes),
        ("grpc.max_receive_message_length", config.max_engine_message_bytes),
        # Each attempt is a new channel with pauses of our own; a shared subchannel would remember
        # the last failure's.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_retries", 0),
    ]
