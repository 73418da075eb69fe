"""From a call's bytes to its request message, with nothing guessed and nothing ignored.

Owns two rules that protobuf itself does not keep: bytes that do not parse are the caller's mistake
(grpc would answer UNKNOWN with a Python class name), and a field that this server's .proto does not
have is refused by its number instead of being dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from google.protobuf import message
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace_service import errors

Request = TypeVar("Request", bound=message.Message)
_MAX_DEPTH = 32
# What is looked through in a few dozen milliseconds, during which no other call is served.
_MAX_MESSAGES = 16_384
# Not those of a conversation alone.
_COUNTED = "each message, part, call and tool is one"
_MAX_UNKNOWN_BYTES = 64 << 10


class Unparsed(Generic[Request]):
    """A request as it arrived, not parsed.

    Deserializers must not raise inside grpc, so parsing waits until a handler can answer.
    """

    __slots__ = ("_data", "_message_type")

    def __init__(self, message_type: type[Request], data: bytes) -> None:
        self._message_type = message_type
        self._data = data

    def parse(self) -> Request:
        """Returns the parsed message.

        Raises:
            ServiceError: INVALID_ARGUMENT; the bytes are no such message, hold fields that the
                message does not have, or more messages or unknown bytes than are looked through.
        """
        try:
            request = self._message_type.FromString(self._data)
        except message.DecodeError:
            raise errors.malformed() from None
        if len(self._data) > _MAX_UNKNOWN_BYTES:
            self._check_unknown_bytes(request)
        violations = list(itertools.islice(_unknown_fields(request, "", 0, itertools.count(1)), errors.MAX_VIOLATIONS))
        if violations:
            raise errors.invalid(violations)
        return request

    def peek(self) -> Request | None:
        """Returns the message unchecked, for those who only look; None if the bytes are none."""
        try:
            return self._message_type.FromString(self._data)
        except message.DecodeError:
            return None

    def _check_unknown_bytes(self, request: Request) -> None:
        """Refuses a mass of unknown fields unseen.

        UnknownFieldSet makes an object of each, seconds for a large request.
        """
        known = self._message_type.FromString(self._data)
        known.DiscardUnknownFields()
        num_bytes = request.ByteSize() - known.ByteSize()
        if num_bytes > _MAX_UNKNOWN_BYTES:
            raise errors.invalid_field(
                "request", f"has {num_bytes} bytes of fields that are not known to this server; must have none"
            )


class _Missing(Unparsed[message.Message]):
    """In the place of a request that never came."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(message.Message, b"")

    def parse(self) -> message.Message:
        """Raises ServiceError: INVALID_ARGUMENT."""
        raise errors.no_request()

    def peek(self) -> None:
        """Returns None."""


MISSING: Final = _Missing()


def deserializer(message_type: type[Request]) -> Callable[[bytes], Unparsed[Request]]:
    """Returns the deserializer to give to grpc."""
    return lambda data: Unparsed(message_type, data)


def _unknown_fields(parent: message.Message, path: str, depth: int, seen: Iterator[int]) -> Iterator[errors.Violation]:
    if next(seen) > _MAX_MESSAGES:
        raise errors.invalid_field(path, f"a request may hold at most {_MAX_MESSAGES} protobuf messages: {_COUNTED}")
    if depth > _MAX_DEPTH:
        raise errors.invalid_field(path, f"protobuf messages may nest at most {_MAX_DEPTH} deep")
    for unknown in UnknownFieldSet(parent):  # type: ignore[attr-defined]
        where = f"{path}.{unknown.field_number}" if path else str(unknown.field_number)
        yield errors.Violation(
            where, f"field number {unknown.field_number} of {parent.DESCRIPTOR.full_name} is not known to this server"
        )
    for field, value in parent.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            name = f"{path}.{field.name}" if path else field.name
            yield from _unknown_in_field(value, name, depth + 1, seen)


def _unknown_in_field(value: object, name: str, depth: int, seen: Iterator[int]) -> Iterator[errors.Violation]:
    if isinstance(value, message.Message):
        yield from _unknown_fields(value, name, depth, seen)
        return
    for index, item in enumerate(value):  # type: ignore[var-annotated,arg-type]
        yield from _unknown_fields(item, f"{name}[{index}]", depth, seen)
