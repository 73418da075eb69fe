"""A real OpenTelemetry Collector and a real Jaeger as processes on free ports.

They are the programs `otelcol` and `jaeger` (version 2, or the all-in-one of version 1) of the
folder REAL_PARTS, by default ~/.cache/headrace-parts, or of the path. The collector runs
deploy/collector/config.yaml, Jaeger version 2 deploy/jaeger/config.yaml, both with other addresses.
Spans are read from Jaeger's API as OTLP, without code of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from tests.support.compose_files import DEPLOY
from tests.support.ports import free_port
from tests.support.processes import wait_until

_FOLDER = pathlib.Path(os.environ.get("REAL_PARTS", "~/.cache/headrace-parts")).expanduser()
_START_S = 30.0


# Ports of Jaeger's version 1 that no test speaks to: the kernel chooses them.
_UNUSED_PORTS = (
    "collector.otlp.http.host-port",
    "collector.grpc-server.host-port",
    "collector.http-server.host-port",
    "admin.http.host-port",
)


def program(*names: str) -> str | None:
    """Path of the first of the programs that is there; None: none is."""
    for name in names:
        if found := shutil.which(name, path=str(_FOLDER)) or shutil.which(name):
            return found
    return None


OTELCOL, JAEGER = program("otelcol"), program("jaeger-v2", "jaeger")
MISSING = "needs the programs otelcol and jaeger, in REAL_PARTS or on the path" if not (OTELCOL and JAEGER) else ""


@dataclass(frozen=True)
class Span:
    """A span as Jaeger has it. Times in UNIX nanoseconds, ids in hex."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    resource: dict[str, Any]

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


class Jaeger:
    """The query side of a running Jaeger."""

    def __init__(self, url: str) -> None:
        self.url = url

    def trace(self, trace_id: str) -> list[Span]:
        """All spans of a trace; none if it is not known (yet)."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v3/traces/{trace_id}", timeout=30) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return []
            raise
        return [
            _span(span, _values(resource["resource"].get("attributes", ())))
            for resource in found["result"]["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def is_ready(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/api/services", timeout=2) as answer:
            return bool(answer.status == 200)
        return False


@dataclass(frozen=True)
class RealParts:
    """What runs: where spans go in, and where they come out."""

    otlp_endpoint: str
    jaeger: Jaeger


@contextlib.contextmanager
def real_parts() -> Iterator[RealParts]:
    """Starts Jaeger and the collector before it, and ends both."""
    assert OTELCOL and JAEGER
    otlp, inner, query = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        stack.enter_context(_running(_jaeger_command(folder, inner, query), folder / "jaeger.log"))
        stack.enter_context(_running(_collector_command(folder, otlp, inner), folder / "collector.log"))
        jaeger = Jaeger(f"http://127.0.0.1:{query}")
        wait_until(jaeger.is_ready, _START_S, "Jaeger answers")
        wait_until(lambda: _accepts(otlp) and _accepts(inner), _START_S, "the collector listens")
        yield RealParts(f"http://127.0.0.1:{otlp}", jaeger)


def _collector_command(folder: pathlib.Path, otlp: int, jaeger: int) -> list[str]:
    config = yaml.safe_load((DEPLOY / "collector" / "config.yaml").read_text())
    config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] = f"127.0.0.1:{otlp}"
    config["exporters"]["otlp/jaeger"]["endpoint"] = f"127.0.0.1:{jaeger}"
    (folder / "collector.yaml").write_text(yaml.safe_dump(config))
    return [str(OTELCOL), "--config", str(folder / "collector.yaml")]


def _jaeger_command(folder: pathlib.Path, otlp: int, query: int) -> list[str]:
    assert JAEGER
    if (
        "--collector.otlp.grpc.host-port"
        in subprocess.run([JAEGER, "help"], capture_output=True, text=True, check=False).stdout
    ):
        addresses = {
            "collector.otlp.grpc.host-port": otlp,
            "query.http-server.host-port": query,
            **dict.fromkeys(_UNUSED_PORTS, 0),
            "query.grpc-server.host-port": free_port(),
        }
        return [JAEGER, *(f"--{name}=127.0.0.1:{port}" for name, port in addresses.items())]
    config = yaml.safe_load((DEPLOY / "jaeger" / "config.yaml").read_text())
    config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] = f"127.0.0.1:{otlp}"
    config["extensions"]["jaeger_query"]["http"]["endpoint"] = f"127.0.0.1:{query}"
    config["extensions"]["jaeger_query"]["grpc"]["endpoint"] = f"127.0.0.1:{free_port()}"
    config["extensions"]["healthcheckv2"]["http"]["endpoint"] = f"127.0.0.1:{free_port()}"
    (folder / "jaeger.yaml").write_text(yaml.safe_dump(config))
    return [JAEGER, "--config", str(folder / "jaeger.yaml")]


@contextlib.contextmanager
def _running(command: list[str], log: pathlib.Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OTEL_TRACES_SAMPLER": "always_off"}
        )
    try:
        yield
        assert process.poll() is None, f"{command[0]} ended by itself: {log.read_text()[-2000:]}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _span(span: dict[str, Any], resource: dict[str, Any]) -> Span:
    return Span(
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        name=span["name"],
        kind=span["kind"],
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_values(span.get("attributes", ())),
        links=tuple((link["traceId"], link["spanId"]) for link in span.get("links", ())),
        resource=resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute["key"]: _value(attribute["value"]) for attribute in attributes}


def _value(value: dict[str, Any]) -> Any:
    ((kind, held),) = value.items() or (("stringValue", ""),)
    if kind == "intValue":
        return int(held)
    return [_value(each) for each in held.get("values", ())] if kind == "arrayValue" else held
