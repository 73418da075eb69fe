"""A request crosses as it is, and bytes that are none are refused."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import generation_pb2
from headrace_request import request as request_module
from headrace_request.beam_search import BeamSearch
from headrace_request.reasoning import Reasoning
from headrace_request.request import LAYOUT, Request
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop
from headrace_request.structured_output import StructuredOutput

COLUMN = st.binary(max_size=40)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(allow_nan=False),
    top_k=st.integers(-(2**31), 2**31 - 1),
    seed=st.integers(0, 2**64 - 1),
    logit_bias_ids=COLUMN,
    bad_words=st.lists(COLUMN, max_size=3).map(tuple),
)
STOPS = st.builds(Stop, max_tokens=st.integers(0, 2**32), strings=st.lists(COLUMN, max_size=3).map(tuple))
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple)
REASONINGS = st.builds(Reasoning, IDS, IDS, st.none() | st.integers(0, 2**32), st.booleans(), IDS, st.booleans())
REQUESTS = st.builds(
    Request,
    prompt_token_ids=COLUMN,
    stop=STOPS,
    sampling=SAMPLINGS,
    cache_salt=COLUMN,
    reasoning=st.none() | REASONINGS,
)


@given(REQUESTS)
def test_a_request_crosses_as_it_is(request: Request) -> None:
    assert Request.decode(request.encode()) == request


@given(st.binary(max_size=200))
def test_bytes_that_are_no_request_are_a_value_error(data: bytes) -> None:
    try:
        decoded = Request.decode(data)
    except ValueError as error:
        assert type(error) is ValueError and str(error)
    else:
        assert isinstance(decoded, Request)


@given(REQUESTS, st.data())
def test_a_request_cut_off_anywhere_is_a_value_error(request: Request, data: st.DataObject) -> None:
    encoded = request.encode()
    length = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(ValueError, match="truncated|malformed|Expected"):
        Request.decode(encoded[:length])


def test_a_number_that_is_not_finite_crosses_so_that_its_rule_refuses_it() -> None:
    crossed = Request.decode(Request(b"", Stop(1), Sampling(temperature=math.nan)).encode())
    assert math.isnan(crossed.sampling.temperature)


@pytest.mark.parametrize("struct", [Request, Stop, Sampling, StructuredOutput, BeamSearch, Reasoning])
def test_every_field_counts_for_the_layout(struct: type[msgspec.Struct]) -> None:
    layout = request_module._layout
    parts = [Request, Stop, Sampling, StructuredOutput, BeamSearch, Reasoning]
    assert layout(*parts) == LAYOUT
    fields = list(struct.__annotations__.items())
    for changed in (fields[:-1], [*fields, ("more", "int")], fields[::-1], [(fields[0][0], "str"), *fields[1:]]):
        other = type(struct.__name__, (), {"__annotations__": dict(changed)})
        assert layout(*(other if part is struct else part for part in parts)) != LAYOUT


def test_each_public_sampling_field_is_a_field_of_the_struct() -> None:
    public = {field.name for field in generation_pb2.SamplingParameters.DESCRIPTOR.fields}
    unlike = {"logit_bias_ids", "logit_bias_values", "bad_words"}
    assert public - {"logit_bias"} == set(Sampling.__struct_fields__) - unlike
