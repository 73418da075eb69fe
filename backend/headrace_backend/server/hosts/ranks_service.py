"""The RanksService: agents of other hosts join, and stay for as long as their streams last.

Owns the RPC: who may join (secret, version, kind of device), heartbeats, and the words for a stream
that ended. What an agent says of its ranks is `joined_host`'s.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headrace_backend.config import EngineConfig
from headrace_backend.server.hosts.host_table import HostTable, Place
from headrace_backend.server.hosts.joined_host import Confused, JoinedHost
from headrace_backend.server.hosts.routes import peer_address
from headrace_backend.server.logs import get_logger
from headrace_backend.server.streams.secrets import check_secret
from headrace_backend.server.streams.statuses import StreamEnded, ended, internal_status, new_error_id, status_code
from headrace_facts.version import server_version
from headrace_protos.ranks.v1 import ranks_pb2
from headrace_request.request import LAYOUT

PROTOCOL_VERSION = 2
SERVICE_NAME = "headrace_ranks.v1.RanksService"
_HELLO_TIMEOUT_S = 5.0
# An agent reads the headers and samples of its model's files meanwhile, maybe of a slow disk.
_JOIN_TIMEOUT_S = 300.0
_BEAT_S = 1.0
# An agent says something every second; one that was silent for so many looks is gone.
_SILENT_LOOKS = 10
_MAX_NAME_CHARACTERS = 64
_MAX_REASON_CHARACTERS = 512

_Context = grpc.aio.ServicerContext[Any, Any]


def _deserialize(data: bytes) -> ranks_pb2.FromHost | None:
    """Parses a message; returns None for bytes that are no message."""
    try:
        return ranks_pb2.FromHost.FromString(data)
    except DecodeError:
        return None


class RanksService:
    """Serves the agents of all other hosts of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        revision: str,
        table: HostTable,
        secret: bytes | None,
        max_backlog_bytes: int,
        draft_revision: str = "",
    ) -> None:
        """Nobody has joined.

        Args:
            config: The engine's configuration.
            revision: The engine's model.
            table: The places that are to be filled.
            secret: What agents must present as bearer token; None: certificates protect.
            max_backlog_bytes: Bytes of step plans that may wait for a host.
            draft_revision: What drafts for it; empty: nothing that has files of its own.
        """
        self._config = config
        self._revision = revision
        self._draft_revision = draft_revision
        self.table = table
        self._secret = secret
        self._max_backlog_bytes = max_backlog_bytes
        self._log = get_logger()

    def handler(self) -> grpc.GenericRpcHandler[ranks_pb2.FromHost, ranks_pb2.ToHost]:
        """Returns what a grpc.aio server registers."""
        join = grpc.stream_stream_rpc_method_handler(
            self.join,
            request_deserializer=_deserialize,
            response_serializer=ranks_pb2.ToHost.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {"Join": join})

    async def join(self, _requests: object, context: _Context) -> None:
        """Runs the RPC of one host from its hello to its end."""
        try:
            await self._serve(context)
        except StreamEnded as reason:
            await context.abort(status_code(reason.status), reason.status.message)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            error_id = new_error_id()
            self._log.exception("stream of a host failed", error_id=error_id)
            await context.abort(grpc.StatusCode.INTERNAL, internal_status(error_id).message)

    def close(self) -> None:
        """Ends the streams of all hosts, whose workers have ended."""
        for place in self.table.places:
            if place.host is not None:
                place.host.cut("the backend is ending")

    # --- joining

    async def _serve(self, context: _Context) -> None:
        address = peer_address(context.peer())
        place = await self._admitted(address, context)
        left = "its connection ended"
        try:
            await self._give_task(place, context)
            host = JoinedHost(place.name, address, place.ranks, self._max_backlog_bytes)
            self.table.join(place, host)
            self._log.info("host joined", host=place.name, address=address, ranks=place.numbers)
            left = await self._run(host, context)
        except StreamEnded as reason:
            left = reason.status.message
            raise
        finally:
            joined = place.host
            self.table.leave(place, left)
            if joined is not None:
                self._log.warning("host is gone", host=place.name, address=address, ranks=place.numbers, reason=left)
                joined.lost(left)

    async def _admitted(self, address: str, context: _Context) -> Place:
        """The place that is kept for who calls; raises StreamEnded if there is none for him."""
        name = address
        try:
            check_secret(self._secret, context)
            hello = await self._read_hello(context)
            name = hello.host[:_MAX_NAME_CHARACTERS] or address
            self._check(hello)
        except StreamEnded as reason:
            self._refused(name, reason.status.message)
            raise
        place = self.table.take(name)
        if place is None:
            text = f"all hosts of this engine have joined: {self.table.holders}"
            raise ended(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        return place

    def _refused(self, name: str, reason: str) -> None:
        self._log.error("host refused", host=name, reason=reason)
        self.table.note_refusal(name, reason)

    async def _read_hello(self, context: _Context) -> ranks_pb2.Hello:
        message = await self._read(context, _HELLO_TIMEOUT_S)
        if message.WhichOneof("message") != "hello":
            raise ended(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        return message.hello

    def _check(self, hello: ranks_pb2.Hello) -> None:
        """Raises StreamEnded for a host that can be none of this engine's."""
        kind = self._config.expected_device().partition(":")[0]
        ours = (PROTOCOL_VERSION, server_version(), LAYOUT)
        theirs = (hello.protocol_version, hello.version, hello.request_layout)
        reason = ""
        if theirs != ours:
            said = f"version {hello.version or 'unknown'} (protocol {hello.protocol_version})"
            reason = (
                f"its Headrace is of {said}, and the engine's of {server_version() or 'unknown'} ({PROTOCOL_VERSION})"
            )
            reason += ", of another build" if theirs[:2] == ours[:2] else ""
        elif hello.device_kind != kind:
            reason = f"its device is {hello.device_kind}, and the engine's ranks are on {kind}"
        if reason:
            raise ended(grpc.StatusCode.FAILED_PRECONDITION, reason)

    async def _give_task(self, place: Place, context: _Context) -> None:
        """Says what the host is for; raises StreamEnded if it does not want to be that."""
        task = ranks_pb2.Task(
            engine_config=self._config.model_dump_json(),
            revision=self._revision,
            draft_revision=self._draft_revision,
            first_rank=place.ranks[0],
            num_ranks=len(place.ranks),
        )
        await context.write(ranks_pb2.ToHost(task=task))
        answer = await self._read(context, _JOIN_TIMEOUT_S)
        if answer.WhichOneof("message") == "refused":
            reason = answer.refused.reason[:_MAX_REASON_CHARACTERS]
            self._refused(place.name, reason)
            raise ended(grpc.StatusCode.FAILED_PRECONDITION, reason)
        if answer.WhichOneof("message") != "joined":
            raise ended(grpc.StatusCode.INVALID_ARGUMENT, "the answer to task must be joined or refused")

    # --- staying

    async def _run(self, host: JoinedHost, context: _Context) -> str:
        """Reads and writes until one of the two ends, or the host is cut off; returns why."""
        silence = _Silence()
        reader = asyncio.ensure_future(self._run_reader(host, context, silence))
        others = (host.run_writer(context.write), self._beat(host, silence))
        tasks: list[asyncio.Future[Any]] = [reader, *map(asyncio.ensure_future, others)]
        try:
            await asyncio.wait([*tasks, host.cut_off], return_when=asyncio.FIRST_COMPLETED)
            if host.cut_off.done():
                raise ended(grpc.StatusCode.ABORTED, host.cut_off.result())
            if reader.done():
                return reader.result()
            return "its connection ended"
        finally:
            for task in tasks:
                task.cancel()
            # A cancelled write or read of a broken call ends with grpc's own errors; the call is
            # over either way.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_reader(self, host: JoinedHost, context: _Context, silence: _Silence) -> str:
        while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            silence.looks = 0
            if not isinstance(message, ranks_pb2.FromHost):
                raise ended(grpc.StatusCode.INVALID_ARGUMENT, "the message is no FromHost")
            try:
                host.take(message)
            except Confused as error:
                raise ended(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        return "its connection ended"

    async def _beat(self, host: JoinedHost, silence: _Silence) -> None:
        """Lets the agent hear something every second, and counts for how long it was silent.

        It counts its own looks: a backend that was stopped accuses nobody.
        """
        while silence.looks < _SILENT_LOOKS:
            host.beat()
            silence.looks += 1
            await asyncio.sleep(_BEAT_S)
        host.cut(f"it said nothing for {_SILENT_LOOKS * _BEAT_S:g} s")

    async def _read(self, context: _Context, timeout_s: float) -> ranks_pb2.FromHost:
        try:
            message = await asyncio.wait_for(context.read(), timeout_s)
        except TimeoutError:
            raise ended(grpc.StatusCode.DEADLINE_EXCEEDED, f"it said nothing for {timeout_s:g} s") from None
        if not isinstance(message, ranks_pb2.FromHost):
            raise ended(grpc.StatusCode.INVALID_ARGUMENT, "the message is no FromHost")
        return message


class _Silence:
    """Looks since the agent was last heard."""

    looks = 0
