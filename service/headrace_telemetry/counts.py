"""What telemetry did and failed to do, counted, so that metrics can say it.

Owns the numbers; whoever does a thing counts it, `headrace.telemetry.*` reads them.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class ExportCounts:
    """Totals since the process began.

    "Signal" is "traces" or "metrics"; a unit is a span or a data point.

    Attributes:
        exported: units that the collector took, by signal.
        dropped: units that were not exported: no room in the queue, refused by the collector, or
            given up, by signal.
        failures: attempts that failed, retried ones included, by signal.
        queued_bytes: spans that wait for the collector now.
        written_bytes: what went to the trace file.
        file_dropped: spans that the trace file could not take.
        ring_bytes: what recent traces take now.
        incomplete: exported generations of which something was not known.
        reported_dropped: facts that services and backends could not send.
        bad_frames: connections that were ended for what they sent.
    """

    exported: dict[str, int] = dataclasses.field(default_factory=dict)
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: dict[str, int] = dataclasses.field(default_factory=dict)
    queued_bytes: int = 0
    written_bytes: int = 0
    file_dropped: int = 0
    ring_bytes: int = 0
    incomplete: int = 0
    reported_dropped: int = 0
    bad_frames: int = 0

    def add(self, what: dict[str, int], signal: str, units: int) -> None:
        """Adds to one of the counts by signal."""
        what[signal] = what.get(signal, 0) + units
