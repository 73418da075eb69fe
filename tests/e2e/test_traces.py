"""A whole server that traces everything.

Each generation is found by its request, and nothing that callers said stands anywhere.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2
from tests.kserve.wire import add, raw_strings, request
from tests.support.processes import wait_until
from tests.support.running_server import RunningServer, environment, running_server

from headrace.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, inference_pb2, inference_pb2_grpc
from headrace_protos.inference import grpc_service_pb2

MARKER = "xylophone-4711"
ALLOWED = ("--allow", "generate", "--allow", "read", "--allow", "admin")
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
Spec = generation_pb2.GenerationSpec


class Traced:
    """A server with keys that logs, traces and counts all it can."""

    def __init__(self, server: RunningServer, folder: pathlib.Path, key: str) -> None:
        self.server, self.folder, self.key = server, folder, key
        self.channel = grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def metadata(self, span_id: str = "b" * 16) -> tuple[tuple[str, str], ...]:
        return ("authorization", f"Bearer {self.key}"), ("traceparent", f"00-{TRACE_ID}-{span_id}-01")

    def metrics(self) -> str:
        address = re.findall(r"metrics are served.*?address\W+(127\.0\.0\.1:\d+)", "".join(self.server.lines))[-1]
        asked = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(asked, timeout=60) as reply:
            text: str = reply.read().decode()
        return text

    def telemetry_answers(self) -> bool:
        """Whether traces can be asked for."""
        return self._found(request_id="none") is not None

    def spans(self, **key: str) -> list[Any]:
        """The spans of a trace that the server remembers.

        There are none while it does not remember it, or is too busy to say.
        """
        return self._found(**key) or []

    def _found(self, **key: str) -> list[Any] | None:
        """Spans of a trace; None: the telemetry process does not answer."""
        try:
            parts = self.admin.GetTrace(admin_pb2.GetTraceRequest(**key), metadata=self.metadata()[:1], timeout=30)
            data = trace_pb2.TracesData.FromString(b"".join(part.traces_data for part in parts))
        except grpc.RpcError as error:
            code = error.code()  # type: ignore[attr-defined]
            assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE), error
            return [] if code is grpc.StatusCode.NOT_FOUND else None
        return [span for resource in data.resource_spans for scope in resource.scope_spans for span in scope.spans]

    def spans_with(self, request_id: str, *names: str) -> list[Any]:
        """The spans of a request, once spans of these names are among them."""
        found: list[Any] = []

        def are_there() -> bool:
            found[:] = self.spans(request_id=request_id)
            return set(names) <= {span.name for span in found}

        wait_until(are_there, 60, f"{request_id} has spans {names}")
        return found

    def spans_below(self, span_id: str, request_id: str) -> list[Any]:
        """The spans of a request if one of them stands below this one, else none."""
        found = self.spans(request_id=request_id)
        return found if any(span.parent_span_id.hex() == span_id for span in found) else []


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    keys = ["keys", "new", "app", "--keys-file", str(folder / "keys.json"), *ALLOWED]
    made = subprocess.run(
        [sys.executable, "-m", "headrace", *keys], env=environment(), capture_output=True, text=True, check=True
    )
    options = {
        "--keys-file": str(folder / "keys.json"),
        "--log-level": "debug",
        "--trace-file": str(folder / "traces.jsonl"),
        "--trace-sample-ratio": "1",
        "--trace-detail": "span",
        "--metrics-listen": "127.0.0.1:0",
        "--device": "cpu",
        "--num-blocks": "1024",
    }
    with running_server(*(part for option in options.items() for part in option)) as server:
        traced = Traced(server, folder, made.stdout.strip())
        # The last process that starts; the server does not wait for it.
        wait_until(traced.telemetry_answers, 120, "the telemetry process answers")
        yield traced


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def test_a_sampled_generation_is_found_with_a_span_per_token(traced: Traced) -> None:
    spec = Spec(text="Once upon a time", stop=generation_pb2.StopConditions(max_tokens=12, ignore_eos=True))
    events = [
        answer.event
        for answer in traced.stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=traced.metadata("a" * 16))
    ]
    request_id, ledger = events[0].accepted.request_id, events[-1].done.ledger
    # A call's end is reported after its generation's, and steps may wait for their backend.
    wait_until(lambda: traced.spans_below("a" * 16, request_id), 60, "the call is in the trace")
    spans = traced.spans_with(request_id, "engine.step")
    # Other tests' calls are in the same trace.
    below = [span for span in spans if span.trace_id.hex() == TRACE_ID]
    (server_span,) = [span for span in below if span.parent_span_id.hex() == "a" * 16]
    assert server_span.name == "headrace.v1.InferenceService/Generate"
    (inference,) = [span for span in below if span.parent_span_id == server_span.span_id]
    inside = {server_span.span_id, inference.span_id}
    while more := {span.span_id for span in below if span.parent_span_id in inside} - inside:
        inside |= more
    own = [span for span in below if span.span_id in inside]
    reported = attributes(inference)
    assert reported["headrace.request.id"] == request_id and reported["gen_ai.usage.output_tokens"] == 12
    assert reported["gen_ai.request.max_tokens"] == 12 and reported["headrace.wire"] == "generate"
    assert reported["headrace.ledger.decode_ns"] == ledger.decode_ns
    assert sum(span.name == "token" for span in own) == 12
    assert {"queue", "prefill", "decode", "engine.step"} <= {span.name for span in spans}
    for span in own:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    # All spans of the request stand below its call.
    assert all(span in own for span in below if attributes(span).get("headrace.request.id") == request_id)
    added = wait_until(lambda: [line for line in traced.server.lines if "request added" in line and request_id in line])
    assert len(added) == 1 and TRACE_ID in added[0], "the backend's log leads from the request to its trace"


def test_a_generation_whose_reader_left_is_traced_to_its_end(traced: Traced) -> None:
    spec = Spec(text="Once upon a time", stop=generation_pb2.StopConditions(max_tokens=400, ignore_eos=True))
    call = traced.stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=traced.metadata("c" * 16))
    request_id = next(call).event.accepted.request_id
    for _ in range(8):
        next(call)
    call.cancel()
    found = wait_until(lambda: traced.spans_below("c" * 16, request_id), 60, "the trace is there, its call too")
    spans = [span for span in found if span.trace_id.hex() == TRACE_ID]
    (server_span,) = [span for span in spans if span.parent_span_id.hex() == "c" * 16]
    (inference,) = [span for span in spans if span.parent_span_id == server_span.span_id]
    reported = attributes(inference)
    num_tokens = sum(span.name == "token" and span.parent_span_id == inference.span_id for span in spans)
    assert 6 <= num_tokens == reported["gen_ai.usage.output_tokens"] < 400
    assert [value.string_value for value in reported["gen_ai.response.finish_reasons"].values] == ["cancelled"]
    assert server_span.start_time_unix_nano <= inference.start_time_unix_nano
    assert inference.end_time_unix_nano <= server_span.end_time_unix_nano


# What a backend reports of restarts is in tests/backend/test_telemetry.
@pytest.mark.slow
def test_a_worker_that_dies_stands_in_the_trace_once(traced: Traced) -> None:
    spec = Spec(text="Once upon a time", stop=generation_pb2.StopConditions(max_tokens=200, ignore_eos=True))
    call = traced.stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=traced.metadata("d" * 16))
    request_id = next(call).event.accepted.request_id
    for _ in range(4):
        next(call)
    traced.server.worker().kill()
    *_, last = call
    assert last.event.done.usage.output_tokens == 200 and last.event.done.ledger.engine_restart_ns > 0
    wait_until(lambda: traced.spans(request_id=request_id), 60, "the trace is there")
    spans = traced.spans(request_id=request_id)
    (inference,) = [
        span
        for span in spans
        if attributes(span).get("headrace.request.id") == request_id
        and span.name != "engine.step"
        and "gen_ai.operation.name" in attributes(span)
    ]
    own = [span for span in spans if span.parent_span_id == inference.span_id]
    assert sum(span.name == "token" for span in own) == 200
    restarts = [span for span in own if span.name == "engine_restart"]
    length_ns = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in restarts)
    assert restarts and length_ns == attributes(inference)["headrace.ledger.engine_restart_ns"]


def _everything(traced: Traced) -> None:
    """Calls of all kinds, with the marker wherever a caller may write what it wants."""
    stop = generation_pb2.StopConditions(max_tokens=24, strings=[MARKER + "-stop"], bad_words=[MARKER + "-word"])
    spec = Spec(text=f"{MARKER} prompt", stop=stop, cache_salt=MARKER + "-salt")
    stub, metadata = traced.stub, traced.metadata()
    list(stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=metadata))
    stub.Complete(inference_pb2.CompleteRequest(spec=spec), metadata=metadata)
    chat = Spec(stop=stop, cache_salt=spec.cache_salt)
    said = [
        inference_pb2.ChatMessage(role=role, parts=[inference_pb2.Part(text=f"{MARKER} says")])
        for role in (inference_pb2.ROLE_SYSTEM, inference_pb2.ROLE_USER)
    ]
    list(stub.Chat(inference_pb2.ChatRequest(messages=said, spec=chat), metadata=metadata))
    submit = inference_pb2.SubmitRequest(spec=spec, idempotency_key=MARKER + "-key")
    submitted = stub.Submit(submit, metadata=metadata)
    list(stub.Subscribe(inference_pb2.SubscribeRequest(request_id=submitted.request_id), metadata=metadata))
    asked = inference_pb2.SessionRequest(stream_id=1, submit=inference_pb2.SessionSubmit(messages=said, spec=chat))
    list(stub.Session(iter([asked]), metadata=metadata))
    infer = traced.channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=grpc_service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=grpc_service_pb2.ModelInferResponse.FromString,
    )
    message = request(id=MARKER + "-id")
    add(message, "text_input", "BYTES", [1], raw_strings(f"{MARKER} tensor".encode()))
    add(message, "sampling_parameters", "BYTES", [1], raw_strings(json.dumps({"stop": [MARKER]}).encode()))
    infer(message, metadata=metadata)
    stub.Tokenize(inference_pb2.TokenizeRequest(text=MARKER), metadata=metadata)
    # And some that fail.
    for bad, headers in (
        (Spec(text=MARKER, cache_salt=MARKER * 50), metadata),
        (Spec(text=MARKER, trace_detail=99), metadata),  # type: ignore[arg-type]
        (Spec(text=MARKER, model=MARKER), metadata),
        (spec, (("authorization", f"Bearer {MARKER}"),)),
        (spec, (*metadata[:1], ("traceparent", MARKER), ("tracestate", MARKER))),
    ):
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(inference_pb2.GenerateRequest(spec=bad), metadata=headers, timeout=60))
            raise grpc.RpcError("the last of them is served, and as good as without a context")
    left = stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=metadata)
    next(left)
    left.cancel()


def test_what_callers_said_and_got_stands_nowhere(traced: Traced) -> None:
    spec = Spec(text="Once upon a time", stop=generation_pb2.StopConditions(max_tokens=24, ignore_eos=True))
    spec.sampling.temperature = 0
    answer = traced.stub.Complete(inference_pb2.CompleteRequest(spec=spec), metadata=traced.metadata())
    output = answer.outputs[0].content[0].text.strip()
    assert len(output) > 8
    _everything(traced)
    last = traced.stub.Complete(inference_pb2.CompleteRequest(spec=spec), metadata=traced.metadata())
    wait_until(lambda: traced.spans(request_id=last.request_id), 60, "the last trace is there")
    traces = (traced.folder / "traces.jsonl").read_text()
    wait_until(lambda: last.request_id in (traced.folder / "traces.jsonl").read_text(), 60, "the file has it")
    traces = (traced.folder / "traces.jsonl").read_text()
    spans = "\n".join(str(span) for span in traced.spans(trace_id=TRACE_ID))
    log, metrics = "".join(traced.server.lines), traced.metrics()
    assert spans and "gen_ai" in traces and "gen_ai_server" in metrics
    for where, text in {"log": log, "traces": traces, "spans": spans, "metrics": metrics}.items():
        for secret in (MARKER, output, traced.key):
            for form in (secret, json.dumps(secret)[1:-1]):
                at = text.find(form)
                assert at < 0, f"{where}: {text[max(0, at - 300) : at + 100]}"
