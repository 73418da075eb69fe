"""A stand-in for `python -m headrace_supervisor serve`, for tests of headrace.local.

It is the canned service behind a real health check.

Installed by the tests as the module headrace_supervisor of a folder of their own. Its model
"broken" ends with exit code 2, "stubborn" ignores SIGTERM and starts a child, "never" is never
ready.
"""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time
from concurrent import futures
from itertools import pairwise

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tests.clients.canned_service import CannedService

from headrace.v1 import inference_pb2_grpc


def main(arguments: list[str]) -> None:
    """Serve --model NAME --listen ADDRESS [--listen ADDRESS] [anything]."""
    model = arguments[arguments.index("--model") + 1]
    addresses = [value for flag, value in pairwise(arguments) if flag == "--listen"]
    print(f"serve {' '.join(arguments)}", file=sys.stderr, flush=True)
    if model == "broken":
        print("models/broken/config.json: architecture 'Foo' is not known", file=sys.stderr)
        sys.exit(2)
    if model == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        print(f"child {child.pid}", file=sys.stderr, flush=True)
    server = grpc.server(futures.ThreadPoolExecutor(8))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(CannedService(), server)
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    ports = [server.add_insecure_port(address) for address in addresses]
    server.start()
    print("loading", file=sys.stderr, flush=True)
    for line in (
        '{"event": "loading", "phase": "weights", "progress": "7 of 14 MiB", "done": 7, "total": 14}',
        '{"event": "loading", "phase": "weights", "progress": "14 of 14 MiB, 0.5 s", "seconds": 0.5}',
        '{"event": "memory plan", "kv_cache": "128.0 MiB", "level": "info"}',
        '{"event": "nobody asked", "level": "info"}',
        '{"event": "slow disk", "level": "warning"}',
    ):
        print(line, file=sys.stderr, flush=True)
    time.sleep(0.2)
    if model != "never":
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        bound = [
            address.replace(":0", f":{port}") if address.endswith(":0") else address
            for address, port in zip(addresses, ports, strict=True)
        ]
        print(f"listening on {', '.join(bound)} (ready after 0.2 s; Ctrl-C ends)", flush=True)
    assert pathlib.Path(addresses[0].removeprefix("unix:")).is_socket()
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
