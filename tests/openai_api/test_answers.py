"""Answers of chat completions and completions, whole and streamed, and what the engine is asked."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from tests.openai_api.harness import CHAT, COMPLETIONS, HELLO, Running
from tests.service.harness import ANSWER

from headrace_service.openai.requests import nested_fields

pytestmark = pytest.mark.asyncio(loop_scope="module")


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text that a stream brought for one choice."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def test_a_chat_is_answered_whole(shared: Running) -> None:
    response = await shared.post(CHAT, {"model": "tiny", "messages": HELLO})
    answer = response.json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert (choice["index"], choice["finish_reason"], answer["object"]) == (0, "length", "chat.completion")
    num_tokens = len(shared.ids(ANSWER))
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + num_tokens
    assert answer["id"] == f"chatcmpl-{response.headers['x-request-id']}" == f"chatcmpl-{shared.newest.add.request_id}"
    assert shared.tokenizer.decode(array("I", shared.newest_asked.prompt_token_ids)) == "user\nhello\nassistant\n"


async def test_a_stream_brings_the_same_as_an_answer(shared: Running) -> None:
    events = await shared.events(CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}})
    assert text_of(events) == ANSWER
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events[-2:-1]] == ["length"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == len(shared.ids(ANSWER))
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


async def test_several_prompts_and_outputs_are_one_answer(shared: Running) -> None:
    body = {"prompt": ["the quick", "brown fox"], "n": 2, "max_tokens": 3}
    whole = (await shared.post(COMPLETIONS, body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in whole["choices"]} == {"the quick brown"}
    assert whole["usage"]["completion_tokens"] == 12
    events = await shared.events(COMPLETIONS, body)
    assert [text_of(events, index) for index in range(4)] == ["the quick brown"] * 4
    assert len({event["id"] for event in events}) == 1


async def test_a_prompt_may_be_token_ids(shared: Running) -> None:
    ids = shared.ids("the quick brown fox")
    for prompt in (ids, [ids]):
        await shared.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        assert list(array("I", shared.newest_asked.prompt_token_ids)) == ids


async def test_an_echo_has_the_prompts_log_probabilities_whole_and_streamed(shared: Running) -> None:
    shared.engine.logprobs = 1
    body = {"prompt": "the quick brown fox", "max_tokens": 2, "echo": True, "logprobs": 1}
    (choice,) = (await shared.post(COMPLETIONS, body)).json()["choices"]
    events = await shared.events(COMPLETIONS, body)
    shared.engine.logprobs = 0
    assert choice["text"] == "the quick brown foxthe quick" == text_of(events)
    report = choice["logprobs"]
    assert report["token_logprobs"][0] is report["top_logprobs"][0] is None
    ids = shared.ids("the quick brown fox")
    assert report["token_logprobs"][1:] == [-float(token) for token in [*ids, *ids[:2]]]
    assert report["tokens"][1:] == ["the", " quick", " brown", " fox", "the", " quick"]
    assert report["text_offset"][1:3] == [5, 8]
    streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    for name, values in report.items():
        assert [one for part in streamed for one in part[name]] == values


async def test_a_prompt_can_be_scored_without_an_output(shared: Running) -> None:
    body = {"prompt": "the quick", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = (await shared.post(COMPLETIONS, body)).json()
    assert answer["choices"][0]["text"] == "the quick"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 0


async def test_log_probabilities_of_a_chat(shared: Running) -> None:
    shared.engine.logprobs = 2
    body = {"messages": HELLO, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    (entry,) = (await shared.post(CHAT, body)).json()["choices"][0]["logprobs"]["content"]
    streamed = [event["choices"][0]["logprobs"] for event in await shared.events(CHAT, body)]
    shared.engine.logprobs = 0
    (token,) = shared.ids("the")
    assert (entry["token"], entry["logprob"], bytes(entry["bytes"])) == ("the", -float(token), b"the")
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-float(token), -float(token) - 1]
    assert [one["content"] for one in streamed if one] == [[entry]]


async def test_every_option_reaches_the_engine(shared: Running) -> None:
    options = {
        "temperature": 0.5, "top_p": 0.25, "presence_penalty": 1.5, "frequency_penalty": -1.5, "seed": -1,
        "logit_bias": {"5": -100, "7": 2.5}, "n": 2, "stop": ["fox", "dog"], "max_completion_tokens": 7,
        "top_k": 3, "min_p": 0.125, "top_n_sigma": 2.0, "repetition_penalty": 1.25, "min_tokens": 2,
        "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True, "priority": -3,
        "cache_salt": "salt", "logprobs": True, "top_logprobs": 4, "skip_special_tokens": False,
    }  # fmt: skip
    response = await shared.post(CHAT, {"messages": HELLO, **options})
    assert response.status_code == 200, response.text
    request = shared.newest_asked
    sampling, stop = request.sampling, request.stop
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p", "top_n_sigma"):
        assert getattr(sampling, name) == options[name], name
    assert (sampling.repetition_penalty, sampling.seed) == (1.25, 2**64 - 1)
    assert list(array("I", sampling.logit_bias_ids)) == [5, 7]
    assert list(array("f", sampling.logit_bias_values)) == [-100, 2.5]
    assert (stop.strings, stop.max_tokens, stop.min_tokens) == ((b"fox", b"dog"), 7, 2)
    assert (list(array("I", stop.token_ids)), stop.include_stop_string) == ([9], True)
    assert (request.n, request.num_logprobs, request.priority, request.cache_salt) == (2, 4, 3, b"salt")


async def test_what_ended_an_output_is_said(shared: Running) -> None:
    body = {"messages": HELLO, "stop": "done"}
    (choice,) = (await shared.post(CHAT, body)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "done")
    assert choice["message"]["content"] == ANSWER.removesuffix("done")
    last = (await shared.events(CHAT, body))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "done")


async def test_roles_and_parts_become_the_templates(shared: Running) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "token"}]},
        {"role": "assistant", "content": "the quick", "refusal": None, "tool_calls": []},
    ]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}
    assert (await shared.post(CHAT, body)).status_code == 200
    prompt = shared.tokenizer.decode(array("I", shared.newest_asked.prompt_token_ids))
    assert prompt == "system\nbe brief\nuser\na token\nassistant\nthe quick"


async def test_what_asks_for_nothing_is_accepted_and_what_nobody_knows_is_named(shared: Running) -> None:
    nothing = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "store": False, "service_tier": "auto", "user": "u", "metadata": {"a": "b"}, "logit_bias": None,
        "parallel_tool_calls": True, "frequency_penalty": 0, "top_logprobs": None, "stream_options": None,
    }  # fmt: skip
    response = await shared.post(CHAT, {"messages": HELLO, "max_tokens": 1, **nothing})
    assert (response.status_code, response.headers.get("x-headrace-ignored")) == (200, None)
    response = await shared.post(CHAT, {"messages": HELLO, "max_tokens": 1, "temprature": 0, "b\r\n": 1})
    assert (response.status_code, response.headers["x-headrace-ignored"]) == (200, "temprature")


async def test_fields_that_nobody_knows_are_ignored_and_named_at_any_depth(shared: Running) -> None:
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "x": 1}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "id": 7},
        {"role": "assistant", "content": "b", "tool_calls": [call], "annotations": [], "audio": None, "colour": None},
        {"role": "tool", "content": "c", "tool_call_id": "a"},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"x": 1}, "strikt": True}, "extra": 1}
    body = {"messages": messages, "temprature": 0.5, "response_format": form, "max_tokens": 1}
    response = await shared.post(CHAT, body)
    assert response.status_code == 200, response.text
    assert response.headers["x-headrace-ignored"].split(", ") == [
        "temprature",
        "messages[0].content[0].cache_control",
        "messages[0].id",
        "messages[1].tool_calls[0].index",
        "messages[1].tool_calls[0].function.x",
        "response_format.json_schema.strikt",
        "response_format.extra",
    ]
    many = {**HELLO[0], **{f"x{index}": index for index in range(20)}}
    named = (await shared.post(CHAT, {"messages": [many], "max_tokens": 1})).headers["x-headrace-ignored"]
    assert len(named.split(", ")) == 16


def test_lists_within_lists_are_not_looked_through_for_unknown_fields() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    # A parser with a deeper stack than Python's own takes such a body.
    given = {"messages": [{"role": "user", "content": deep, "colour": 1}], "tools": [deep]}
    assert list(nested_fields.unknown(given)) == ["messages[0].colour"]


async def test_a_message_of_an_answer_may_be_sent_back_as_it_is(shared: Running) -> None:
    answer = (await shared.post(CHAT, {"messages": HELLO})).json()["choices"][0]["message"]
    sent = {"annotations": [], "audio": None, "function_call": None, "tool_calls": None, **answer}
    response = await shared.post(CHAT, {"messages": [*HELLO, sent, *HELLO], "max_tokens": 1})
    assert (response.status_code, response.headers.get("x-headrace-ignored")) == (200, None)


async def test_models_are_listed_and_described(shared: Running) -> None:
    listed = (await shared.client.get("/v1/models")).json()
    (model,) = listed["data"]
    assert (listed["object"], model["id"], model["object"], model["max_model_len"]) == ("list", "tiny", "model", 512)
    assert (await shared.client.get("/v1/models/tiny")).json() == model


async def test_a_model_of_a_hub_is_known_by_its_whole_name_too(shared: Running) -> None:
    for path in ("/v1/models/acme/tiny", "/v1/models/acme%2Ftiny"):
        assert (await shared.client.get(path)).json()["id"] == "tiny"
    answer = await shared.post(CHAT, {"model": "acme/tiny", "messages": HELLO})
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
    assert (await shared.post(CHAT, {"model": "other/tiny", "messages": HELLO})).status_code == 404
