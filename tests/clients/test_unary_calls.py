"""Calls with one answer, in both clients.

What is sent, what comes back, pages, metadata, default timeouts.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import Any

import pytest
from tests.clients.canned_service import PROMPT_TOKENS, REQUEST_ID, REVISION, CannedServer, answer, token

import headrace
from headrace import AsyncClient, Client, FinishReason, MeasuredLoss, Quantization, RequestState
from headrace.cli.listing import quantization_line


def test_complete_returns_the_whole_answer(client: Client) -> None:
    completion = client.complete("hello", max_tokens=2)
    assert (completion.text, completion.token_ids) == (answer(2), (token(0), token(1)))
    assert completion.outputs[0].matched_stop == 7
    assert completion.finish_reason is FinishReason.STOP
    assert completion.logprobs is not None and len(completion.logprobs.top(1)) == 2
    assert (completion.request_id, completion.model_revision) == (REQUEST_ID, REVISION)
    assert completion.usage.output_tokens == 2 and completion.ledger.ttft_ns == 3_000_000
    with pytest.raises(headrace.Internal, match="NaN"):
        client.complete("failing")


def test_complete_brings_the_prompts_log_probabilities_as_one_run(client: Client, server: CannedServer) -> None:
    completion = client.complete("hello", prompt_logprobs=2, token_ids_only=True)
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs.first_token_index == 1
    assert completion.prompt_logprobs.next_token_index == PROMPT_TOKENS
    assert len(completion.prompt_logprobs.logprobs.top(4)) == 2
    spec = server.seen.requests[0].spec
    assert spec.token_ids_only and spec.prompt_logprobs == 2
    assert client.complete("hello").prompt_logprobs is None


def test_submit_gives_a_handle_for_subscribe_and_cancel(client: Client, server: CannedServer) -> None:
    submitted = client.submit("hello", idempotency_key="mine")
    assert (submitted.request_id, submitted.existing) == (REQUEST_ID, False)
    assert server.seen.requests[0].idempotency_key == "mine"
    assert client.subscribe(submitted).result().text == answer(12)
    assert client.cancel(submitted) is True


def test_submit_draws_a_key_of_its_own_for_each_request(client: Client, server: CannedServer) -> None:
    client.submit("hello")
    client.submit("hello")
    keys = [request.idempotency_key for request in server.seen.requests]
    assert all(keys) and keys[0] != keys[1]


def test_list_requests_reads_all_pages_and_no_more_than_needed(client: Client, server: CannedServer) -> None:
    rows = list(client.list_requests(state="finished", page_size=2))
    assert [row.request_id for row in rows] == [f"req-{i}" for i in range(5)]
    assert server.seen.attempts["ListRequests"] == 3
    assert rows[0].state is RequestState.FINISHED and rows[0].finish_reasons == (FinishReason.STOP,)
    assert rows[0].model == "canned"
    list(client.list_requests(model="canned"))
    assert server.seen.requests[-1].model == "canned"
    server.seen.attempts["ListRequests"] = 3
    assert rows[0].create_time == datetime.datetime.fromtimestamp(1_700_000_000, datetime.UTC)
    next(client.list_requests(page_size=2))
    assert server.seen.attempts["ListRequests"] == 4


def test_an_unknown_state_is_refused_by_name(client: Client) -> None:
    with pytest.raises(headrace.InvalidRequest, match="queued, running, finished"):
        list(client.list_requests(state="asleep"))


def test_tokenize_detokenize_models_and_load(client: Client, server: CannedServer) -> None:
    assert client.detokenize(client.tokenize("hé", add_special_tokens=False)) == "hé"
    assert not server.seen.requests[0].add_special_tokens and server.seen.requests[0].HasField("add_special_tokens")
    model = client.get_model("canned")
    assert model.memory_plan is not None and model.memory_plan.measured
    assert (model.memory_plan.total_bytes, model.memory_plan.kv_cache_bytes) == (8 << 30, 4 << 30)
    measured = MeasuredLoss("awq", 12_345, 3.25, 3.125, 0.0625, 0.03125)
    assert model.quantization == Quantization(
        "int4", 64, 4.375, 0.09, 0.125, "a.weight", "int8", 8.5, 0.0625, measured, "int8 per token"
    )
    assert model == client.list_models()[0]
    assert model.default_sampling == {"temperature": 0.7, "top_k": 40}
    assert model.end_of_text_token_ids == (1, 2)
    assert model.not_followed == ("suppress_tokens (a list of 2 entries) has no effect",)
    load = client.load()
    assert (load.model, load.kv_cache_usage, load.max_running_sequences) == ("canned", 0.5, 8)
    assert (load.prefix_cache_hit_rate, load.draining, load.open_calls, load.max_open_calls) == (0.25, True, 5, 64)


def test_a_quantization_is_one_line_of_what_is_known() -> None:
    measured = MeasuredLoss("awq", 12_345, 3.25, 3.125, 0.0625, 0.03125)
    report = Quantization("int4", 64, 4.375, 0.09, 0.125, "a.weight", "int8", 8.5, 0.0625, measured)
    layers = "int4 in groups of 64, 4.38 bits a weight of the layers"
    weights = "weights off by 9.00% on average, by 12.50% in a.weight"
    head = "int8, 8.50 bits a weight of the output layer, off by 6.25%"
    text = (
        "by the folder's report of awq, on 12,345 tokens of text: perplexity 3.2500 before, 3.1250 after, divergence"
        " 0.06250"
    )
    assert quantization_line(report) == f"{layers}; {weights}; {head}; {text} ± 0.03125 nats"
    plain = dataclasses.replace(report, measured=None)
    assert quantization_line(plain) == f"{layers}; {weights}; {head}"
    assert quantization_line(dataclasses.replace(plain, scheme="", bits_per_weight=0.0)) == head
    assert quantization_line(dataclasses.replace(plain, head_scheme="")) == f"{layers}; {weights}"
    rounded = dataclasses.replace(report, activations="fp8 per token from 33 tokens on")
    assert (
        quantization_line(rounded)
        == f"{layers}; {weights}; {head}; activations fp8 per token from 33 tokens on; {text} ± 0.03125 nats"
    )
    one_piece = dataclasses.replace(measured, divergence_interval=None)
    folder = Quantization("compressed-tensors int4", 64, 4.375, 0.0, 0.0, "", measured=one_piece)
    assert quantization_line(folder) == f"compressed-tensors {layers}; {text} nats"


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 1e10])
async def test_a_timeout_beyond_what_grpc_counts_is_none(server: CannedServer, timeout: float) -> None:
    with Client(server.address) as client:
        client.load(timeout=timeout)
        client.generate("hello", timeout=timeout).result()
        assert client.session(timeout=timeout).submit("x", max_tokens=2).result()
    async with AsyncClient(server.address, timeout=timeout) as client:
        await client.load()
        await client.generate("hello", timeout=timeout).result()


def test_a_timeout_that_is_no_number_is_refused_by_name(server: CannedServer) -> None:
    with Client(server.address) as client:
        for timeout in (math.nan, "1"):
            for call in (client.load, lambda timeout: client.generate("hello", timeout=timeout).result()):
                with pytest.raises(headrace.InvalidRequest, match="timeout: must be a number of seconds"):
                    call(timeout=timeout)


@pytest.mark.parametrize("message", [{"role": "user", "content": "x"}, "user", ("user",), ("user", "x", "y"), None])
def test_what_is_no_message_or_tool_is_refused_by_its_place(server: CannedServer, message: Any) -> None:
    with Client(server.address) as client:
        with pytest.raises(headrace.InvalidRequest, match=r"messages\[1\]: must be a headrace\.Message or a pair"):
            client.chat([("user", "hello"), message]).result()
        with pytest.raises(headrace.InvalidRequest, match=r"tools\[0\]: must be a headrace\.Tool"):
            client.chat("hello", tools=[message]).result()


def test_quick_calls_have_the_clients_timeout_and_generating_ones_have_none(server: CannedServer) -> None:
    with Client(server.address, timeout=1.5) as client:
        with pytest.raises(headrace.DeadlineExceeded):
            client.load("sleep")
        client.load("sleep", timeout=60)
        client.complete("hello")
        client.generate("hello").result()
    remaining = server.seen.time_remaining
    assert remaining[0] is not None and remaining[0] < 1.6
    assert remaining[2] is None or remaining[2] > 1e6
    assert remaining[3] is None or remaining[3] > 1e6


def test_metadata_goes_with_every_call(server: CannedServer) -> None:
    with Client(server.address, metadata=[("authorization", "Bearer secret")]) as client:
        client.load()
        client.generate("hello").result()
    assert [seen["authorization"] for seen in server.seen.metadata] == ["Bearer secret"] * 2


async def test_async_calls_answer_as_the_sync_ones(client: Client, server: CannedServer) -> None:
    async with AsyncClient(server.address) as other:
        assert await other.complete("hello") == client.complete("hello")
        assert await other.get_model() == client.get_model()
        assert await other.list_models() == client.list_models()
        assert await other.load() == client.load()
        assert await other.tokenize("abc") == client.tokenize("abc")
        assert await other.detokenize([97, 98]) == "ab"
        assert [row async for row in other.list_requests(page_size=2)] == list(client.list_requests())
        submitted = await other.submit("hello")
        assert (await other.subscribe(submitted).result()) == client.subscribe(REQUEST_ID).result()
        assert await other.cancel(submitted) is True


def test_both_clients_offer_the_same_calls_with_the_same_arguments() -> None:
    import inspect

    def surface(cls: type) -> dict[str, list[str]]:
        members = inspect.getmembers(cls, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in members if not name.startswith("_")}

    assert surface(Client) == surface(AsyncClient)
    assert surface(headrace.AdminClient) == surface(headrace.AsyncAdminClient)
    for sync, other in (
        (headrace.Stream, headrace.AsyncStream),
        (headrace.Session, headrace.AsyncSession),
        (headrace.SessionGeneration, headrace.AsyncSessionGeneration),
    ):
        renamed = {name if name != "aclose" else "close": p for name, p in surface(other).items()}
        assert surface(sync) == renamed
