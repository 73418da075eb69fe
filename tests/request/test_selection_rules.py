"""What outputs that are chosen at the end can be combined with, and what is computed for them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_request import limits, rules
from headrace_request.beam_search import BeamSearch
from headrace_request.reasoning import Reasoning
from headrace_request.request import Request
from headrace_request.rule_kinds import Bounds
from headrace_request.sampling import Sampling
from headrace_request.selection_rules import NO_SAMPLING
from headrace_request.stop import Stop

BOUNDS = Bounds(vocabulary_size=1000, max_context_tokens=512, max_outputs=64)


def asked(num_stops: int = 1, sampling: Sampling = NO_SAMPLING, **fields: object) -> Request:
    stop = Stop(8, token_ids=b"".join(token.to_bytes(4, "little") for token in range(num_stops)))
    return Request(b"\1\0\0\0", stop, sampling, **fields)  # type: ignore[arg-type]  # fields of the struct


def broken(request: Request) -> list[str]:
    return [violation.field for violation in rules.check(request, BOUNDS)]


def test_a_search_takes_markers_of_reasoning_and_no_budget() -> None:
    reasoning = Reasoning((5,), (6,))
    assert broken(asked(beam_search=BeamSearch(2), reasoning=reasoning)) == []
    budget = msgspec.structs.replace(reasoning, max_tokens=3)
    assert broken(asked(beam_search=BeamSearch(2), reasoning=budget)) == ["spec.max_reasoning_tokens"]


def test_a_plain_search_breaks_no_rule() -> None:
    for width in (1, limits.MAX_BEAM_WIDTH):
        assert broken(asked(beam_search=BeamSearch(width), n=width)) == []
    assert broken(asked(sampling=Sampling(), best_of=limits.MAX_BEST_OF, n=limits.MAX_BEST_OF)) == []


@given(name=st.sampled_from(Sampling.__struct_fields__))
def test_every_field_of_sampling_is_refused_beside_a_search(name: str) -> None:
    """Whoever adds one decides here what it means in a search."""
    values = {"logit_bias_ids": b"\1\0\0\0", "logit_bias_values": b"\0\0\0\0", "bad_words": (b"\1\0\0\0",)}
    sampling = msgspec.structs.replace(NO_SAMPLING, **{name: values.get(name, 1 if name in ("seed", "top_k") else 0.5)})
    if name.startswith("logit_bias"):
        sampling = msgspec.structs.replace(sampling, logit_bias_ids=b"\1\0\0\0", logit_bias_values=b"\0\0\0\0")
    (field,) = broken(asked(sampling=sampling, beam_search=BeamSearch(2)))
    assert field.rpartition(".")[2] in name


@pytest.mark.parametrize("max_outputs", [3, 64])
def test_a_search_is_no_wider_than_the_batch(max_outputs: int) -> None:
    bounds = BOUNDS._replace(max_outputs=max_outputs)
    most = min(max_outputs, limits.MAX_BEAM_WIDTH)
    assert not rules.check(asked(beam_search=BeamSearch(most)), bounds)
    (violation,) = rules.check(asked(beam_search=BeamSearch(most + 1)), bounds)
    assert violation == ("spec.beam_search.width", f"must be at least 1 and at most {most}")


def test_a_row_reports_as_many_tokens_as_a_search_can_need() -> None:
    """Rings have room for those that go on and those that may end."""
    stops = limits.MAX_BEAM_STOP_TOKENS
    widest = asked(stops, beam_search=BeamSearch(limits.MAX_BEAM_WIDTH))
    assert broken(widest) == [] and widest.num_row_logprobs == limits.MAX_ROW_LOGPROBS
    assert broken(asked(stops + 1, beam_search=BeamSearch(2))) == ["spec.stop.token_ids"]
    assert asked(beam_search=BeamSearch(2), num_logprobs=20).num_row_logprobs == 20
    assert (asked(best_of=2).num_row_logprobs, asked(best_of=1).num_row_logprobs) == (0, -1)


def test_what_is_computed_is_what_is_counted() -> None:
    assert asked(beam_search=BeamSearch(5), n=2).num_sequences == 5
    assert asked(best_of=4, n=2).num_sequences == 4 and asked(n=3).num_sequences == 3
    assert not asked(best_of=3, n=3).selects and asked(best_of=4, n=3).selects
