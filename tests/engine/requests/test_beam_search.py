"""Searches end as those of transformers do: the same tokens, the same scores, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from headrace_backend.engine.events import EndReason, OutputEnd
from headrace_backend.engine.requests.beam_search import BeamSearch, Finish
from headrace_backend.engine.requests.selection import Chosen, publish
from headrace_backend.engine.requests.token_log import OutputLog, TokenLogprobs
from headrace_request.beam_search import BeamSearch as BeamOptions
from headrace_request.beam_search import EarlyStopping

VOCABULARY = 40
PROMPT = [3, 1, 4, 1, 5]
# As transformers calls them.
EARLY_STOPPING: dict[EarlyStopping, bool | str] = {"heuristic": False, "full": True, "never": "never"}
# fp32 on both sides; transformers adds the log probabilities in fp32, the search in fp64.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Iterator[transformers.PreTrainedModel]:
    """A random model whose next token depends on those before it, and hardly on any one of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    yield transformers.AutoModelForCausalLM.from_config(config).float().eval()
    torch.set_num_threads(threads)


def top_logprobs(model: transformers.PreTrainedModel, tokens: list[int], count: int) -> TokenLogprobs:
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, -1].float()
    top = torch.log_softmax(logits, 0).topk(count)
    return TokenLogprobs(0.0, 1, top.indices.tolist(), top.values.tolist())


def searched(
    model: transformers.PreTrainedModel, options: BeamOptions, finish: Finish, n: int, num_logprobs: int = -1
) -> list[Chosen]:
    """The outputs of a search that is run to its end."""
    search = BeamSearch(options, n, finish, num_logprobs=num_logprobs)
    count = min(VOCABULARY, options.width + len(finish.stop_token_ids))
    while not search.is_over:
        reports = {h.slot: top_logprobs(model, h.tokens.tolist(), count) for h in search.running}
        search.advance(reports)
        assert len({h.slot for h in search.running}) == len(search.running), "a slot has one hypothesis"
    return search.choose(OutputEnd(0, EndReason.ERROR))


def generated(model: transformers.PreTrainedModel, n: int, **options: Any) -> tuple[list[list[int]], list[float]]:
    prompt = torch.tensor([PROMPT])
    answer = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_return_sequences=n,
        return_dict_in_generate=True, output_scores=True, pad_token_id=VOCABULARY + 1, **options,
    )  # fmt: skip
    outputs = [
        [token for token in row if token != VOCABULARY + 1] for row in answer.sequences[:, len(PROMPT) :].tolist()
    ]
    return outputs, answer.sequences_scores.tolist()


# Width, outputs, tokens that end them, fewest tokens before these.
_SHAPES = ((2, 1, [7], 0), (4, 4, [7, 9, 11], 3), (3, 2, [], 0), (16, 5, [2, 3, 5, 7], 0))


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize(("length_penalty", "shapes"), [
    (1.0, _SHAPES), (0.0, _SHAPES[:1]), (2.5, _SHAPES[1:2]), (-1.5, _SHAPES[:2])
])  # fmt: skip
def test_a_search_ends_as_in_transformers(
    model: transformers.PreTrainedModel,
    early_stopping: EarlyStopping,
    length_penalty: float,
    shapes: tuple[tuple[int, int, list[int], int], ...],
) -> None:
    for width, n, stops, min_tokens in shapes:
        outputs, scores = generated(
            model, n, num_beams=width, length_penalty=length_penalty, early_stopping=EARLY_STOPPING[early_stopping],
            eos_token_id=stops or None, max_new_tokens=10, min_new_tokens=min_tokens,
        )  # fmt: skip
        options = BeamOptions(width, length_penalty, early_stopping)
        chosen = searched(model, options, Finish(frozenset(stops), min_tokens, 10, ()), n)
        assert [output.tokens.tolist() for output in chosen] == outputs
        assert [output.end.score for output in chosen] == pytest.approx(scores, rel=TOLERANCE)
        ended = [output.end.stop_token_id for output in chosen if output.end.reason is EndReason.STOP]
        assert ended == [tokens[-1] for tokens in outputs if tokens[-1] in stops]


def test_the_ways_to_end_differ(model: transformers.PreTrainedModel) -> None:
    """Or the comparison above would show nothing."""
    found = set()
    for length_penalty in (1.0, 2.5):
        for early_stopping in EARLY_STOPPING:
            options = BeamOptions(4, length_penalty, early_stopping)
            chosen = searched(model, options, Finish(frozenset({7, 9, 11}), 0, 10, ()), 4)
            found.add(tuple(tuple(output.tokens) for output in chosen))
    assert len(found) >= 3


def test_fewer_continuations_than_beams_are_as_many_beams() -> None:
    """A vocabulary of three tokens, of which one ends: the search is as wide as it can be."""
    search = BeamSearch(BeamOptions(4), 4, Finish(frozenset({0}), 0, 3, ()))
    report = TokenLogprobs(0.0, 1, [1, 2, 0], [-0.5, -1.0, -3.0])
    widths = []
    while not search.is_over:
        widths.append(len(search.running))
        search.advance({running.slot: report for running in search.running})
    assert widths == [1, 2, 4]
    outputs = [output.tokens.tolist() for output in search.choose(OutputEnd(0, EndReason.ERROR))]
    assert len(outputs) == 4 and outputs[0] == [1, 1, 1]


def test_outputs_that_no_search_found_end_by_the_rule_that_n_breaks() -> None:
    """A vocabulary of two tokens has two outputs of one token."""
    search = BeamSearch(BeamOptions(4), 3, Finish(frozenset(), 0, 1, ()))
    search.advance({0: TokenLogprobs(0.0, 1, [1, 2], [-0.5, -1.0])})
    assert search.is_over
    logs = [OutputLog(index, with_logprobs=False) for index in range(3)]
    publish(logs, search.choose(OutputEnd(0, EndReason.STOP)))
    assert [log.tokens.tolist() for log in logs] == [[1], [2], []]
    assert [log.end.reason for log in logs if log.end] == [EndReason.LENGTH, EndReason.LENGTH, EndReason.ERROR]
    end = logs[2].end
    assert end is not None and not end.error and end.broken is not None
    assert end.broken.field == "spec.n" and end.broken.description.startswith("must be at most 2: ")
