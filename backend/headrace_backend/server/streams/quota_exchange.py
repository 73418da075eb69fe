"""Reports of quotas between this engine and others, carried by services.

Owns the messages, who is sent what this engine reports, and how soon. What reports say is
`engine.limits.sharing`'s. A service that names no peers carries nothing and is sent nothing.
"""

from __future__ import annotations

import asyncio
import re

import grpc

from headrace_backend.engine.engine import Engine
from headrace_backend.engine.limits.sharing.reports import QuotaReport, ShareReport, TenantReport
from headrace_backend.engine.request import TenantLimits
from headrace_backend.server.logs import get_logger
from headrace_backend.server.streams import incoming
from headrace_backend.server.streams.service_stream import ServiceStream
from headrace_backend.server.streams.statuses import ended
from headrace_protos.engine.v1 import engine_pb2
from headrace_request import limits

# What changes within it goes into one report.
_GATHER_S = 0.002
_ENGINE = re.compile(r"[0-9a-f]{16}")
_MAX_PEERS = 4096


class QuotaExchange:
    """Carries reports from and to the engine."""

    def __init__(self, engine: Engine) -> None:
        """No service carries anything yet."""
        self._engine = engine
        self._carriers: dict[int, ServiceStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._log = get_logger()

    def name_peers(self, stream: ServiceStream, peers: engine_pb2.QuotaPeers) -> None:
        """A service names the engines between which it carries reports.

        Raises StreamEnded: the message breaks a rule of the wire.
        """
        _require(incoming.unknown_field(peers) is None, "quota_peers has fields that protocol version 2 does not know")
        _require(len(peers.engines) <= _MAX_PEERS, f"quota_peers.engines: at most {_MAX_PEERS} are allowed")
        _require(
            all(_ENGINE.fullmatch(engine) for engine in peers.engines), "quota_peers.engines: must be 16 hex digits"
        )
        self._carriers[stream.stream_id] = stream
        self._engine.name_quota_peers(stream.stream_id, peers.engines)
        self.notice()

    def read(self, report: engine_pb2.QuotaReport) -> None:
        """A service brings another engine's report.

        Raises StreamEnded: the message breaks a rule of the wire.
        """
        self._engine.read_quota_report(read_report(report))
        self.notice()

    def stream_lost(self, stream_id: int) -> None:
        """A service is gone."""
        self._carriers.pop(stream_id, None)
        self.notice()

    def notice(self) -> None:
        """Reports to the others soon if the engine has something to say."""
        if self._timer is None and self._carriers and self._engine.has_quota_news:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self._send)

    def log_disputes(self) -> None:
        """Logs the keys of which services say different limits."""
        for dispute in self._engine.take_quota_disputes():
            said = [limits._asdict() for limits in dispute.said]
            self._log.warning("quotas differ", key=dispute.tenant, said=said, held=dispute.held._asdict())

    def _send(self) -> None:
        self._timer = None
        report = self._engine.take_quota_report()
        if report is None:
            return
        message = engine_pb2.FromEngine(quota_report=write_report(report))
        for stream in self._carriers.values():
            stream.send(message)


def _require(holds: bool, rule: str) -> None:
    """Raises StreamEnded unless a rule holds: these messages have no answer that could refuse."""
    if not holds:
        raise ended(grpc.StatusCode.INVALID_ARGUMENT, rule)


def read_report(report: engine_pb2.QuotaReport) -> QuotaReport:
    """Reads another engine's report. Raises StreamEnded: it breaks a rule of the wire."""
    _require(incoming.unknown_field(report) is None, "quota_report has fields that protocol version 2 does not know")
    _require(_ENGINE.fullmatch(report.engine) is not None, "quota_report.engine: must be 16 hex digits")
    tenants = [*(each.tenant for each in report.tenants), *report.gone]
    _require(
        all(len(tenant.encode()) <= limits.MAX_TENANT_BYTES for tenant in tenants),
        f"quota_report: tenants must be at most {limits.MAX_TENANT_BYTES} bytes",
    )
    return QuotaReport(
        report.engine,
        report.number,
        report.complete,
        tuple([_read_tenant(each) for each in report.tenants]),
        tuple(report.gone),
        tuple([(heard.engine, heard.number) for heard in report.heard]),
    )


def _read_tenant(sent: engine_pb2.TenantQuotas) -> TenantReport:
    said: TenantLimits | None = None
    if sent.HasField("limits"):
        share = sent.limits.kv_cache_share
        # A number that is none compares as false.
        _require(0 <= share <= 1, "quota_report.limits.kv_cache_share: must be 0 to 1")
        said = incoming.read_limits(sent.limits)
    return TenantReport(
        sent.tenant, said, _read_share(sent.streams), _read_share(sent.requests), _read_share(sent.tokens), sent.pressed
    )


def _read_share(sent: engine_pb2.QuotaShare) -> ShareReport:
    return ShareReport(sent.taken, sent.want, sent.missing)


def write_report(report: QuotaReport) -> engine_pb2.QuotaReport:
    """Writes what this engine reports."""
    return engine_pb2.QuotaReport(
        engine=report.engine,
        number=report.number,
        complete=report.complete,
        tenants=[_write_tenant(each) for each in report.tenants],
        gone=report.gone,
        heard=[engine_pb2.QuotaHeard(engine=engine, number=number) for engine, number in report.heard],
    )


def _write_tenant(report: TenantReport) -> engine_pb2.TenantQuotas:
    said = report.limits
    return engine_pb2.TenantQuotas(
        tenant=report.tenant,
        limits=engine_pb2.TenantLimits(**said._asdict()) if said is not None else None,
        streams=_write_share(report.streams),
        requests=_write_share(report.requests),
        tokens=_write_share(report.tokens),
        pressed=report.pressed,
    )


def _write_share(report: ShareReport) -> engine_pb2.QuotaShare:
    return engine_pb2.QuotaShare(taken=report.taken, want=report.want, missing=report.missing)
