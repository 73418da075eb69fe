"""`headrace trace` from a shell: sources, outputs, exit codes."""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from tests.support.ports import free_address
from tests.trace_viewer.synthetic_traces import Plan, Request, World, as_document, as_lines

from headrace.v1 import admin_pb2, admin_pb2_grpc
from headrace_trace.command import trace

ONE, TWO = "01JONE-7qm2", "01JTWO-7qm2"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
WORLD = World(Plan((Request(ONE, 0, 40, 300, trace_id=TRACE), Request(TWO, 50, 4000, 10))))


@functools.cache
def lines_of_the_world() -> str:
    return as_lines(WORLD.traces())


def run(*words: str) -> Result:
    return CliRunner().invoke(trace, list(words))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRACE_SERVER", "HEADRACE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    pathlib.Path("traces.jsonl").write_text(lines_of_the_world())


def fails(result: Result, *reasons: str) -> None:
    """One line, exit code 1."""
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert len(lines) == 1
    for reason in reasons:
        assert reason in lines[0]


def test_a_file_becomes_a_page_and_a_picture_named_after_the_request() -> None:
    pytest.importorskip("matplotlib")
    result = run("traces.jsonl", "--request", ONE)
    assert result.exit_code == 0, result.output
    assert result.output.split() == [f"trace-{ONE}.html", f"trace-{ONE}.png"]
    assert ONE in pathlib.Path(f"trace-{ONE}.html").read_text()
    assert pathlib.Path(f"trace-{ONE}.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_a_page_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("traces.jsonl", "--trace", TRACE.upper())
    assert result.exit_code == 0
    assert "no picture: a picture needs matplotlib" in result.output
    assert pathlib.Path(f"trace-{ONE}.html").exists()
    fails(run("traces.jsonl", "--request", ONE, "--png", "x.png"), "needs matplotlib")


def test_explain_says_it_in_words_and_writes_nothing_else() -> None:
    result = run("traces.jsonl", "--request", ONE, "--explain")
    assert result.exit_code == 0
    assert result.output.startswith(f"request {ONE} on llama-3.1-8b\ntrace   {TRACE}\n")
    assert f"prefill of request {TWO}" in result.output
    assert [path.name for path in pathlib.Path().iterdir()] == ["traces.jsonl"]


def test_json_has_every_wait_with_its_causes() -> None:
    result = run("traces.jsonl", "--request", ONE, "--json", "--html", "here.html")
    reported = json.loads(result.output)
    assert (reported["request_id"], reported["tokens"], len(reported["gaps"])) == (ONE, 300, 300)
    slow = max(reported["gaps"][1:], key=lambda gap: gap["ms"])
    assert slow["causes"][0]["kind"] == "prefill"
    assert slow["causes"][0]["prefills"][0]["request_id"] == TWO
    assert reported["slowest"][0]["words"].startswith("prefill of request")
    assert pathlib.Path("here.html").exists()


def test_files_are_put_together() -> None:
    lines = as_lines(WORLD.traces(), 1).splitlines(keepends=True)
    pathlib.Path("requests.json").write_text("".join(line for line in lines if "engine.step" not in line))
    pathlib.Path("steps.json").write_text("".join(line for line in lines if "engine.step" in line))
    alone = run("requests.json", "--request", ONE, "--json")
    both = run("requests.json", "steps.json", "--request", ONE, "--json")
    assert json.loads(alone.output)["usual_steps"] == 0
    assert json.loads(both.output)["usual_steps"] > 200


def test_protobuf_is_read_and_the_only_request_needs_no_name() -> None:
    pathlib.Path("one.pb").write_bytes(WORLD.traces(only=[ONE]).SerializeToString())
    assert run("one.pb", "--explain").exit_code == 0


def test_a_name_from_outside_stays_in_the_folder() -> None:
    hostile = "../../etc/<x>"
    pathlib.Path("one.pb").write_bytes(World(Plan((Request(hostile, 0, 40, 3),))).traces().SerializeToString())
    result = run("one.pb")
    assert result.output.splitlines()[0] == "trace-etc_x.html"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "traces.jsonl is empty"),
        (b"hello", "traces.jsonl is neither OTLP JSON nor a serialized TracesData"),
        (b"{}\n", "traces.jsonl holds 0 spans, but none of a Headrace request"),
        (b'{"resourceMetrics": []}', "none of a Headrace request"),
        (b'{"a"', "traces.jsonl is no JSON in line 1"),
    ],
)
def test_an_empty_or_foreign_file_is_one_line(content: bytes, reason: str) -> None:
    pathlib.Path("traces.jsonl").write_bytes(content)
    fails(run("traces.jsonl"), reason)


def test_an_unknown_id_or_file_is_one_line() -> None:
    fails(run("traces.jsonl", "--request", "nobody"), "traces.jsonl holds no request nobody")
    fails(run("traces.jsonl", "--trace", "0" * 32), f"traces.jsonl holds no trace {'0' * 32}")
    fails(run("not/there.jsonl"), "not/there.jsonl: No such file or directory")
    fails(run("traces.jsonl", "--request", ONE, "--html", "not/there.html"), "not/there.html: No such file")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("",),
        ("traces.jsonl",),
        (ONE, TWO),
        (ONE, "--trace", TRACE),
        (ONE, "--request", TWO),
        ("traces.jsonl", "--jaeger", "http://127.0.0.1:1"),
        ("traces.jsonl", "--nonsense"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_wrong_usage(words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 2


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """A server's memory of recent traces."""

    def GetTrace(self, request: admin_pb2.GetTraceRequest, context: Any) -> Iterator[admin_pb2.GetTraceResponse]:  # noqa: N802
        if (request.request_id or request.trace_id) not in (ONE, TRACE):
            context.abort(grpc.StatusCode.NOT_FOUND, "no such trace")
        data = WORLD.traces(only=[ONE]).SerializeToString()
        for at in range(0, len(data), 10_000):
            yield admin_pb2.GetTraceResponse(traces_data=data[at : at + 10_000])


@pytest.fixture
def server() -> Iterator[str]:
    """Address of a server that remembers one trace."""
    running = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield f"127.0.0.1:{port}"
    running.stop(None)


@pytest.mark.parametrize("key", [ONE, TRACE, TRACE.upper()])
def test_a_server_is_asked_for_a_request_or_a_trace(server: str, key: str) -> None:
    result = run(key, "--server", server, "--explain")
    assert result.exit_code == 0, result.output
    assert f"request {ONE}" in result.output and "300 tokens" in result.output


def test_what_a_server_does_not_remember_is_one_line(server: str) -> None:
    fails(run("01JNOBODY-7qm2", "--server", server), server, "remembers no request 01JNOBODY-7qm2")
    fails(run("0" * 32, "--server", server), server, f"remembers no trace {'0' * 32}")


def test_a_server_without_an_admin_service_is_one_line() -> None:
    running = grpc.server(futures.ThreadPoolExecutor(1))
    address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    running.start()
    fails(run(ONE, "--server", address), address, "does not serve AdminService: ask Jaeger (--jaeger URL)")
    running.stop(None)


def test_a_server_that_is_not_there_is_one_line() -> None:
    address = free_address()
    fails(run(ONE, "--server", address), "UNAVAILABLE", address)
    reported = run(ONE, "--server", address, "--json")
    assert (reported.exit_code, json.loads(reported.output)["error"]["code"]) == (1, "UNAVAILABLE")
    fails(run(TRACE, "--jaeger", f"http://{address}"), f"http://{address} cannot be asked")


class Query(BaseHTTPRequestHandler):
    """Jaeger's query service, as far as it is asked.

    The older interface alone where the server says so.
    """

    spans: dict[str, list[dict[str, Any]]] = {}
    older_only = False

    def do_GET(self) -> None:  # noqa: N802
        url = urllib.parse.urlsplit(self.path)
        trace_id = url.path.rpartition("/")[2]
        spans = self.spans.get(trace_id)
        if url.path == "/api/traces":
            tags = json.loads(urllib.parse.parse_qs(url.query)["tags"][0])
            self._answer({"data": [older(self.spans[TRACE])] if tags == {"headrace.request.id": ONE} else []})
        elif spans is None or (url.path.startswith("/api/v3/") and self.older_only):
            self.send_error(404)
        elif url.path.startswith("/api/v3/traces/"):
            self._answer({"result": {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}})
        else:
            self._answer({"data": [older(spans)]})

    def _answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def older(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """A trace as /api/traces has it, which a Jaeger 1.76 was seen to answer.

    Microseconds, references, arrays as text.
    """
    return {"spans": [_older_span(span) for span in spans]}


def _older_span(span: dict[str, Any]) -> dict[str, Any]:
    start, end = int(span["startTimeUnixNano"]) // 1000, int(span["endTimeUnixNano"]) // 1000
    references = [
        {"refType": "FOLLOWS_FROM", "traceID": link["traceId"].lstrip("0"), "spanID": link["spanId"]}
        for link in span.get("links", ())
    ]
    if span.get("parentSpanId"):
        references.insert(0, {"refType": "CHILD_OF", "traceID": span["traceId"], "spanID": span["parentSpanId"]})
    tags = [{"key": entry["key"], **_older_value(entry["value"])} for entry in span.get("attributes", ())]
    return {
        "traceID": span["traceId"],
        "spanID": span["spanId"],
        "operationName": span["name"],
        "startTime": start,
        "duration": end - start,
        "references": references,
        "tags": tags,
    }


def _older_value(value: dict[str, Any]) -> dict[str, Any]:
    kind, held = next(iter(value.items()))
    if kind == "arrayValue":
        items = [
            int(item["intValue"]) if "intValue" in item else item["stringValue"] for item in held.get("values", ())
        ]
        return {"type": "string", "value": json.dumps(items)}
    return {
        "type": {"intValue": "int64", "doubleValue": "float64", "boolValue": "bool"}.get(kind, "string"),
        "value": int(held) if kind == "intValue" else held,
    }


@pytest.fixture(params=[False, True], ids=["v3", "older"])
def jaeger(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a query service, with or without the newer interface."""
    spans: dict[str, list[dict[str, Any]]] = {}
    for span in as_document(WORLD.traces("span", only=[ONE]))["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        spans.setdefault(span["traceId"], []).append(span)
    handler = type("Handler", (Query,), {"spans": spans, "older_only": request.param})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}/"
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.mark.parametrize("key", [ONE, TRACE])
def test_jaeger_is_asked_for_the_trace_and_for_those_of_its_steps(jaeger: str, key: str) -> None:
    result = run(key, "--jaeger", jaeger, "--json")
    assert result.exit_code == 0, result.output
    reported = json.loads(result.output)
    assert (reported["request_id"], reported["tokens"]) == (ONE, 300)
    # 300 tokens reach into a second trace of 256 steps.
    assert reported["usual_steps"] > 256
    slow = max(reported["gaps"][1:], key=lambda gap: gap["ms"])
    assert slow["causes"][0]["prefills"][0]["request_id"] == TWO


def test_what_jaeger_does_not_know_is_one_line(jaeger: str) -> None:
    fails(run("0" * 32, "--jaeger", jaeger), "knows no trace")
    fails(run("01JNOBODY-7qm2", "--jaeger", jaeger), "knows no request 01JNOBODY-7qm2")
    fails(run(ONE, "--jaeger", "ftp://x"), "must begin with http:// or https://")
