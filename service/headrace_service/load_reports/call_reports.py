"""Load reports in the trailers of calls: `endpoint-load-metrics-bin`.

Owns which calls carry one: all, where the configuration says always, else those whose
metadata holds `endpoint-load-metrics-format: bin`. Who may read the stream of reports may ask for
them, and nobody else; a format that this server does not write is refused. What is reported is what
was known when the call ended, or, where it failed, when it began.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeAlias

import grpc

from headrace_service import errors
from headrace_service.auth import caller
from headrace_service.load_reports import open_rca_service
from headrace_service.load_reports.load_watch import LoadWatch
from headrace_service.messages import framed_handlers
from headrace_service.messages.framed_handlers import Behaviour

TRAILER: Final = "endpoint-load-metrics-bin"
ASKED_BY: Final = "endpoint-load-metrics-format"
_FORMAT: Final = "bin"
_UNREPORTED: Final = ("/grpc.health.", "/grpc.reflection.", "/xds.service.orca.")
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context = grpc.aio.ServicerContext[Any, Any]


class CallReportsInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Adds the newest report to calls. Stands behind the interceptor that knows who calls.

    Args:
        watch: has the report.
        always: whether all calls carry one.
    """

    def __init__(self, watch: LoadWatch, *, always: bool) -> None:
        self._watch = watch
        self._always = always

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """Returns the method's handler, which then reports if it is to."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_UNREPORTED):
            return handler
        asked = _asked_format(details.invocation_metadata or ())
        if asked is not None:
            return framed_handlers.framed(handler, self._refused_or_reported(asked))
        return framed_handlers.framed(handler, self._reported) if self._always else handler

    async def _reported(self, inner: Behaviour, request: Any, context: _Context) -> Any:
        # A call that fails ends with the trailers that it has by then.
        self._report(context)
        answer = await inner(request, context)
        self._report(context)
        return answer

    def _refused_or_reported(self, asked: str) -> framed_handlers.Frame:
        async def frame(inner: Behaviour, request: Any, context: _Context) -> Any:
            try:
                _check(asked)
            except errors.ServiceError as error:
                await context.abort(error.code, error.message, trailing_metadata=errors.trailing_metadata(error))
            return await self._reported(inner, request, context)

        return frame

    def _report(self, context: _Context) -> None:
        report = self._watch.newest()
        if report is not None:
            context.set_trailing_metadata(((TRAILER, report),))


def _check(asked: str) -> None:
    """Raises ServiceError: INVALID_ARGUMENT, PERMISSION_DENIED, UNAUTHENTICATED."""
    if asked.lower() != _FORMAT:
        raise errors.invalid_field(f"metadata {ASKED_BY}", f"must be {_FORMAT}, not {errors.echo(asked)}")
    caller.current().check_method(open_rca_service.METHOD)


def _asked_format(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    values = [value for name, value in metadata if name == ASKED_BY]
    return str(values[0]) if values else None
