"""A whole server's figures over HTTP.

They equal what its clients saw, lead to its traces, and go on when its processes die.
"""

from __future__ import annotations

import concurrent.futures
import re
import time
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.support import rpc
from tests.support.processes import wait_until
from tests.support.running_server import RunningServer, running_server

from headrace.v1 import admin_pb2, admin_pb2_grpc, inference_pb2

_MARKER = "xylophone-4711"


class _Figures:
    """What the scrape endpoint of a server says now."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server

    def addresses(self) -> list[str]:
        """The address at which metrics are served, by the log; the last is in force."""
        return re.findall(r"metrics are served.*?address\W+(127\.0\.0\.1:\d+)", "".join(self._server.lines))

    def samples(self) -> list[Sample]:
        if not (addresses := self.addresses()):
            return []
        url = f"http://{addresses[-1]}/metrics"
        request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                text = reply.read().decode()
        except OSError:
            return []
        assert _MARKER not in text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def of_no_backend(self) -> bool:
        """Whether there are figures, and none that only a backend can tell."""
        samples = self.samples()
        ups = [
            s.value
            for s in samples
            if s.name == "headrace_process_up" and s.labels["headrace_process_kind"] == "backend"
        ]
        return bool(samples) and not sum(ups) and all(s.name != "headrace_requests_running" for s in samples)

    def sum(self, name: str, **labels: str) -> float:
        return _sum(self.samples(), name, **labels)

    def grown_since_now(self) -> Callable[..., float]:
        """A `sum` of what is reported from here on, without the calls of earlier tests."""
        counted = ("headrace_requests_total", "headrace_steps_total", "rpc_server_call_duration_seconds_count")

        def have_settled() -> bool:
            before = self.samples()
            time.sleep(1.0)
            return all(_sum(before, name) == self.sum(name) for name in counted)

        wait_until(have_settled, 60, "no more of earlier calls")
        earlier = self.samples()
        return lambda name, **labels: self.sum(name, **labels) - _sum(earlier, name, **labels)


def _sum(samples: list[Sample], name: str, **labels: str) -> float:
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningServer, _Figures]]:
    options = ("--services", "2", "--metrics-listen", "127.0.0.1:0", "--trace-sample-ratio", "1")
    with running_server("--device", "cpu", "--num-blocks", "1024", *options) as server:
        figures = _Figures(server)
        # Telemetry is the last process that starts, the server does not wait for it, and what
        # services are to sample they hear from it.
        services = {"headrace_process_kind": "service"}
        wait_until(lambda: figures.sum("headrace_process_up", **services) == 2, 120, "both services are connected")
        yield server, figures


def test_figures_equal_what_clients_saw_and_lead_to_their_traces(served: tuple[RunningServer, _Figures]) -> None:
    server, figures = served
    grown = figures.grown_since_now()

    def one(number: int) -> rpc.Transcript:
        return rpc.generate(server.address, rpc.greedy(f"{_MARKER} {number}", 10 + number))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(24)))
    with rpc.connected(server.address) as stub, pytest.raises(grpc.RpcError):
        rpc.read(stub.Generate(inference_pb2.GenerateRequest(), timeout=60))
    with rpc.connected(server.address) as stub:
        stub.Submit(inference_pb2.SubmitRequest(spec=rpc.greedy(_MARKER, 20)), timeout=60)
    usages = [answer.done.usage for answer in answers if answer.done]
    assert len(usages) == 24
    wait_until(lambda: grown("headrace_requests_total") == 25, 60, "all generations were reported")
    assert grown("headrace_requests_total", headrace_wire="submit", headrace_finish_reason="length") == 1
    output = sum(usage.output_tokens for usage in usages) + 20
    assert output == sum(range(10, 34)) + 20
    assert grown("headrace_tokens_total", headrace_token_kind="output") == output
    prompts = sum(usage.prompt_tokens for usage in usages)
    assert grown("headrace_tokens_total", headrace_token_kind="input") > prompts
    # Nobody read the first token of the submitted one.
    assert grown("gen_ai_server_time_to_first_token_seconds_count") == 24
    assert grown("headrace_engine_time_to_first_token_seconds_count") == 25
    generate = {"rpc_method": "headrace.v1.InferenceService/Generate"}
    wait_until(
        lambda: grown("rpc_server_call_duration_seconds_count", rpc_response_status_code="OK", **generate) == 24,
        60,
        "all calls were reported",
    )
    refused = {"rpc_response_status_code": "INVALID_ARGUMENT", **generate}
    assert grown("rpc_server_call_duration_seconds_count", **refused) == 1
    # Every step once, though the backend and two services know of it.
    wait_until(
        lambda: grown("headrace_steps_total") == grown("headrace_step_sequences_count") > 0,
        60,
        "all steps were reported",
    )
    assert figures.sum("headrace_process_up", headrace_process_kind="service") == 2
    _assert_exemplars_are_found(server, figures)


def _assert_exemplars_are_found(server: RunningServer, figures: _Figures) -> None:
    exemplars = [sample.exemplar for sample in figures.samples() if sample.exemplar]
    assert exemplars
    with grpc.insecure_channel(server.address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        for exemplar in exemplars:
            parts = admin.GetTrace(admin_pb2.GetTraceRequest(trace_id=exemplar.labels["trace_id"]), timeout=60)
            trace = trace_pb2.TracesData.FromString(b"".join(part.traces_data for part in parts))
            spans = [span for part in trace.resource_spans for scope in part.scope_spans for span in scope.spans]
            assert exemplar.labels["span_id"] in {span.span_id.hex() for span in spans}


def test_totals_go_on_when_a_backend_dies(served: tuple[RunningServer, _Figures]) -> None:
    server, figures = served
    rpc.generate(server.address, rpc.greedy("one", 8))
    wait_until(lambda: figures.sum("headrace_steps_total") > 0, 60, "steps")
    before = figures.sum("headrace_steps_total")
    server.backend().kill()
    # From one reading, because the next backend is soon there.
    wait_until(lambda: figures.of_no_backend(), 60, "the end is seen")
    wait_until(lambda: _answers(server), 120, "the server answers again")
    wait_until(lambda: figures.sum("headrace_steps_total") > before, 60, "the new backend's steps come on top")


def test_a_telemetry_process_that_dies_comes_back_and_harms_nobody(served: tuple[RunningServer, _Figures]) -> None:
    server, figures = served
    (telemetry,) = server.descendants("headrace_telemetry")
    services = {process.pid for process in server.services()}
    telemetry.kill()
    assert _answers(server)
    wait_until(lambda: len(figures.addresses()) == 2, 60, "it serves again")
    wait_until(lambda: figures.sum("headrace_process_up") == 3, 60, "all are connected again")
    assert _answers(server)
    wait_until(lambda: figures.sum("headrace_requests_total", headrace_finish_reason="length") >= 1, 60, "facts come")
    assert {process.pid for process in server.services()} == services


def _answers(server: RunningServer) -> bool:
    try:
        answer = rpc.generate(server.address, rpc.greedy("again", 8))
    except grpc.RpcError:
        return False
    return answer.done is not None
