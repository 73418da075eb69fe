"""What engines tell each other of the quotas that they share: plain data.

Services carry reports from each engine to the others of a model and look at nothing in them. A
report has a number. One with news counts on from the one before, so that an engine knows whether
it missed any; one without only says what was heard. What an engine took counts from the beginning
of its account, so that a report which comes twice changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace_backend.engine.request import TenantLimits


class ShareReport(NamedTuple):
    """What one engine has of one quota of a tenant."""

    # Units taken from the pool and not given back; time gives none back here.
    taken: int = 0
    # Units that a request waits for there; 0: none waits.
    want: int = 0
    # Units that this engine knows to be missing from the pool. Those who hear of it for the first
    # time begin with them; no such number for streams.
    missing: int = 0


class TenantReport(NamedTuple):
    """What one engine has of one tenant's quotas."""

    tenant: str
    # What the engine's own services said in the last minute; None: they said nothing.
    limits: TenantLimits | None
    streams: ShareReport
    requests: ShareReport
    tokens: ShareReport
    # Whether the others shall hold nothing in reserve.
    pressed: bool


class QuotaReport(NamedTuple):
    """What one engine has to say, or all that it has."""

    # The engine's life, as it names itself in its welcome.
    engine: str
    number: int
    # Whether it has all tenants; otherwise those that changed since the report before.
    complete: bool
    tenants: tuple[TenantReport, ...] = ()
    # Tenants of which the engine has nothing any more.
    gone: tuple[str, ...] = ()
    # The newest report that was heard of each other engine.
    heard: tuple[tuple[str, int], ...] = ()
