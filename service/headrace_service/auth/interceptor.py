"""The gate in front of every method.

Owns the order of questions: who calls (UNAUTHENTICATED), how large the metadata is, whether there
is such a method at all, whether the caller may call it (PERMISSION_DENIED) and whether
administration is served (UNIMPLEMENTED). It stands before all services of the server, ours or not,
so that a service added later is behind it too. grpc.health.v1 is open unless the setting says
otherwise: probes of load balancers and orchestrators hold no keys, and it tells nothing but whether
the server serves.

A refused call is answered before its messages are read or parsed. The caller reaches the handler
through `caller.set_current`: grpc.aio runs the interceptor and the handler in one task, which a
test holds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from headrace_service import errors
from headrace_service.auth import audit, caller, permissions, refusals
from headrace_service.auth.caller import Caller
from headrace_service.auth.key_ring import KeyRing
from headrace_service.errors import ServiceError

# What a header takes besides its bytes, as HTTP/2 counts it.
_HEADER_OVERHEAD_BYTES = 32
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Names the caller of each call, or refuses it.

    Args:
        keys: the keys; None: everybody may call, on addresses where the configuration allows that.
        admin: whether methods that need `admin` are served.
        health_needs_key: whether grpc.health.v1 asks for a key too.
        max_metadata_bytes: largest metadata of a call.
    """

    def __init__(self, keys: KeyRing | None, *, admin: bool, health_needs_key: bool, max_metadata_bytes: int) -> None:
        self._keys = keys
        self._admin = admin
        self._open_prefixes = () if health_needs_key else (permissions.HEALTH_PREFIX,)
        self._max_metadata_bytes = max_metadata_bytes
        self._refusals = audit.RefusalLog()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """Returns the method's handler, or one that refuses the call."""
        method = details.method.removeprefix("/")
        who = caller.EVERYBODY
        try:
            who = self._identified(method, details)
            self._check_size(details)
            handler = await continuation(details)
            if handler is None:
                return handler
            return self._admitted(handler, method, who)
        except ServiceError as error:
            return self._refusing(error, method, who)

    def _identified(self, method: str, details: grpc.HandlerCallDetails) -> Caller:
        if self._keys is None or method.startswith(self._open_prefixes):
            return caller.EVERYBODY
        return self._keys.authenticate(details.invocation_metadata or ())

    def _check_size(self, details: grpc.HandlerCallDetails) -> None:
        num_bytes = sum(
            len(key) + len(value) + _HEADER_OVERHEAD_BYTES for key, value in details.invocation_metadata or ()
        )
        if num_bytes > self._max_metadata_bytes:
            raise refusals.metadata_too_large(num_bytes, self._max_metadata_bytes)

    def _admitted(self, handler: _Handler, method: str, who: Caller) -> _Handler:
        caller.set_current(who)
        if method.startswith(permissions.HEALTH_PREFIX):
            return handler
        who.check_method(method)
        if permissions.needed(method) is not permissions.Permission.ADMIN:
            return handler
        if not self._admin:
            raise refusals.admin_off()
        return audit.audited(handler, method, who)

    def _refusing(self, error: ServiceError, method: str, who: Caller) -> _Handler:
        """Returns a handler that ends the call whatever kind it is.

        On the wire, a status without messages answers all four.
        """

        async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._refusals.write(error.code, who.key_id, errors.echo(method), context.peer())
            await context.abort(error.code, error.message, trailing_metadata=errors.trailing_metadata(error))

        return grpc.stream_stream_rpc_method_handler(refuse)
