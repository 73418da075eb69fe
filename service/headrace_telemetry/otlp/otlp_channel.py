"""One call to the collector.

Serialized bytes out, serialized bytes back, and how often it is tried again.

Owns the gRPC channel, its headers and TLS, and the rule of OTLP on what may be tried again. Knows
nothing of what the bytes mean; queues and counts are their owners'.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from headrace_telemetry.config import TelemetryConfig

TRACES: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
METRICS: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 15.0
# What OTLP says may be tried again, and RESOURCE_EXHAUSTED also if the collector does not say when.
_TRANSIENT: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_MOST_SAID: Final = 300
_DETAILS: Final = "grpc-status-details-bin"


class ExportFailed(Exception):  # an outcome
    """The collector did not take an export.

    Attributes:
        code: the gRPC status.
        said: the beginning of what came with it, of the connection or the collector.
        transient: whether the same bytes may be sent again.
        retry_after_s: when the collector wants to hear of it again; None: it did not say.
    """

    def __init__(self, code: str, said: str, transient: bool, retry_after_s: float | None) -> None:
        super().__init__(code)
        self.code = code
        self.said = said
        self.transient = transient
        self.retry_after_s = retry_after_s


class Backoff:
    """Yields pauses between attempts, in seconds: from 0.5, doubling to 15.

    They are shaken so that servers do not come together.
    """

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def next_pause_s(self, wanted_s: float | None) -> float:
        """The pause after a failure; at least what the collector wants."""
        pause_s = self._pause_s * random.uniform(0.75, 1.25)
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        return max(pause_s, min(wanted_s or 0.0, 60.0))

    def succeeded(self) -> None:
        """Begins again with the shortest pause."""
        self._pause_s = _FIRST_PAUSE_S


class OtlpChannel:
    """The connection to one collector. Make it inside the event loop.

    Raises:
        ValueError: a file of headers or certificates has no usable content.
        OSError: it can't be read.
    """

    def __init__(self, config: TelemetryConfig) -> None:
        endpoint = config.collector()
        assert endpoint is not None
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 5000)]
        self._timeout_s = config.otlp_timeout_s
        self._headers = config.headers()
        if endpoint.secure:
            credentials = grpc.ssl_channel_credentials(config.certificate_authority())
            self._channel = grpc.aio.secure_channel(endpoint.target, credentials, options)
        else:
            self._channel = grpc.aio.insecure_channel(endpoint.target, options)

    async def export(self, method: str, request: bytes, timeout_s: float | None = None) -> bytes:
        """Sends one request. Returns the serialized response. Raises ExportFailed."""
        call = self._channel.unary_unary(method, None, None)
        try:
            reply = await call(request, timeout=timeout_s or self._timeout_s, metadata=self._headers)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        assert isinstance(reply, bytes)
        return reply

    async def close(self) -> None:
        """Ends the connection; open calls are cancelled."""
        await self._channel.close(None)


def _failure(error: grpc.aio.AioRpcError) -> ExportFailed:
    said = (error.details() or "")[:_MOST_SAID]
    return ExportFailed(error.code().name, said, error.code() in _TRANSIENT, _retry_after_s(error))


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """What a google.rpc.RetryInfo in the trailers asks for."""
    trailers = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    details = [value for key, value in trailers if key == _DETAILS and isinstance(value, bytes)]
    return _delay_of(details[0]) if details else None


def _delay_of(details: bytes) -> float | None:
    info = error_details_pb2.RetryInfo()
    try:
        status = status_pb2.Status.FromString(details)
        for detail in status.details:
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                return float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
    except DecodeError:
        return None
    return None
