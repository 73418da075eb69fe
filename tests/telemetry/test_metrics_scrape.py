"""What a scraper reads over HTTP equals what was reported, in both formats, and leads to traces."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pathlib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from prometheus_client.samples import Sample
from tests.support import reported_facts as reported
from tests.support.compose_files import DEPLOY

from headrace_facts import facts
from headrace_telemetry.config import TelemetryConfig
from headrace_telemetry.counts import ExportCounts
from headrace_telemetry.metrics import CannotListen, Metrics, catalogue, exposition

_TRACE_ID = f"{7:032x}"


def _config(**settings: Any) -> TelemetryConfig:
    return TelemetryConfig(telemetry_socket=pathlib.Path("unused"), **{"metrics_listen": "127.0.0.1:0", **settings})


@contextlib.asynccontextmanager
async def _serving(**settings: Any) -> AsyncIterator[tuple[Metrics, int]]:
    metrics = Metrics(_config(**settings), ExportCounts())
    port = await metrics.start()
    assert port is not None
    try:
        yield metrics, port
    finally:
        await metrics.close(0)


async def _get(port: int, path: str = "/metrics", accept: str = "", method: str = "GET") -> tuple[str, str]:
    """The content type and text of an answer."""

    def fetch() -> tuple[str, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept}, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.headers["Content-Type"], reply.read().decode()

    return await asyncio.to_thread(fetch)


async def _samples(port: int) -> list[Sample]:
    _, text = await _get(port, accept="application/openmetrics-text; version=1.0.0")
    return [sample for family in parse_openmetrics(text) for sample in family.samples]


def _value(samples: Iterable[Sample], name: str, **labels: str) -> float:
    found = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
    assert len(found) == 1, f"{name} {labels}: {found}"
    return found[0]


def _buckets(samples: Iterable[Sample], name: str) -> dict[float, float]:
    return {float(sample.labels["le"]): sample.value for sample in samples if sample.name == f"{name}_bucket"}


async def test_counts_equal_what_was_reported() -> None:
    async with _serving() as (metrics, port):
        for number in range(1, 6):
            metrics.sink.generation(reported.SERVICE, reported.generation(number), None)
            metrics.sink.take(reported.SERVICE, reported.call(number))
        metrics.sink.generation(reported.SERVICE, reported.generation(6, finish_reasons=["stop", "length"]), None)
        metrics.sink.generation(
            reported.SERVICE,
            reported.generation(7, finish_reasons=["error"], error_type="engine_error", ttft_ns=0, first_chunk_ns=0),
            None,
        )
        # An answer in one message has no first chunk.
        metrics.sink.generation(
            reported.SERVICE, reported.generation(8, streamed=False, first_chunk_ns=0, model="whole"), None
        )
        samples = await _samples(port)
    assert _value(samples, "gen_ai_server_request_duration_seconds_count", error_type="engine_error") == 1
    fine = [sample for sample in samples if "error_type" not in sample.labels]
    whole = [sample for sample in fine if sample.labels.get("gen_ai_request_model") == "whole"]
    fine = [sample for sample in fine if sample not in whole]
    assert _value(fine, "gen_ai_server_request_duration_seconds_count") == 6
    assert _value(fine, "gen_ai_server_request_duration_seconds_sum") == pytest.approx(12.0)
    # Until it had left, and until the engine had it.
    assert _value(samples, "gen_ai_server_time_to_first_token_seconds_count") == 6
    assert _value(samples, "gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(6 * 0.07)
    assert _value(fine, "headrace_engine_time_to_first_token_seconds_count") == 6
    assert _value(fine, "headrace_engine_time_to_first_token_seconds_sum") == pytest.approx(6 * 0.05)
    assert _value(whole, "headrace_engine_time_to_first_token_seconds_count") == 1
    # (2 - 0.07) / 40 for one output; two outputs had 20.5 tokens each.
    assert _value(fine, "gen_ai_server_time_per_output_token_seconds_sum") == pytest.approx(5 * 1.93 / 40 + 1.93 / 19.5)
    assert _value(whole, "gen_ai_server_time_per_output_token_seconds_sum") == pytest.approx(1.95 / 40)
    samples = [sample for sample in samples if sample not in whole]
    assert _value(samples, "headrace_queue_duration_seconds_sum") == pytest.approx(7 * 0.004)
    assert _value(samples, "headrace_requests_total", headrace_finish_reason="stop") == 5
    assert _value(samples, "headrace_requests_total", headrace_finish_reason="length") == 1
    assert _value(samples, "headrace_requests_total", headrace_finish_reason="error") == 1
    for kind, tokens in (("input", 700), ("cached", 140), ("output", 287)):
        assert _value(samples, "headrace_tokens_total", headrace_token_kind=kind) == tokens
    assert _value(samples, "rpc_server_call_duration_seconds_sum", rpc_response_status_code="OK") == pytest.approx(12.5)


async def test_exemplars_lead_to_exported_traces_only() -> None:
    async with _serving() as (metrics, port):
        metrics.sink.generation(reported.SERVICE, reported.generation(6), None)
        metrics.sink.generation(reported.SERVICE, reported.generation(7), "ttft")
        # Kept by its end: the call's own context says nothing of that.
        metrics.sink.take(reported.SERVICE, reported.call(7, span=reported.span(7, sampled=False)))
        metrics.sink.take(reported.SERVICE, reported.call(6, span=reported.span(6, sampled=False)))
        first = await _samples(port)
        await asyncio.sleep(0.15)
        again = await _samples(port)
    for samples in (first, again):
        exemplars = {sample.name: sample.exemplar for sample in samples if sample.exemplar}
        assert set(exemplars) == {
            "gen_ai_server_request_duration_seconds_bucket",
            "gen_ai_server_time_to_first_token_seconds_bucket",
            "headrace_engine_time_to_first_token_seconds_bucket",
            "gen_ai_server_time_per_output_token_seconds_bucket",
            "headrace_queue_duration_seconds_bucket",
            "rpc_server_call_duration_seconds_bucket",
        }
        assert all(
            exemplar.labels == {"trace_id": _TRACE_ID, "span_id": f"{7:016x}"} for exemplar in exemplars.values()
        )
        assert exemplars["gen_ai_server_request_duration_seconds_bucket"].value == pytest.approx(2.0)


async def test_calls_that_stream_have_buckets_as_long_as_their_answers() -> None:
    async with _serving() as (metrics, port):
        metrics.sink.take(reported.SERVICE, reported.call(7))
        metrics.sink.generation(reported.SERVICE, reported.generation(7), None)
        samples = await _samples(port)
    longest = {
        name: max(
            bound for sample in samples if sample.name == name and math.isfinite(bound := float(sample.labels["le"]))
        )
        for name in ("rpc_server_call_duration_seconds_bucket", "gen_ai_server_request_duration_seconds_bucket")
    }
    calls, generations = longest.values()
    assert calls >= generations


async def test_exemplars_stand_in_the_bucket_of_their_value() -> None:
    async with _serving(metrics_duration_buckets=(1.0, 2.0, 4.0)) as (metrics, port):
        metrics.sink.generation(reported.SERVICE, reported.generation(7), "head")
        samples = await _samples(port)
    marked = [
        sample.labels["le"]
        for sample in samples
        if sample.exemplar and sample.name == "gen_ai_server_request_duration_seconds_bucket"
    ]
    assert marked == ["2.0"]


async def test_both_formats_say_the_same_and_only_openmetrics_has_exemplars() -> None:
    async with _serving(price_per_hour=2.0) as (metrics, port):
        metrics.sink.generation(reported.SERVICE, reported.generation(7), "head")
        metrics.sink.take(reported.BACKEND, reported.engine_load())
        plain_type, plain = await _get(port, accept="text/plain;version=0.0.4;q=0.3,*/*;q=0.2")
        open_type, openmetrics = await _get(port, accept="application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1")
    assert (plain_type, open_type) == (exposition.PLAIN, exposition.OPENMETRICS)
    assert "trace_id=" in openmetrics and "trace_id=" not in plain

    def names(families: Iterable[Any]) -> set[str]:
        return {
            sample.name
            for family in families
            for sample in family.samples
            if not sample.name.startswith("headrace_cost")
        }

    assert names(parse_plain(plain)) == names(parse_openmetrics(openmetrics))


async def test_drafts_are_counted_by_who_drafts_and_by_vllms_names() -> None:
    async with _serving(metrics_vllm_names=True) as (metrics, port):
        for engine, drafter in (("a", "ngram"), ("b", "draft")):
            metrics.sink.take(reported.BACKEND, reported.engine_facts(engine=engine, drafter=drafter))
            made = reported.records(1, 10, draft_tokens=4, accepted_tokens=3, lost_drafts=2, forced_tokens=5)
            metrics.sink.take(reported.BACKEND, reported.steps(made, engine))
        _, plain = await _get(port)
    samples = [sample for family in parse_plain(plain) for sample in family.samples]
    for name, expected in (("accepted", 30), ("lost", 20)):
        counted = {
            sample.labels["headrace_drafter"]: sample.value
            for sample in samples
            if sample.name == f"headrace_drafts_{name}_total"
        }
        assert counted == {"ngram": expected, "draft": expected}
    assert [sample.value for sample in samples if sample.name == "headrace_step_forced_tokens_total"] == [100]
    vllm = {sample.name: sample.value for sample in samples if sample.name.startswith("vllm:")}
    assert vllm == {
        "vllm:spec_decode_num_draft_tokens_total": 80,
        "vllm:spec_decode_num_accepted_tokens_total": 60,
    }


async def test_endpoint_pickers_find_the_names_they_know() -> None:
    for settings in ({}, {"metrics_vllm_names": True}):
        async with _serving(**settings) as (metrics, port):
            for engine, waiting in (("a", 2), ("b", 5)):
                load = reported.engine_load(engine=engine, waiting_requests=waiting)
                metrics.sink.take(reported.BACKEND, load)
            _, plain = await _get(port)
            _, openmetrics = await _get(port, accept="application/openmetrics-text")
        samples = [sample for family in parse_plain(plain) for sample in family.samples]
        vllm = {sample.name: sample.value for sample in samples if sample.name.startswith("vllm:")}
        in_all = {"num_requests_waiting": 7, "num_requests_running": 6, "kv_cache_usage_perc": 0.4}
        assert vllm == ({f"vllm:{name}": value for name, value in in_all.items()} if settings else {})
        assert ("# TYPE vllm:num_requests_waiting gauge" in plain) == bool(settings)
        assert "vllm" not in openmetrics
        assert all(sample.labels == {"model_name": reported.MODEL} for sample in samples if sample.name in vllm)
    # What the picker of deploy/envoy is configured to read is there as it is.
    extractor, *_ = yaml.safe_load((DEPLOY / "envoy" / "endpoint-picker-config.yaml").read_text())["plugins"]
    (engine_config,) = extractor["parameters"]["engineConfigs"]
    named = [value for field, value in engine_config.items() if field.endswith("Spec")]
    assert len(named) == 3 and all(_value(samples, name) >= 0 for name in named)


async def test_every_metric_says_what_it_is() -> None:
    described = {exposition.base_name(metric.name, metric.unit, metric.kind): metric for metric in catalogue.ALL}
    async with _serving(price_per_hour=2.0) as (metrics, port):
        _tell_everything(metrics)
        _, text = await _get(port, accept="application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(text) if family.name != "target"}
    assert set(families) == set(described)
    for name, family in families.items():
        assert family.documentation == described[name].description
        assert family.type == described[name].kind
        assert family.unit in ("", "seconds", "bytes", "ratio")


async def test_bounds_are_those_of_the_settings() -> None:
    bounds = (0.001, 0.002, 0.004, 5.0)
    settings = ("duration", "ttft", "tpot", "queue", "step")
    async with _serving(**{f"metrics_{name}_buckets": bounds for name in settings}) as (metrics, port):
        metrics.sink.generation(reported.SERVICE, reported.generation(), None)
        metrics.sink.take(reported.BACKEND, reported.steps(reported.records(1, 3)))
        samples = await _samples(port)
    for name in (
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "headrace_queue_duration_seconds",
        "headrace_step_duration_seconds",
        "headrace_step_interval_seconds",
    ):
        assert tuple(_buckets(samples, name)) == (*bounds, float("inf"))
    # Steps of 4 ms belong to the bucket that ends there.
    assert list(_buckets(samples, "headrace_step_duration_seconds").values()) == [0, 0, 3, 3, 3]


async def test_default_bounds_tell_tokens_of_a_millisecond_apart() -> None:
    async with _serving() as (metrics, port):
        metrics.sink.generation(reported.SERVICE, reported.generation(), None)
        samples = await _samples(port)
    assert list(_buckets(samples, "gen_ai_server_time_per_output_token_seconds"))[:5] == [
        0.001,
        0.002,
        0.003,
        0.005,
        0.0075,
    ]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"metrics_ttft_buckets": ()}, "1 to 100 bounds"),
        ({"metrics_tpot_buckets": (0.1, 0.1)}, "above the one before"),
        ({"metrics_step_buckets": (0.2, 0.1)}, "above the one before"),
        ({"metrics_duration_buckets": (float("nan"),)}, "above 0"),
        ({"metrics_queue_buckets": (-1.0, 1.0)}, "above 0"),
        ({"metrics_ttft_buckets": tuple(range(1, 1000))}, "1 to 100 bounds"),
        ({"metrics_listen": "9464"}, "HOST:PORT"),
        ({"metrics_listen": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"price_per_hour": -1.0}, "greater than or equal"),
        ({"price_per_hour": float("inf")}, "finite"),
        ({"price_currency": "dollars"}, "pattern"),
        ({"export_interval_s": 0.0}, "greater than or equal"),
    ],
)
def test_absurd_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _config(**settings)


async def test_a_taken_port_is_refused_with_the_reason() -> None:
    async with _serving() as (_, port):
        metrics = Metrics(_config(metrics_listen=f"127.0.0.1:{port}"), ExportCounts())
        with pytest.raises(CannotListen, match=rf"metrics_listen: 127\.0\.0\.1:{port}: .*in use"):
            await metrics.start()
        await metrics.close(0)


async def test_an_address_of_nobody_is_refused_with_the_reason() -> None:
    metrics = Metrics(_config(metrics_listen="no.such.host.invalid:9464"), ExportCounts())
    with pytest.raises(CannotListen, match=r"metrics_listen: no\.such\.host\.invalid:9464: "):
        await metrics.start()
    await metrics.close(0)


async def test_other_paths_and_methods_are_refused() -> None:
    async with _serving() as (_, port):
        assert await _get(port, "/healthz") == ("text/plain; charset=utf-8", "ok\n")
        assert (await _get(port, method="HEAD"))[1] == ""
        for path, method, status in (("/", "GET", 404), ("/metrics/../etc", "GET", 404), ("/metrics", "POST", 405)):
            with pytest.raises(urllib.error.HTTPError) as error:
                await _get(port, path, method=method)
            assert error.value.code == status


async def _raw(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_what_is_no_http_is_answered_or_dropped_and_harms_nobody() -> None:
    async with _serving() as (_, port):
        assert (await _raw(port, b"x" * 100_000)).split(b"\r\n")[0] in (
            b"",
            b"HTTP/1.1 431 Request Header Fields Too Large",
        )
        assert (await _raw(port, b"\x00\xff\x00\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await _raw(port, b"GET /metrics\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        strange = b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=\xff;q=x;;,,;=\r\n\r\n"
        assert (await _raw(port, strange)).startswith(b"HTTP/1.1 200 ")
        assert (await _get(port, "/healthz"))[1] == "ok\n"


async def test_idle_connections_neither_pile_up_nor_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_telemetry.metrics.scrape._HEAD_TIMEOUT_S", 1.0)
    async with _serving() as (_, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(32)]
        await asyncio.sleep(0.1)
        # One more than may be open is ended at once, and those that say nothing end by themselves.
        assert await _raw(port, b"") == b""
        ends = await asyncio.wait_for(
            asyncio.gather(*(reader.read() for reader, _ in idle), return_exceptions=True), 60
        )
        assert all(end == b"" or isinstance(end, ConnectionResetError) for end in ends)
        assert (await _get(port, "/healthz"))[1] == "ok\n"
        for _, writer in idle:
            writer.close()


async def test_a_scraper_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_telemetry.metrics.scrape._ANSWER_TIMEOUT_S", 0.5)
    # More than sockets hold, so that the answer waits for its reader.
    monkeypatch.setattr(Metrics, "render", lambda self, content_type: b"#" * (32 << 20))
    async with _serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await asyncio.sleep(1.5)
        received = 0
        with contextlib.suppress(ConnectionResetError, asyncio.IncompleteReadError):
            while data := await asyncio.wait_for(reader.read(1 << 20), 60):
                received += len(data)
        assert received < 32 << 20
        assert (await _get(port, "/healthz"))[1] == "ok\n"
        writer.close()


async def test_many_scrapers_do_not_make_figures_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    render = Metrics.render

    def counted(self: Metrics, content_type: str) -> bytes:
        nonlocal made
        made += 1
        return render(self, content_type)

    monkeypatch.setattr(Metrics, "render", counted)
    async with _serving() as (_, port):
        began = asyncio.get_running_loop().time()
        for _ in range(40):
            await _get(port)
        elapsed_s = asyncio.get_running_loop().time() - began
    assert made <= 2 + elapsed_s / 0.1


async def test_figures_hold_no_text_of_requests_and_few_values() -> None:
    async with _serving(price_per_hour=1.0) as (metrics, port):
        _tell_everything(metrics)
        for number in range(1000):
            metrics.sink.take(
                reported.SERVICE, reported.call(number, method=f"attacker.Service/Method{number}", span=None)
            )
            metrics.sink.generation(reported.SERVICE, reported.generation(number, model=f"model-{number}"), None)
        _, text = await _get(port, accept="application/openmetrics-text")
    assert "request-" not in text
    assert text.count("rpc_server_call_duration_seconds_count") < 300
    assert text.count("gen_ai_server_request_duration_seconds_count") < 300
    assert 'rpc_method="_OTHER"' in text and 'gen_ai_request_model="_OTHER"' in text


def _tell_everything(metrics: Metrics) -> None:
    for source in (reported.SERVICE, reported.BACKEND):
        metrics.sink.take(source, source)
    for source, fact in reported.everything():
        if isinstance(fact, facts.Generation):
            metrics.sink.generation(source, fact, "head")
        else:
            metrics.sink.take(source, fact)
