"""Requests on their way to the engine, as tests make, read and spoil them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import Request
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop

GREEDY = Sampling(temperature=0.0)


def ids(*tokens: int) -> bytes:
    """Token ids as a column."""
    return np.array(tokens, "<u4").tobytes()


def greedy_request(prompt: list[int], max_tokens: int, **fields: Any) -> Request:
    """A request without anything else, but for the fields."""
    return Request(ids(*prompt), **{"stop": Stop(max_tokens), "sampling": GREEDY, **fields})


def asked(add: engine_pb2.AddRequest) -> Request:
    """What a message asks for."""
    return Request.decode(add.request)


def changed(request: Request, path: str, value: Any) -> Request:
    """The request with another value at a path, such as "sampling.top_p", whatever its type."""
    name, _, rest = path.partition(".")
    if rest:
        value = msgspec.structs.replace(getattr(request, name), **{rest: value})
    return msgspec.structs.replace(request, **{name: value})


def change(add: engine_pb2.AddRequest, path: str, value: Any) -> None:
    """Has a message ask for another value at a path."""
    add.request = changed(asked(add), path, value).encode()
