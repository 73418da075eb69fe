"""Requests that are refused: status, and an error that names the field its caller sent."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
from typing import Any

import grpc
import pytest
from tests.bad_input.rows import ROWS, Facts, Row
from tests.openai_api.harness import CHAT, COMPLETIONS, HELLO, Running
from tests.service.fake_engine import queue_full

from headrace_service import errors
from headrace_service.openai.http import http_errors

pytestmark = pytest.mark.asyncio(loop_scope="module")
_ROOT = pathlib.Path(__file__).parents[2]

# Path, fields, status, param, and what the message says.
_REFUSED: list[tuple[str, dict[str, Any], int, str, str]] = [
    # Rules of the one table, by the names of this API.
    (CHAT, {"temperature": -1}, 400, "temperature", "at least 0.01 and at most 100"),
    (CHAT, {"top_p": 1.5}, 400, "top_p", "above 0 and at most 1"),
    (CHAT, {"presence_penalty": 3}, 400, "presence_penalty", "at most 2"),
    (CHAT, {"logit_bias": {"9": 101}}, 400, "logit_bias[9]", "at most 100"),
    (CHAT, {"logit_bias": {"99999999": 1}}, 400, "logit_bias[99999999]", "below the vocabulary size"),
    (CHAT, {"logit_bias": {"x": 1}}, 400, "logit_bias[x]", "token id"),
    (CHAT, {"n": 0}, 400, "n", "at least 1"),
    (CHAT, {"seed": 2**64}, 400, "seed", "at most 18446744073709551615"),
    (CHAT, {"max_tokens": 512}, 400, "max_tokens", "at most 511"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "at least 1"),
    (CHAT, {"max_completion_tokens": 500}, 400, "max_completion_tokens", "the prompt has"),
    (CHAT, {"priority": -(2**31)}, 400, "priority", "at most 100"),
    (CHAT, {"stop": ["a"] * 17}, 400, "stop", "at most 16 entries"),
    (CHAT, {"stop": ""}, 400, "stop[0]", "at least 1"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "at most 20"),
    (COMPLETIONS, {"logprobs": 21}, 400, "logprobs", "at most 20"),
    (COMPLETIONS, {"prompt": [1, 2**31]}, 400, "prompt[1]", "below the vocabulary size"),
    (COMPLETIONS, {"prompt": "a " * 3000}, 400, "prompt", "leaves room for output"),
    # Types, and fields that contradict each other.
    (CHAT, {"max_tokens": "5"}, 400, "max_tokens", "must be int, got str"),
    (CHAT, {"temperature": "hot"}, 400, "temperature", "must be float, got str"),
    (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options", "must be absent unless stream is true"),
    (CHAT, {"stream_options": 5}, 400, "stream_options", "must be object, got int"),
    (CHAT, {"stop": [1]}, 400, "stop[0]", "must be str, got int"),
    (CHAT, {"max_tokens": 4, "max_completion_tokens": 5}, 400, "max_tokens", "must not differ"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role", "must be one of"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "must be a string"),
    (CHAT, {"messages": [{"role": "assistant", "refusal": "no"}]}, 400, "messages[0].refusal", "not supported"),
    (CHAT, {"continue_final_message": True}, 400, "messages[0].role", "must be assistant"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "must not be empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt[1]", "must not be empty"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt", "must be a string, a list of strings"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, 400, "prompt", "at most 1024"),
    # What this server does not have.
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools[0].function", "is needed"),
    (COMPLETIONS, {"prompt": "a", "tools": [{"function": {"name": "a"}}]}, 400, "tools", "not supported"),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", "must not be set without tools"),
    (CHAT, {"functions": [{}]}, 400, "functions", "not supported"),
    (CHAT, {"response_format": {"type": "yaml"}}, 400, "response_format.type", "must be text, json_object"),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "must be an object with"),
    (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice", "must not be given beside"),
    (CHAT, {"structured_outputs": {"yaml": "a"}}, 400, "structured_outputs.yaml", "not supported"),
    (COMPLETIONS, {"guided_choice": []}, 400, "guided_choice", "must have at least 1"),
    (CHAT, {"modalities": ["text", "audio"]}, 400, "modalities", "not supported"),
    (CHAT, {"store": True}, 400, "store", "not supported"),
    (CHAT, {"reasoning_effort": "high"}, 400, "reasoning_effort", "has no reasoning_effort"),
    (CHAT, {"reasoning_effort": "most"}, 400, "reasoning_effort", "must be one of low, medium, high, or none"),
    (COMPLETIONS, {"reasoning_effort": "high"}, 400, "reasoning_effort", "not supported"),
    (CHAT, {"web_search_options": {}}, 400, "web_search_options", "not supported"),
    (CHAT, {"chat_template": "x"}, 400, "chat_template", "not supported"),
    (CHAT, {"stream_options": {"include_obfuscation": True}}, 400, "stream_options.include_obfuscation", "not"),
    (COMPLETIONS, {"suffix": "end"}, 400, "suffix", "not supported"),
    (COMPLETIONS, {"best_of": 2, "n": 3}, 400, "best_of", "must be at least n, 3"),
    (COMPLETIONS, {"best_of": 0}, 400, "best_of", "must be at least 1"),
    (CHAT, {"best_of": 3}, 400, "best_of", "not supported"),
    (CHAT, {"messages": [{"role": "tool", "content": "5"}]}, 400, "messages[0].tool_call_id", "an earlier message"),
    (CHAT, {"messages": [{"role": "function", "content": "5"}]}, 400, "messages[0].role", "its newer name is tool"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        400,
        "messages[0].tool_calls",
        "must be a list of calls",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0].type",
        "'image_url' is not supported",
    ),
    (CHAT, {"model": "gpt-4"}, 404, "model", "is not served here"),
]


@pytest.mark.parametrize(("path", "fields", "status", "param", "words"), _REFUSED)
async def test_a_request_is_refused_by_the_field_that_its_caller_sent(
    shared: Running, path: str, fields: dict[str, Any], status: int, param: str, words: str
) -> None:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    response = await shared.post(path, {**prompt, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert words in error["message"] and error["message"].startswith(param)


# What this API takes: signed seeds as OpenAI has them, fields that nobody knows as vLLM does, and
# of a key that comes twice the last one, as most JSON readers.
_TAKEN = {"73 seed -1", "55 JSON with a key twice", "51 unknown parameter"}
_ROWS = [row for row in ROWS if row.sampling is not None and row.name not in _TAKEN]


@pytest.mark.parametrize("row", _ROWS, ids=[row.name for row in _ROWS])
async def test_what_every_entrance_refuses_is_refused(shared: Running, row: Row) -> None:
    model, known = shared.engine.model, set(shared.engine.requests)
    assert row.sampling is not None
    sampling = row.sampling(Facts(model.vocabulary_size, model.max_context_tokens, model.max_outputs))
    body = f'{{"prompt": "hello", {sampling.lstrip().removeprefix("{")}'
    response = await shared.client.post(COMPLETIONS, content=body.encode())
    assert response.status_code == 400, response.text
    # This API has no searches, whatever is wrong with one.
    field = "use_beam_search" if "use_beam_search" in sampling else row.field
    assert field in response.text or response.json()["error"]["param"] == "body", response.text
    assert set(shared.engine.requests) == known, "nothing of this may reach the engine"


async def test_several_broken_rules_are_named_together(shared: Running) -> None:
    response = await shared.post(CHAT, {"messages": HELLO, "temperature": -1, "top_p": 2})
    assert all(name in response.json()["error"]["message"] for name in ("temperature: ", "top_p: "))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff", b'{"messages": NaN}', b"[" * 100_000])
async def test_a_body_that_is_no_object_is_refused(shared: Running, body: bytes) -> None:
    response = await shared.client.post(CHAT, content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "body")


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "half of a surrogate pair"),
        (rb'{"messages": [{"role": "user", "content": "', "truncated"),
    ],
)
async def test_a_body_that_is_no_json_is_refused_by_what_is_wrong(shared: Running, body: bytes, rule: str) -> None:
    error = (await shared.client.post(CHAT, content=body)).json()["error"]
    assert error["param"] == "body" and rule in error["message"]


@pytest.mark.parametrize("coding", ["gzip", "br"])
async def test_a_compressed_body_is_refused_by_its_coding(shared: Running, coding: str) -> None:
    response = await shared.post(CHAT, {"messages": HELLO}, **{"content-encoding": coding})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (415, "content-encoding") and repr(coding) in error["message"]
    assert (await shared.post(CHAT, {"messages": HELLO}, **{"content-encoding": "identity"})).status_code == 200


async def test_paths_and_methods_that_are_not_there_are_refused_in_the_same_form(shared: Running) -> None:
    for method, path, status in (
        ("GET", "/v1/audio", 404),
        ("POST", "/v1/responses", 404),
        ("POST", CHAT + "/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/none", 404),
    ):
        response = await shared.client.request(method, path)
        error = response.json()["error"]
        assert (response.status_code, sorted(error)) == (status, ["code", "message", "param", "type"]), path
        assert error["message"]
        assert (error["code"] == "method_not_allowed") == (status == 405), path


async def test_the_guide_names_every_status() -> None:
    """Nothing of this API can exist already (409); 405 and 431 come before any call."""
    section = (_ROOT / "docs/openai.md").read_text().split("## Errors\n")[1].split("\n## ")[0]
    named = [int(status) for row in re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE) for status in row.split(",")]
    failures = [errors.ServiceError(code, "") for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    failures += [http_errors.CompressedBody("gzip"), errors.exhausted("", 1.0)]
    answered = {http_errors.meaning_of(failure).status for failure in failures} - {409}
    assert named == sorted(answered | {405, 431})


async def test_a_full_queue_is_429_with_the_time_to_wait(shared: Running) -> None:
    shared.engine.refusal = queue_full(7)
    response = await shared.post(CHAT, {"messages": HELLO})
    shared.engine.refusal = None
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_an_output_that_fails_ends_an_answer_and_a_stream_with_the_error(shared: Running) -> None:
    async def failing(body: dict[str, Any]) -> Any:
        asking = asyncio.create_task(shared.post(CHAT, {"messages": HELLO, **body}))
        known = set(shared.engine.requests)
        await shared.until(lambda: set(shared.engine.requests) - known)
        shared.engine.end_with_error(shared.newest.add.request_id, "it broke")
        return await asking

    shared.engine.running.clear()
    whole, streamed = await failing({}), await failing({"stream": True})
    shared.engine.running.set()
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, "it broke")
    *_, error, last, _ = streamed.text.split("\n\n")
    assert "it broke" in error and error.startswith('data: {"error":') and last == "data: [DONE]"


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_request_that_can_not_be_met_is_400_whenever_that_shows(shared: Running, num_tokens: int) -> None:
    async def failing(body: dict[str, Any]) -> Any:
        asking = asyncio.create_task(shared.post(CHAT, {"messages": HELLO, "guided_regex": "a", **body}))
        known = set(shared.engine.requests)
        await shared.until(lambda: set(shared.engine.requests) - known)
        for _ in range(num_tokens):
            shared.engine.step()
        shared.engine.end_unmet(shared.newest.add.request_id, "spec.structured_output", "can't be met")
        return await asking

    shared.engine.running.clear()
    whole, streamed = await failing({}), await failing({"stream": True})
    shared.engine.running.set()
    *_, last_event, _, _ = streamed.text.split("\n\n")
    error = {
        "message": "guided_regex: can't be met", "type": "invalid_request_error", "param": "guided_regex", "code": None
    }  # fmt: skip
    assert (whole.status_code, whole.json()["error"]) == (400, error)
    assert json.loads(last_event.removeprefix("data: "))["error"] == error


async def test_a_deadline_ends_a_generation(shared: Running) -> None:
    response = await shared.post(CHAT, {"messages": HELLO}, **{"x-request-timeout": "soon"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout")
    shared.engine.running.clear()
    asking = asyncio.create_task(shared.post(CHAT, {"messages": HELLO}, **{"x-request-timeout": "3600"}))
    known = set(shared.engine.requests)
    await shared.until(lambda: set(shared.engine.requests) - known)
    request = shared.newest
    assert 3590e9 < request.add.remaining_ns <= 3600e9
    shared.engine.expire(request.add.request_id)
    shared.engine.running.set()
    assert (await asking).status_code == 504
