"""Who calls.

Owns the caller that the interceptor found for a call, and its way to the handler: a context
variable, set in the task that then runs the handler. A handler that runs without it is a mistake of
ours and fails; it never runs as somebody by default. Calls that are open stand in a table, so that
they can be ended with their key.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import grpc

from headrace_service.auth import permissions, refusals
from headrace_service.auth.api_keys import ALL_MODELS, ApiKey, Limits
from headrace_service.errors import ServiceError

# Who called, by the task that serves the call; None once the call was ended with its key.
OpenCalls = MutableMapping["asyncio.Task[Any]", "Caller | None"]

# An entry that all is allowed to: everybody, on a server without keys.
_EVERYBODY = ApiKey("everybody", "0" * 64, tuple(permissions.Permission), (ALL_MODELS,))


class Caller:
    """A caller, and what it may do now.

    Rights are looked up each time they are asked for, since a stream may live longer than the key
    that opened it.

    Args:
        key_id: the key's id; "" on a server without keys.
        entry: returns the key's entry as it is now, or None once the key that this caller presented
            is not valid any more.
        open_calls: where calls stand while they are open.
    """

    __slots__ = ("_entry", "_open_calls", "key_id")

    def __init__(self, key_id: str, entry: Callable[[], ApiKey | None], open_calls: OpenCalls) -> None:
        self.key_id = key_id
        self._entry = entry
        self._open_calls = open_calls

    @property
    def tenant(self) -> str:
        """On whose behalf requests are made; "" for everybody on a server without keys."""
        return self.key_id

    @property
    def limits(self) -> Limits:
        """The caller's quotas. Raises ServiceError as `check_method` does."""
        return self._valid().limits

    def check_method(self, method: str) -> None:
        """Lets a method pass, given as "package.Service/Method".

        Raises:
            ServiceError: PERMISSION_DENIED; or UNAUTHENTICATED, the key is not valid any more.
        """
        if not permissions.allows(self._valid().permissions, method):
            raise refusals.method_denied(method, permissions.needed(method))

    def check_model(self, model: str) -> None:
        """Raises unless the caller may use the model of this name.

        Raises:
            ServiceError: PERMISSION_DENIED; or UNAUTHENTICATED, the key is not valid any more.
        """
        if not self._valid().allows_model(model):
            raise refusals.model_denied(model)

    def may_use_model(self, model: str) -> bool:
        """Returns whether the caller may know of a model. Raises ServiceError: UNAUTHENTICATED."""
        return self._valid().allows_model(model)

    def may_administer(self) -> bool:
        """Returns whether the caller has all of administration.

        Raises ServiceError: UNAUTHENTICATED.
        """
        return permissions.Permission.ADMIN in self._valid().permissions

    def is_valid(self) -> bool:
        """Returns whether the key that this caller presented is still good."""
        return self._entry() is not None

    @contextlib.contextmanager
    def open_call(self) -> Iterator[None]:
        """Holds a call open that this task serves.

        Raises:
            ServiceError: UNAUTHENTICATED, from inside the block, where `end_invalid` ended the
                call.
        """
        task = asyncio.current_task()
        assert task is not None
        self._open_calls[task] = self
        try:
            yield
        except (asyncio.CancelledError, Exception) as error:
            # A write that waits for a slow reader answers a cancellation with an exception of
            # grpc's own.
            if self._open_calls[task] is not None or isinstance(error, (ServiceError, grpc.aio.AbortError)):
                raise
            task.uncancel()
            raise refusals.unauthenticated() from None
        finally:
            del self._open_calls[task]

    def _valid(self) -> ApiKey:
        entry = self._entry()
        if entry is None:
            raise refusals.unauthenticated()
        return entry


def end_invalid(open_calls: OpenCalls) -> int:
    """Ends the calls whose callers' keys are not valid any more, UNAUTHENTICATED.

    Returns how many.
    """
    invalid = [task for task, who in open_calls.items() if who is not None and not who.is_valid()]
    for task in invalid:
        open_calls[task] = None
        task.cancel()
    return len(invalid)


EVERYBODY = Caller("", lambda: _EVERYBODY, {})

_current: contextvars.ContextVar[Caller] = contextvars.ContextVar("headrace_caller")


def set_current(caller: Caller) -> None:
    """Sets the caller of the call that this task serves."""
    _current.set(caller)


def current() -> Caller:
    """Returns the caller of the call that this task, or the one that started it, serves."""
    caller = _current.get(None)
    assert caller is not None, "a handler ran without the interceptor"
    return caller
