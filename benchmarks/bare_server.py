"""A gRPC server that does nothing but write: what grpc.aio alone costs.

A front end is measured beside it.

Answers any server-streaming method by the same bytes again and again: as fast as the stream takes
them, or one per stream at a set rate, all streams of a step woken together as a step of an engine
wakes them.

    python -m benchmarks.bare_server --listen 127.0.0.1:50099 --bytes 32 [--rate 50]
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from typing import Any

import grpc
import uvloop


class _Server:
    def __init__(self, message: bytes, rate: float) -> None:
        self._message = message
        self._period_s = 1 / rate if rate else 0.0
        self._waiting: list[asyncio.Future[None]] = []

    async def stream(self, _: bytes, context: Any) -> None:
        """One call, until its caller leaves."""
        while True:
            if self._period_s:
                waiter = asyncio.get_running_loop().create_future()
                self._waiting.append(waiter)
                await waiter
            await context.write(self._message)

    async def run_steps(self) -> None:
        """Wakes all calls together at the set rate."""
        next_s = time.monotonic()
        while self._period_s:
            next_s += self._period_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)


class _AnyMethod(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, server: _Server) -> None:
        self._handler = grpc.unary_stream_rpc_method_handler(server.stream)

    def service(self, _: grpc.HandlerCallDetails) -> Any:
        return self._handler


async def _serve(listen: str, message: bytes, rate: float) -> None:
    bare = _Server(message, rate)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", 10_000)])
    server.add_generic_rpc_handlers((_AnyMethod(bare),))
    server.add_insecure_port(listen)
    await server.start()
    steps = asyncio.create_task(bare.run_steps())
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    steps.cancel()
    await server.stop(0)


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--bytes", type=int, default=32, help="size of each message")
    parser.add_argument("--rate", type=float, default=0.0, help="messages per second and stream; 0: as fast as taken")
    options = parser.parse_args()
    uvloop.run(_serve(options.listen, b"\0" * options.bytes, options.rate))


if __name__ == "__main__":
    main()
