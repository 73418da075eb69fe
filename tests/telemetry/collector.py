"""A collector that listens for real: counts what comes, and misbehaves on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes traces.

    Attributes:
        requests: what came.
        headers: those of the last call.
        answers: statuses to answer with, one per call, before it takes any; "hang": never answers.
        retry_after_s: what its errors ask for.
        rejected: spans of each request that it says it rejected.
    """

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.sizes: list[int] = []
        self.headers: dict[str, str | bytes] = {}
        self.answers: list[str] = []
        self.calls = 0
        self.retry_after_s: float | None = None
        self.rejected = 0

    async def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.calls += 1
        self.headers = dict(context.invocation_metadata() or ())
        answer = self.answers.pop(0) if self.answers else "OK"
        if answer == "hang":
            await asyncio.sleep(3600)
        if answer != "OK":
            await context.abort(grpc.StatusCode[answer], "no", self._trailers())
        self.requests.append(request)
        self.sizes.append(request.ByteSize())
        reply = trace_service_pb2.ExportTraceServiceResponse()
        reply.partial_success.rejected_spans = self.rejected
        return reply

    @property
    def spans(self) -> list[trace_pb2.Span]:
        """All spans that came."""
        return [
            span
            for request in self.requests
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]

    def _trailers(self) -> tuple[tuple[str, bytes], ...]:
        if self.retry_after_s is None:
            return ()
        detail = any_pb2.Any()
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(int(self.retry_after_s * 1e6))
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return (("grpc-status-details-bin", status_pb2.Status(details=[detail]).SerializeToString()),)


@contextlib.asynccontextmanager
async def listening(
    collector: Collector, credentials: grpc.ServerCredentials | None = None, port: int = 0
) -> AsyncIterator[int]:
    """Serves a collector; its port."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 4 << 20)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    address = f"127.0.0.1:{port}"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
