"""What a service must not send is refused by field and harms no stream or other request."""

from __future__ import annotations

import asyncio
import math
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import msgspec
import pytest
import pytest_asyncio
from tests.backend.backend_harness import (
    BackendProcess,
    EngineClient,
    add_message,
    connected,
    details,
    idle,
    settled,
    start_backend,
    until,
)
from tests.backend.fake_worker import expected_tokens
from tests.support import engine_requests
from tests.support.ports import free_address

from headrace_protos.engine.v1 import engine_pb2
from headrace_request.request import LAYOUT
from headrace_request.sampling import Sampling

PROMPT = [10, 20, 30]
U32 = 4
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def backend(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendProcess]:
    started = start_backend(tmp_path_factory.mktemp("backend"), model, "--step-ms", "2")
    started.wait_listening()
    yield started
    started.process.terminate()
    assert started.process.wait(240) == 0, started.log
    assert "Traceback" not in started.log, started.log


@pytest_asyncio.fixture
async def client(backend: BackendProcess) -> AsyncIterator[EngineClient]:
    async with connected(backend.address) as connection:
        await connection.wait_serving()
        yield connection
        # Whatever was sent: the next request works, and no block is held.
        request = await settled(await connection.add(PROMPT, 5))
        assert request.tokens == expected_tokens(PROMPT, 5)
        await idle(connection)


def ids(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(U32, "little") for token in tokens)


Change = Callable[[engine_pb2.AddRequest], None]


def setting(path: str, value: Any) -> Change:
    """Sets a field of the message by its path."""

    def change(add: engine_pb2.AddRequest) -> None:
        *parents, name = path.split(".")
        target: Any = add
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, list):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)

    return change


def asking(path: str, value: Any) -> Change:
    """Has the message ask for a value of any type at a path of `Request`."""
    return lambda add: engine_requests.change(add, path, value)


def packed(change: Callable[[list[Any]], None]) -> Change:
    """Changes the request as the wire has it.

    The wire has the fields of `Request` in their order; structs in it are lists as well.
    """

    def changed(add: engine_pb2.AddRequest) -> None:
        fields = msgspec.msgpack.decode(add.request)
        change(fields)
        add.request = msgspec.msgpack.encode(fields)

    return changed


def unknown(path: str) -> Change:
    """Adds field 999 to a message inside."""

    def change(add: engine_pb2.AddRequest) -> None:
        target: Any = add
        for part in filter(None, path.split(".")):
            target = getattr(target, part)
        target.MergeFromString(b"\xb8\x3e\x01")

    return change


BAD_ADDS: list[tuple[str, str, Change]] = [
    ("no id", "request_id", setting("request_id", "")),
    ("long id", "request_id", setting("request_id", "a" * 65)),
    ("id with a slash", "request_id", setting("request_id", "../etc")),
    ("id with a line end", "request_id", setting("request_id", "a\n")),
    ("long tenant", "tenant", setting("tenant", "t" * 257)),
    ("ragged prompt", "token_ids", asking("prompt_token_ids", b"123")),
    ("empty prompt", "token_ids", asking("prompt_token_ids", b"")),
    ("prompt id at the vocabulary's end", "token_ids", asking("prompt_token_ids", ids(300))),
    ("prompt id 2**31", "token_ids", asking("prompt_token_ids", ids(2**31))),
    ("prompt id 2**32-1", "token_ids", asking("prompt_token_ids", ids(2**32 - 1))),
    ("prompt beyond the context", "token_ids", asking("prompt_token_ids", ids(*[9] * 2049))),
    ("prompt and output beyond the context", "max_tokens", asking("stop.max_tokens", 2047)),
    ("no output", "max_tokens", asking("stop.max_tokens", 0)),
    ("endless output", "max_tokens", asking("stop.max_tokens", 2**31)),
    ("min above max", "min_tokens", asking("stop.min_tokens", 6)),
    ("no request", "request", setting("request", b"")),
    ("request cut off", "request", lambda add: setting("request", add.request[:-1])(add)),
    ("request with more behind it", "request", lambda add: setting("request", add.request + b"\x00")(add)),
    ("request that is no msgpack", "request", setting("request", b"\xc1" * 100)),
    ("request that is a number", "request", setting("request", b"\x05")),
    ("request 10,000 deep", "request", setting("request", b"\x91" * 10_000)),
    ("request without stop", "request", packed(lambda fields: fields.__delitem__(slice(1, None)))),
    ("request with a field more", "request", packed(lambda fields: fields.append(1))),
    ("sampling with a field more", "request", packed(lambda fields: fields[2].append(1))),
    ("stop with a field more", "request", packed(lambda fields: fields[1].append(1))),
    ("temperature that is a text", "request", asking("sampling.temperature", "hot")),
    ("seed that is no integer", "request", asking("sampling.seed", 1.5)),
    ("negative seed", "sampling.seed", asking("sampling.seed", -1)),
    ("n that is a truth value", "request", asking("n", True)),
    ("stop strings that are texts", "request", asking("stop.strings", ("a",))),
    ("negative temperature", "temperature", asking("sampling.temperature", -1.0)),
    ("temperature NaN", "sampling.temperature", asking("sampling.temperature", math.nan)),
    ("temperature infinite", "sampling.temperature", asking("sampling.temperature", math.inf)),
    ("top_p 0", "top_p", asking("sampling.top_p", 0.0)),
    ("top_p above 1", "top_p", asking("sampling.top_p", 1.1)),
    ("top_p NaN", "sampling.top_p", asking("sampling.top_p", math.nan)),
    ("top_k -2", "top_k", asking("sampling.top_k", -2)),
    ("top_k above the vocabulary", "top_k", asking("sampling.top_k", 301)),
    ("min_p 2", "min_p", asking("sampling.min_p", 2.0)),
    ("repetition 0", "repetition_penalty", asking("sampling.repetition_penalty", 0.0)),
    ("repetition that makes logits infinite", "repetition_penalty", asking("sampling.repetition_penalty", 1e-40)),
    ("presence NaN", "sampling.presence_penalty", asking("sampling.presence_penalty", math.nan)),
    ("frequency beyond its range", "frequency_penalty", asking("sampling.frequency_penalty", 1e30)),
    ("ragged bias ids", "sampling.logit_bias", asking("sampling.logit_bias_ids", b"12345")),
    ("bias without values", "sampling.logit_bias", asking("sampling.logit_bias_ids", ids(5))),
    (
        "bad word beyond the vocabulary",
        "bad_words",
        asking("sampling.bad_words", (ids(300),)),
    ),
    (
        "ragged bad word",
        "bad_words[0]",
        asking("sampling.bad_words", (b"1",)),
    ),
    (
        "1,025 bad words",
        "bad_words",
        asking("sampling.bad_words", (ids(5),) * 1025),
    ),
    ("empty stop", "stop.strings[0]", asking("stop.strings", (b"",))),
    ("stop that is no UTF-8", "stop.strings[0]", asking("stop.strings", (b"\xff\xfe",))),
    ("1,000 stops", "stop", asking("stop.strings", (b"a",) * 1000)),
    ("long stop", "stop.strings[0]", asking("stop.strings", (b"a" * (1 << 20),))),
    ("stop id beyond the vocabulary", "stop", asking("stop.token_ids", ids(300))),
    ("n 0", "n", asking("n", 0)),
    ("n 10**9", "n", asking("n", 10**9)),
    ("logprobs 21", "logprobs", asking("num_logprobs", 21)),
    ("logprobs 10**9", "logprobs", asking("num_logprobs", 10**9)),
    ("prompt logprobs 21", "prompt_logprobs", asking("num_prompt_logprobs", 21)),
    ("prompt logprobs 10**9", "prompt_logprobs", asking("num_prompt_logprobs", 10**9)),
    ("long salt", "cache_salt", asking("cache_salt", b"s" * 257)),
    ("long key", "idempotency_key", setting("idempotency_key", "k" * 257)),
    ("short digest", "spec_digest", setting("spec_digest", b"1")),
    ("unasked engines without a key", "unasked_engines", lambda add: add.unasked_engines.append(7)),
    ("far too many unasked engines", "unasked_engines", lambda add: add.unasked_engines.extend([7] * 4097)),
    ("nobody to stand in for", "stands_in", setting("stands_in", True)),
    ("long state", "service_state", setting("service_state", b"s" * ((1 << 20) + 1))),
    ("two days in the service", "service_ns", setting("service_ns", 2 * 86400 * 10**9)),
    ("emitted for other outputs", "emitted", setting("emitted", [engine_pb2.EmittedTokens(token_ids=ids(5))] * 2)),
    ("ragged emitted", "emitted[0]", setting("emitted", [engine_pb2.EmittedTokens(token_ids=b"12345")])),
    (
        "log probabilities that do not fit together",
        "emitted[0].logprobs",
        setting(
            "emitted",
            [engine_pb2.EmittedTokens(token_ids=ids(5), logprobs=engine_pb2.LogprobColumns(top_counts=b"\1\0"))],
        ),
    ),
    ("share above 1", "limits.kv_cache_share", setting("limits.kv_cache_share", 1.01)),
    ("negative share", "limits.kv_cache_share", setting("limits.kv_cache_share", -0.5)),
    ("share NaN", "limits.kv_cache_share", setting("limits.kv_cache_share", math.nan)),
    ("infinite share", "limits.kv_cache_share", setting("limits.kv_cache_share", math.inf)),
    ("unknown field in limits", "limits.999", unknown("limits")),
    ("unknown field", "343", lambda add: add.MergeFromString(b"\xb8\x15\x01")),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("field", "change"), [bad[1:] for bad in BAD_ADDS], ids=[bad[0] for bad in BAD_ADDS])
async def test_bad_add_is_refused_by_field(client: EngineClient, field: str, change: Change) -> None:
    subscription = client.subscription()
    message = add_message(PROMPT, 5, handle=subscription.handle)
    change(message)
    await client.send(add=message)
    await settled(subscription)
    status = subscription.refused
    assert status is not None and status.code == INVALID.value[0], status
    fields = [violation.field for violation in details(status)["BadRequest"].field_violations]
    assert any(field in violated for violated in fields), fields
    assert len(status.message) <= 1024
    for marker in ("Traceback", "/work", "0x", "headrace_backend"):
        assert marker not in str(status)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("share", [1.01, -0.5, math.nan, -math.inf])
async def test_bad_limits_of_a_reader_are_refused_by_field(client: EngineClient, share: float) -> None:
    request = await client.add(PROMPT, 400, detached=True)
    limits = engine_pb2.TenantLimits(kv_cache_share=share)
    reader = await settled(await client.attach(request.request_id, limits=limits))
    assert reader.refused is not None and reader.refused.code == INVALID.value[0]
    assert "limits.kv_cache_share" in [v.field for v in details(reader.refused)["BadRequest"].field_violations]
    assert (await settled(request)).tokens == expected_tokens(PROMPT, 400)


async def test_bias_that_is_no_number_is_refused(client: EngineClient) -> None:
    nan = b"\x00\x00\xc0\x7f"
    sampling = Sampling(logit_bias_ids=ids(5), logit_bias_values=nan)
    request = await settled(await client.add(PROMPT, 5, sampling=sampling))
    assert request.refused is not None and "spec.sampling.logit_bias[5]" in request.refused.message


async def test_every_broken_rule_is_named(client: EngineClient) -> None:
    request = await settled(await client.add(PROMPT, 5, tenant="t" * 300, spec_digest=b"1", service_ns=1 << 60))
    assert request.refused is not None
    named = {violation.field for violation in details(request.refused)["BadRequest"].field_violations}
    assert {"tenant", "spec_digest", "service_ns"} <= named


async def test_handle_in_use_is_refused_and_its_subscription_goes_on(client: EngineClient) -> None:
    request = await client.add(PROMPT, 1000, detached=True)
    await client.send(add=add_message(PROMPT, 5, handle=request.handle))
    await settled(request)
    assert request.refused is not None and "handle" in request.refused.message
    request.settled.clear()
    assert (await settled(request)).tokens == expected_tokens(PROMPT, 1000)


async def test_request_id_in_use_is_refused(client: EngineClient) -> None:
    request = await client.add(PROMPT, 1000)
    again = await settled(await client.add(PROMPT, 5, request_id=request.request_id))
    assert again.refused is not None and again.refused.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    assert (await settled(request)).tokens == expected_tokens(PROMPT, 1000)


async def test_expired_on_arrival_costs_nothing(client: EngineClient) -> None:
    steps = (await client.load()).step_count
    request = await settled(await client.add(PROMPT, 5, remaining_ns=1))
    assert request.ends[0].reason == engine_pb2.OUTPUT_END_REASON_DEADLINE
    assert request.tokens == []
    assert (await client.load()).step_count == steps


@pytest.mark.parametrize(
    ("kind", "question", "field"),
    [
        ("abort", engine_pb2.AbortRequest(request_id="x"), "cause"),
        ("abort", engine_pb2.AbortRequest(request_id="", cause=1), "request_id"),
        ("list", engine_pb2.ListQuery(page_size=0), "page_size"),
        ("list", engine_pb2.ListQuery(page_size=10**9), "page_size"),
        ("list", engine_pb2.ListQuery(page_size=1, state=4), "state"),
    ],
)
async def test_bad_question_is_refused_by_field(client: EngineClient, kind: str, question: Any, field: str) -> None:
    refused = await client.ask(kind, question)
    assert refused.status.code == INVALID.value[0]
    assert details(refused.status)["BadRequest"].field_violations[0].field == field


# --- the conversation itself
# --------------------------------------------------------------------------------------------------


async def converse(address: str, *messages: bytes, metadata: Any = None) -> grpc.aio.AioRpcError:
    """Sends raw messages and returns how the stream ended."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/headrace_engine.v1.EngineService/Connect")(metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            for message in messages:
                await call.write(message)
            while (await asyncio.wait_for(call.read(), 60)) is not grpc.aio.EOF:
                pass
        return ended.value


def hello(version: int = 4, layout: str = LAYOUT) -> bytes:
    message = engine_pb2.Hello(protocol_version=version, request_layout=layout)
    return engine_pb2.ToEngine(hello=message).SerializeToString()


OTHER = "00112233aabbccdd"


def peers(*engines: str) -> bytes:
    return engine_pb2.ToEngine(quota_peers=engine_pb2.QuotaPeers(engines=engines)).SerializeToString()


def held(**fields: list[int]) -> bytes:
    return engine_pb2.ToEngine(held_engines=engine_pb2.HeldEngines(**fields)).SerializeToString()


def quotas(engine: str = OTHER, **fields: Any) -> bytes:
    report = engine_pb2.QuotaReport(engine=engine, number=1, complete=True, **fields)
    return engine_pb2.ToEngine(quota_report=report).SerializeToString()


def said(**limits: float) -> engine_pb2.TenantQuotas:
    return engine_pb2.TenantQuotas(tenant="key", limits=engine_pb2.TenantLimits(**limits))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "code", "said"),
    [
        ([b"\xff\xff\xff"], INVALID, "first message must be hello"),
        ([b""], INVALID, "first message must be hello"),
        ([engine_pb2.ToEngine(load=engine_pb2.LoadQuery()).SerializeToString()], INVALID, "must be hello"),
        ([hello(1)], grpc.StatusCode.FAILED_PRECONDITION, "protocol_version is 1"),
        ([hello(layout="")], grpc.StatusCode.FAILED_PRECONDITION, "different versions"),
        ([hello(layout="0123456789abcdef")], grpc.StatusCode.FAILED_PRECONDITION, "different versions"),
        ([hello() + b"\xb8\x3e\x01"], INVALID, "does not know"),
        ([hello(), hello()], INVALID, "hello came twice"),
        ([hello(), b""], INVALID, "empty"),
        ([hello(), b"\x0a\xff"], INVALID, "no ToEngine"),
        # A request id that is no UTF-8.
        ([hello(), b"\x12\x03\x1a\x01\xff"], INVALID, "no ToEngine"),
        ([hello(), b"\xba\x3e\x00"], INVALID, "not known"),
        # Field 999 in questions that have nothing else to check, and beside one.
        ([hello(), b"\x2a\x03\xb8\x3e\x01"], INVALID, "detach has fields"),
        ([hello(), b"\x3a\x03\xb8\x3e\x01"], INVALID, "load has fields"),
        ([hello(), b"\x3a\x00\xb8\x3e\x01"], INVALID, "load stands beside fields"),
        ([hello(), b"\x52\x03\xb8\x3e\x01"], INVALID, "quota_peers has fields"),
        ([hello(), b"\x5a\x03\xb8\x3e\x01"], INVALID, "quota_report has fields"),
        ([hello(), b"\x62\x03\xb8\x3e\x01"], INVALID, "held_engines has fields"),
        ([hello(), held(reached=[7] * 4097)], INVALID, "held_engines.reached: at most 4096"),
        ([hello(), held(guarded=[7] * 4097)], INVALID, "held_engines.guarded: at most 4096"),
        ([hello(), peers("no life")], INVALID, "quota_peers.engines: must be 16 hex digits"),
        ([hello(), peers(*[f"{number:016x}" for number in range(4097)])], INVALID, "at most 4096"),
        ([hello(), quotas(engine="")], INVALID, "quota_report.engine: must be 16 hex digits"),
        ([hello(), quotas(gone=["x" * 300])], INVALID, "tenants must be at most"),
        ([hello(), quotas(tenants=[said(kv_cache_share=math.nan)])], INVALID, "kv_cache_share: must be 0 to 1"),
    ],
)
async def test_broken_conversation_ends_the_stream(
    backend: BackendProcess, messages: list[bytes], code: grpc.StatusCode, said: str
) -> None:
    error = await converse(backend.address, *messages)
    assert error.code() is code
    assert said in (error.details() or "")


async def test_reports_that_cannot_be_true_harm_no_request(client: EngineClient) -> None:
    """An engine that nobody named is not believed, and one that was named as it says."""
    own = client.welcomes[0].engine
    streams = engine_pb2.QuotaShare(taken=-(1 << 63), want=(1 << 64) - 1)
    limits = engine_pb2.TenantLimits(concurrent_streams=1, requests_per_minute=1)
    rate = engine_pb2.QuotaShare(taken=(1 << 63) - 1, missing=(1 << 64) - 1)
    tenant = engine_pb2.TenantQuotas(tenant="", limits=limits, streams=streams, requests=rate, pressed=True)
    heard = [engine_pb2.QuotaHeard(engine=own, number=1 << 63)]
    for engine in (OTHER, own, OTHER):
        await client.send(
            quota_report=engine_pb2.QuotaReport(
                engine=engine, number=7, complete=True, tenants=[tenant, tenant], gone=["", "x"], heard=heard
            )
        )
        await client.send(quota_peers=engine_pb2.QuotaPeers(engines=[own, OTHER, OTHER]))
    await until(lambda: any(report.complete for report in client.quota_reports))
    # What the other claims of the tenant is over when nobody names it any more.
    await client.send(quota_peers=engine_pb2.QuotaPeers(engines=[own]))


async def test_message_beyond_the_limit_ends_the_stream_only(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    backend = start_backend(tmp_path, model, backend={"max_message_bytes": 1 << 20})
    try:
        async with connected(backend.address) as client:
            await client.wait_serving()
            error = await converse(backend.address, hello(), bytes(2 << 20))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await settled(await client.add(PROMPT, 5))).tokens == expected_tokens(PROMPT, 5)
    finally:
        backend.process.terminate()
        assert backend.process.wait(240) == 0


async def test_silence_instead_of_hello_ends(backend: BackendProcess) -> None:
    error = await converse(backend.address)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_port_is_open_to_the_secret_only(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    address = free_address()
    secret = "0123456789abcdef-secret"
    (tmp_path / "token").write_text(secret + "\n")
    (tmp_path / "token").chmod(0o600)
    backend = start_backend(tmp_path, model, backend={"listen": address, "token_file": str(tmp_path / "token")})
    try:
        good = (("authorization", f"Bearer {secret}"),)
        async with connected(address, good) as client:
            await client.wait_serving()
            assert (await settled(await client.add(PROMPT, 5))).tokens == expected_tokens(PROMPT, 5)
        texts = set()
        for metadata in (
            None,
            (("authorization", secret),),
            (("authorization", f"Basic {secret}"),),
            (("authorization", f"Bearer {secret}x"),),
            (("authorization", "Bearer " + "x" * len(secret)),),
            (("authorization", ""),),
            (*good, *good),
        ):
            # Nothing is sent: a grpc.aio client whose write meets the end of the call reports
            # INTERNAL by itself.
            error = await converse(address, metadata=metadata)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            texts.add(error.details())
        assert len(texts) == 1
        assert secret not in backend.log
    finally:
        backend.process.terminate()
        assert backend.process.wait(240) == 0


async def test_other_methods_are_unimplemented(backend: BackendProcess) -> None:
    async with grpc.aio.insecure_channel(backend.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await channel.unary_unary("/headrace_engine.v1.EngineService/Shutdown")(b"")
    assert ended.value.code() is grpc.StatusCode.UNIMPLEMENTED
