"""The audit log: who administered what, and who was turned away.

Owns what the lines say. One line for each call of a method that needs `admin`, with its outcome;
lines for refused calls, of which a flood is counted rather than written. Key ids, methods, models,
codes and peers stand there; never keys, prompts or answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc

from headrace_service.auth import audit_log
from headrace_service.auth.caller import Caller
from headrace_service.errors import echo
from headrace_service.messages.parsing import Unparsed

_log = audit_log.logger()
_Context = grpc.aio.ServicerContext[Any, Any]
# KServe names the model to load in repository_name.
_MODEL_FIELDS = ("model", "model_name", "name", "repository_name")


class RefusalLog:
    """Limits the lines that are logged about refused calls.

    There are so many at once, then one a second with the number of those left out.

    Args:
        burst: lines that may be written at once.
        clock_s: seconds, from anywhere.
    """

    def __init__(self, burst: int = 20, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._clock_s = clock_s
        self._left = float(burst)
        self._at_s = clock_s()
        self._unwritten = 0

    def write(self, code: grpc.StatusCode, key_id: str, method: str, peer: str) -> None:
        """Writes one refused call, or counts it."""
        now_s = self._clock_s()
        self._left, self._at_s = min(self._burst, self._left + now_s - self._at_s), now_s
        if self._left < 1:
            self._unwritten += 1
            return
        self._left -= 1
        unwritten, self._unwritten = self._unwritten, 0
        _log.warning(
            "call.refused", code=code.name, key_id=key_id, method=method, peer=peer, unwritten_before=unwritten
        )


def audited(handler: grpc.RpcMethodHandler[Any, Any], method: str, caller: Caller) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler of one request that leaves a line in the audit log however it ends."""
    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
    assert behaviour is not None, f"{method}: methods with a stream of requests are no administration"
    inner = cast(Callable[[Any, _Context], Awaitable[Any]], behaviour)

    async def answer(request: Any, context: _Context) -> Any:
        outcome = "OK"
        try:
            return await inner(request, context)
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        except BaseException:
            outcome = _code_of(context)
            raise
        finally:
            _log.info(
                "admin.call",
                key_id=caller.key_id,
                method=method,
                model=_model_of(request),
                outcome=outcome,
                peer=context.peer(),
                certificate=_certificate_name(context),
            )

    remade = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return remade(
        answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _code_of(context: _Context) -> str:
    """Returns the status that ends a failed call.

    Grpc makes UNKNOWN of an exception that set none.
    """
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK else "UNKNOWN"


def _model_of(request: Any) -> str:
    """Returns the model that a request names; "" if it names none, or is no message."""
    if isinstance(request, Unparsed):
        request = request.peek()
    named = (getattr(request, field, "") for field in _MODEL_FIELDS)
    model = next((value for value in named if isinstance(value, str) and value), "")
    return echo(model) if model else ""


def _certificate_name(context: _Context) -> str:
    """Returns the common name of the client's certificate; "" if it has none."""
    name = next(iter(context.auth_context().get("x509_common_name", ())), b"")
    return echo(name.decode(errors="replace")) if name else ""
