"""Load reports out of band: `xds.service.orca.v3.OpenRcaService`.

Owns the stream of reports and its interval. It tells nothing of single requests, so that a list of
their costs is refused.
"""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

from headrace_protos.orca.orca_pb2 import OrcaLoadReportRequest
from headrace_service import errors
from headrace_service.auth import permissions
from headrace_service.calls.call import Call
from headrace_service.calls.rpc_boundary import streaming
from headrace_service.load_reports.load_watch import EVERY_S, LoadWatch

SERVICE_NAME: Final = permissions.ORCA_SERVICE
METHOD: Final = f"{SERVICE_NAME}/StreamCoreMetrics"
_MAX_INTERVAL_S: Final = 3600.0


def register(server: grpc.aio.Server, watch: LoadWatch) -> None:
    """Adds OpenRcaService to a gRPC server."""

    async def stream(request: OrcaLoadReportRequest, call: Call) -> None:
        await _stream(watch, request, call)

    handlers = {"StreamCoreMetrics": streaming(OrcaLoadReportRequest, stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


async def _stream(watch: LoadWatch, request: OrcaLoadReportRequest, call: Call) -> None:
    """Writes a report now and in each interval, until the call ends.

    While no engine answers there is nothing to report, and nothing is written.
    """
    interval_s = _interval_s(request)
    with watch.streaming():
        report = await watch.first()
        while True:
            if report is not None:
                await call.context.write(report)
            await asyncio.sleep(interval_s)
            report = watch.newest()


def _interval_s(request: OrcaLoadReportRequest) -> float:
    """Returns the seconds between two reports. Raises ServiceError: INVALID_ARGUMENT."""
    if request.request_cost_names:
        raise errors.invalid_field("request_cost_names", "must be empty; this server reports no costs of requests")
    asked_s = request.report_interval.seconds + request.report_interval.nanos / 1e9
    if not 0 <= asked_s <= _MAX_INTERVAL_S:
        raise errors.invalid_field("report_interval", f"must be 0 to {_MAX_INTERVAL_S:.0f} seconds, not {asked_s:g}")
    return max(asked_s, EVERY_S)
