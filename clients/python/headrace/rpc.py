"""A call as a value: which RPC, what to send, how to read the answer.

Owns the two forms that calls have. Which calls there are is in calls.py and admin_calls.py; they
are run by connections/transport.py and connections/aio_transport.py, which know no call by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message as ProtobufMessage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unary(Generic[T]):
    """A call with one answer.

    `takes_long` tells calls that wait for a generation, or for a model to load, from those that are
    quick.
    """

    rpc: str
    request: ProtobufMessage
    convert: Callable[[Any], T]
    takes_long: bool = False
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Streaming:
    """A call that streams messages with an `event` field.

    It has `num_outputs` outputs, where their number is known.
    """

    rpc: str
    request: ProtobufMessage
    num_outputs: int | None = None
    metadata: tuple[tuple[str, str], ...] = ()
