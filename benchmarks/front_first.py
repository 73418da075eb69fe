"""How long a first token takes, by gRPC's Generate and by OpenAI's HTTP API, asked in turn.

Owns the two ways of asking. Both clients are as plain as they can be, on connections that are open:
a synchronous gRPC channel, and a socket. So the clients differ too, not the services alone.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import grpc

from benchmarks import figures
from benchmarks.front_client import OPENAI_END, OPENAI_TOKEN, SERVICE, openai_request, spec
from headrace.v1 import inference_pb2

_MAX_TOKENS = 4
_WARM_UP = 20


def measure(generate_address: str, openai_address: str, num_requests: int) -> dict[str, Any]:
    """Returns milliseconds from request to first token, by way, and what OpenAI's adds."""
    host, _, port = openai_address.rpartition(":")
    with grpc.insecure_channel(generate_address) as channel, socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = {"generate": lambda: generate(channel), "openai": lambda: _openai(connection)}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(_WARM_UP + num_requests):
            for way, ask in ways.items():
                first_s = _timed(ask)
                if number >= _WARM_UP:
                    times[way].append(first_s * 1e3)
    found = {f"{way}_ms_{name}": _at(times[way], share) for way in ways for name, share in _SHARES.items()}
    added = {
        f"added_ms_{name}": round(found[f"openai_ms_{name}"] - found[f"generate_ms_{name}"], 3) for name in _SHARES
    }
    return {"requests": num_requests, **found, **added}


_SHARES = {"p50": 0.5, "p90": 0.9}


def _at(times_ms: list[float], share: float) -> float:
    return round(figures.percentile(times_ms, share), 3)


def _timed(ask: Callable[[], float]) -> float:
    began_s = time.monotonic()
    return ask() - began_s


def generate(channel: grpc.Channel) -> float:
    """Asks by gRPC. Returns when the first token came (time.monotonic), after the stream's end."""
    request = inference_pb2.GenerateRequest(spec=spec())
    request.spec.stop.max_tokens = _MAX_TOKENS
    first_s = 0.0
    generate = channel.unary_stream(SERVICE + "Generate")  # type: ignore[call-arg]
    for data in generate(request.SerializeToString()):
        if not first_s and inference_pb2.GenerateResponse.FromString(data).event.HasField("delta"):
            first_s = time.monotonic()
    return first_s


def _openai(connection: socket.socket) -> float:
    """Returns when the first token came, after the stream's end."""
    connection.sendall(openai_request(_MAX_TOKENS))
    first_s, received = 0.0, b""
    while not received.endswith(OPENAI_END):
        received += connection.recv(1 << 16)
        if not first_s and OPENAI_TOKEN in received:
            first_s = time.monotonic()
    return first_s
