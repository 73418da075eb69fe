"""The agent's connection to the engine's backend: it joins, serves workers' lives, joins anew.

Owns the channel, the pauses between attempts and the end of a life with its connection: workers
whose engine is out of reach compute for nobody, and are killed at once. The backend starts all
ranks anew when this host is back.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
from typing import Any

import grpc

from headrace_backend.rank_agent.config import RanksConfig
from headrace_backend.rank_agent.host_life import HostLife
from headrace_backend.rank_agent.joining import HostRefused, checked_launch, hello
from headrace_backend.server.hosts.ranks_service import SERVICE_NAME
from headrace_backend.server.logs import get_logger
from headrace_backend.server.workers.host_ranks import RankNotStarted, WorkerLaunch
from headrace_credentials.client_tls import ClientTlsFiles, channel_credentials, new_channel
from headrace_credentials.files import CredentialError
from headrace_credentials.shared_secret import bearer_metadata
from headrace_protos.ranks.v1 import ranks_pb2

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_TASK_TIMEOUT_S = 10.0
# Marks of progress within steps, which the backend's watchdog reads.
_MARKS_S = 0.2
# Every fifth time they are sent whether or not they have changed: the heartbeat.
_MARKS_PER_BEAT = 5
# The backend says something every second; one that was silent for so many looks is gone.
_SILENT_LOOKS = 50
# Messages that wait for the stream before nothing more is read of what can wait.
_MAX_WAITING = 100
# What the backend says to a host that it does not want, however often that asks.
_REFUSALS = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)
_OPTIONS = (
    # A plan is one message; the backend bounds it.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A backend that is stopped or cut off is noticed within ten seconds.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
)

_Stream = grpc.aio.StreamStreamCall[Any, Any]


class RankAgent:
    """Serves one engine with this host's ranks."""

    def __init__(self, config: RanksConfig, worker_command: tuple[str, ...]) -> None:
        """Reads what it shows to the backend once, so that a bad file ends the start.

        Raises:
            CredentialError: A file cannot be used.
        """
        self._config = config
        self._worker_command = worker_command
        self._log = get_logger("ranks")
        self._metadata = bearer_metadata(config.engine_token_file)
        self._credentials()
        self._said = ""
        # In this attempt; its workers are gone where it is over.
        self._has_joined = False
        self._is_connected = False

    async def run(self) -> None:
        """Joins again and again, until it is cancelled.

        Raises:
            HostRefused: The engine does not want this host, or this host not the engine.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            self._has_joined, self._is_connected = False, True
            try:
                await self._attempt()
            finally:
                self._is_connected = False
            if self._has_joined:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _credentials(self) -> grpc.ChannelCredentials | None:
        config = self._config
        if config.engine_tls_ca is None or config.engine_tls_cert is None or config.engine_tls_key is None:
            return None
        return channel_credentials(ClientTlsFiles(config.engine_tls_ca, config.engine_tls_cert, config.engine_tls_key))

    def _options(self) -> list[tuple[str, int | str]]:
        name = self._config.engine_tls_name
        return [*_OPTIONS, ("grpc.ssl_target_name_override", name)] if name else list(_OPTIONS)

    @property
    def has_joined(self) -> bool:
        """Whether the engine has this host."""
        return self._has_joined and self._is_connected

    async def _attempt(self) -> None:
        """One connection, whatever its end is; raises HostRefused."""
        try:
            opened = new_channel(self._config.join, self._credentials(), self._options())
        except CredentialError as error:
            self._complain(str(error))
            return
        async with opened as channel:
            join = channel.stream_stream(
                f"/{SERVICE_NAME}/Join",
                request_serializer=ranks_pb2.FromHost.SerializeToString,
                response_deserializer=ranks_pb2.ToHost.FromString,
            )
            stream: _Stream = join(None, metadata=self._metadata)
            try:
                await self._converse(stream)
                self._complain("the connection ended")
            except grpc.aio.AioRpcError as error:
                self._judge(error.code(), error.details())
            except asyncio.InvalidStateError:
                # The call was over when something was to be written; its status says why.
                self._judge(await stream.code(), await stream.details())
            except TimeoutError:
                self._complain(f"it said nothing for {_TASK_TIMEOUT_S:g} s")
            except asyncio.CancelledError:
                # grpc.aio raises it in readers of a call that was cancelled here; only a cancelled
                # task must end.
                if _task_is_cancelled():
                    raise
                self._complain("it said nothing for 10 s")
            except HostRefused:
                raise
            except Exception:
                # A mistake of ours: this host's workers are gone, and it joins anew.
                self._log.exception("connection failed", engine=self._config.join)
            finally:
                stream.cancel()

    def _judge(self, code: grpc.StatusCode, text: str | None) -> None:
        """Says why a connection ended; raises HostRefused if another would end so too."""
        details = (text or "").partition("\n")[0][:512]
        if code in _REFUSALS:
            raise HostRefused(f"the engine at {self._config.join} refuses this host: {details}")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            raise HostRefused(f"what listens at {self._config.join} is no engine with ranks on other hosts (--hosts)")
        if "handshake" in details.lower():
            details = "the TLS handshake fails: another authority's certificate, another name in it, or none"
        elif self._config.engine_tls_cert is not None and not self._has_joined and _is_broken_off(details):
            # All that a client of TLS 1.3 sees when its own certificate is not wanted.
            details += ": it may not trust this host's certificate (its tls_client_ca), or is ending"
        self._complain(f"{code.name}: {details}")

    def _complain(self, reason: str) -> None:
        """Logs what keeps this host from its engine, once until that changes."""
        if self._has_joined or reason != self._said:
            self._log.warning("not joined", engine=self._config.join, reason=reason)
        self._said = reason

    async def _converse(self, stream: _Stream) -> None:
        await stream.write(ranks_pb2.FromHost(hello=hello(self._config)))
        first = await asyncio.wait_for(stream.read(), _TASK_TIMEOUT_S)
        if not isinstance(first, ranks_pb2.ToHost):
            # The call is over; its status says why.
            _raise_status(await stream.code(), await stream.details())
            return
        try:
            launch = await asyncio.to_thread(checked_launch, self._config, first.task, self._worker_command)
        except HostRefused as refused:
            await stream.write(ranks_pb2.FromHost(refused=ranks_pb2.Refused(reason=str(refused))))
            # Until it was heard.
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                await asyncio.wait_for(stream.read(), _TASK_TIMEOUT_S)
            raise HostRefused(f"this host can't join the engine at {self._config.join}: {refused}") from None
        await stream.write(ranks_pb2.FromHost(joined=ranks_pb2.Joined()))
        self._has_joined, self._said = True, ""
        task = first.task
        ranks = list(range(task.first_rank, task.first_rank + task.num_ranks))
        self._log.info("joined", engine=self._config.join, model=task.revision, ranks=ranks)
        await _Session(launch, task.first_rank, stream).run()


class _Session:
    """A connection on which this host has joined: lives of the workers, one after the other."""

    def __init__(self, launch: WorkerLaunch, first_rank: int, stream: _Stream) -> None:
        self._launch = launch
        self._first_rank = first_rank
        self._stream = stream
        self._outgoing: collections.deque[ranks_pb2.FromHost] = collections.deque()
        self._wake = asyncio.Event()
        self._life: HostLife | None = None
        # The end of the life before, which nothing cuts short: the next one needs its memory.
        self._ending: asyncio.Future[None] | None = None
        # While a message is awaited: ending workers takes a while, in which none is read.
        self._silent_looks = 0
        self._awaits = False
        self._log = get_logger("ranks")

    async def run(self) -> None:
        """Serves until the stream ends; then the workers are gone."""
        tasks = [asyncio.ensure_future(each) for each in (self._read(), self._write(), self._beat())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._life is not None:
                await self._end("the connection ended")
            if self._ending is not None:
                await self._ending

    def _send(self, message: ranks_pb2.FromHost) -> None:
        self._outgoing.append(message)
        self._wake.set()

    @property
    def _has_room(self) -> bool:
        return len(self._outgoing) < _MAX_WAITING

    async def _write(self) -> None:
        while True:
            while self._outgoing:
                await self._stream.write(self._outgoing.popleft())
            self._wake.clear()
            await self._wake.wait()

    async def _beat(self) -> None:
        """Tells how far the ranks are, and that this host lives; ends if the backend does not.

        It counts its own looks: an agent that was stopped accuses nobody.
        """
        looks = 0
        while self._silent_looks < _SILENT_LOOKS:
            self._silent_looks = self._silent_looks + 1 if self._awaits else 0
            looks += 1
            is_beat = looks % _MARKS_PER_BEAT == 0
            if self._life is not None:
                self._life.tell_marks(also_unchanged=is_beat)
            elif is_beat:
                self._send(ranks_pb2.FromHost(marks=ranks_pb2.Marks()))
            await asyncio.sleep(_MARKS_S)
        self._stream.cancel()

    async def _read(self) -> None:
        while isinstance(message := await self._next(), ranks_pb2.ToHost):
            kind = message.WhichOneof("message")
            if kind == "record":
                if self._life is not None:
                    self._life.write(message.record.kind, message.record.payload)
            elif kind == "start":
                await self._begin(message.start)
            elif kind == "store" and self._life is not None:
                self._life.take_store(message.store)
            elif kind == "end":
                await self._end(message.end.reason)
            elif kind == "dump_stacks" and self._life is not None:
                self._life.dump_stacks()
        _raise_status(await self._stream.code(), await self._stream.details())

    async def _next(self) -> object:
        """The backend's next message, or what gRPC has instead at the end of the stream."""
        self._awaits, self._silent_looks = True, 0
        message: object = await self._stream.read()
        self._awaits = False
        return message

    async def _begin(self, start: ranks_pb2.Start) -> None:
        failure = ""
        try:
            self._life = HostLife(
                self._launch, self._first_rank, start.engine_address, self._send, lambda: self._has_room
            )
            await self._life.start()
        except OSError as error:
            failure = f"workers could not be started: {error.strerror or error}"
        except RankNotStarted as error:
            failure = str(error)
        if failure:
            self._log.error("workers not started", reason=failure)
            await self._end(failure, failure)

    async def _end(self, reason: str, failure: str = "") -> None:
        if self._life is not None:
            self._ending, self._life = asyncio.ensure_future(self._life.end()), None
            await asyncio.shield(self._ending)
            self._log.info("workers ended", reason=reason)
        self._send(ranks_pb2.FromHost(ended=ranks_pb2.Ended(failure=failure)))


def _raise_status(code: grpc.StatusCode, details: str | None) -> None:
    """Raises the status with which the backend ended the stream, if that is an error."""
    if code != grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details or "", "")


def _is_broken_off(details: str) -> bool:
    """Whether the other side ended the connection without a word of why."""
    return any(words in details.lower() for words in ("socket closed", "connection reset", "broken pipe", "eof"))


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
