"""What `--trace` says on stderr after a call: which trace it was, and what shows it.

Owns the hint, which names only what works with this server: it asks once whether the server gives
traces back (AdminService.GetTrace), which it does not where its address is open to others and needs
no keys, as in the plain compose stack. Never fails: the call itself has ended.
"""

from __future__ import annotations

import click

from headrace.cli.options import Connection
from headrace.cli.output import warn
from headrace.connections.connection import DEFAULT_SERVER
from headrace.errors import HeadraceError, NotFound, PermissionDenied, Unauthenticated, Unimplemented
from headrace.trace_context import trace_id_of

_TIMEOUT_S = 2.0
# Well-formed, and nobody's: asking for it tells whether one may ask.
_NO_TRACE = "0" * 32
_TELEMETRY_OFF = "FAILED_PRECONDITION"


class TraceHint:
    """The hints of one command."""

    def __init__(self, connection: Connection) -> None:
        """Nothing asked yet."""
        self._connection = connection
        self._why_not: str | None = None

    def show(self, traceparent: str) -> None:
        """Says which trace it was, and what shows it."""
        trace_id = trace_id_of(traceparent)
        warn(f"trace: {trace_id}\n{self._way_to(trace_id)}")

    def _way_to(self, trace_id: str) -> str:
        if self._why_not is None:
            self._why_not = self._ask()
        server = self._connection.server
        if not self._why_not:
            at = "" if server == DEFAULT_SERVER else f" --server {server}"
            return f"see it with: headrace trace {trace_id}{at}"
        if self._why_not == _TELEMETRY_OFF:
            return f"{server} has telemetry off: nothing shows it"
        return (
            f"{server} does not give it back ({self._why_not}); where the server sends traces to Jaeger, see it with: "
            f"headrace trace {trace_id} --jaeger URL "
            "(in the compose stack: http://127.0.0.1:16686), else in the server's trace file"
        )

    def _ask(self) -> str:
        """Why the server gives no traces back; "": it does, or cannot be asked now."""
        try:
            with self._connection.admin() as admin:
                admin.get_trace(trace_id=_NO_TRACE, timeout=_TIMEOUT_S)
        except Unimplemented:
            return "it does not serve AdminService"
        except (PermissionDenied, Unauthenticated):
            return "the key has no permission for AdminService"
        except NotFound:
            return ""
        except HeadraceError as error:
            return _TELEMETRY_OFF if error.code.name == _TELEMETRY_OFF else ""
        except click.UsageError:
            return ""
        return ""
