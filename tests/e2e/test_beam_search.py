"""Outputs that are chosen at the end: searches as in transformers, the best n of several."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.support.rpc import CALL_TIMEOUT_S, connected, generate, greedy, read
from tests.support.running_server import DEMO, RunningServer

from headrace.v1 import generation_pb2, inference_pb2

STORY = "Once upon a time"
TOKENS = 16
# fp32 on both sides, with sums in another order, through the layers.
TOLERANCE = 1e-3


def search(text: str, width: int, n: int, **fields: object) -> generation_pb2.GenerationSpec:
    spec = generation_pb2.GenerationSpec(text=text, n=n, beam_search={"width": width, **fields})
    spec.stop.max_tokens = TOKENS
    return spec


def test_the_demo_model_is_searched_as_in_transformers(server: RunningServer) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    for text, width, n, length_penalty in ((STORY, 4, 3, 1.0), ("What is a", 8, 2, 2.0)):
        prompt = tokenizer(text, return_tensors="pt").input_ids
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), num_beams=width, num_return_sequences=n, do_sample=False,
            length_penalty=length_penalty, max_new_tokens=TOKENS, return_dict_in_generate=True, output_scores=True,
            pad_token_id=0,
        )  # fmt: skip
        answer = generate(server.address, search(text, width, n, length_penalty=length_penalty))
        assert answer.events[0].accepted.prompt_tokens == prompt.shape[1]
        for index in range(n):
            tokens = answer.tokens[index]
            assert tokens == expected.sequences[index, prompt.shape[1] :].tolist()[: len(tokens)]
        scores = [answer.finished[index].score for index in range(n)]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=TOLERANCE)


def test_a_search_is_sent_whole_and_can_be_read_later(server: RunningServer) -> None:
    spec = search(STORY, 3, 2)
    expected = generate(server.address, spec)
    deltas = [event.delta.output_index for event in expected.events if event.HasField("delta")]
    assert sorted(deltas) == [0, 1], "each output is one delta"
    with connected(server.address) as stub:
        submitted = stub.Submit(inference_pb2.SubmitRequest(spec=spec), timeout=CALL_TIMEOUT_S)
        request = inference_pb2.SubscribeRequest(request_id=submitted.request_id)
        answer = read(stub.Subscribe(request, timeout=CALL_TIMEOUT_S))
        whole = stub.Complete(inference_pb2.CompleteRequest(spec=spec), timeout=CALL_TIMEOUT_S)
    assert answer.tokens == expected.tokens and answer.texts == expected.texts
    assert [list(output.token_ids) for output in whole.outputs] == [expected.tokens[0], expected.tokens[1]]
    assert [output.finished.score for output in whole.outputs] == [expected.finished[index].score for index in range(2)]
    # Three beams at each step but the first, which has one.
    assert expected.done is not None and expected.done.usage.output_tokens <= 1 + 3 * (TOKENS - 1)


def test_a_stop_string_ends_an_output_of_a_search_before_it(server: RunningServer) -> None:
    text = generate(server.address, search(STORY, 2, 1)).texts[0]
    spec = search(STORY, 2, 1, early_stopping=generation_pb2.EARLY_STOPPING_FULL)
    word = text.split()[2]
    spec.stop.strings.append(word)
    answer = generate(server.address, spec)
    assert word not in answer.texts.get(0, "")
    assert answer.finished[0].reason == generation_pb2.FINISH_REASON_STOP
    assert answer.finished[0].matched_stop.text == word


def test_the_best_outputs_are_those_with_the_largest_mean_log_probability(server: RunningServer) -> None:
    spec = greedy(STORY, TOKENS, n=5, logprobs=0)
    spec.sampling.temperature, spec.sampling.seed = 1.5, 7
    drawn = generate(server.address, spec)
    with connected(server.address) as stub:
        all_five = stub.Complete(inference_pb2.CompleteRequest(spec=spec), timeout=CALL_TIMEOUT_S).outputs
    means = {output.output_index: sum(output.logprobs.sampled) / TOKENS for output in all_five}
    best = sorted(means, key=lambda index: -means[index])[:2]
    spec.n, spec.best_of = 2, 5
    spec.ClearField("logprobs")
    chosen = generate(server.address, spec)
    assert [chosen.tokens[index] for index in range(2)] == [drawn.tokens[index] for index in best]
    scores = [chosen.finished[index].score for index in range(2)]
    assert scores == pytest.approx([means[index] for index in best], rel=TOLERANCE)
    assert chosen.done is not None and chosen.done.usage.output_tokens == 5 * TOKENS
    assert not any(event.delta.HasField("logprobs") for event in chosen.events)
