"""A value that no message can carry is refused with the field and what it holds."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.spec import GenerationOptions, generation_spec


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": -1}, "spec.stop.max_tokens: must be a whole number of 0 to 4294967295 (given: -1)"),
        ({"max_tokens": 1.5}, "spec.stop.max_tokens: must be a whole number of 0 to 4294967295 (given: 1.5)"),
        ({"seed": 2**64}, "spec.sampling.seed: must be a whole number of 0 to 18446744073709551615 (given: 1844"),
        ({"temperature": "hot"}, "spec.sampling.temperature: must be a number (given: 'hot')"),
        ({"stop": 3}, "spec.stop.strings: must be several values, each text (given: 3)"),
        ({"stop_token_ids": [-1]}, "spec.stop.token_ids: must be several values, each a whole number of 0 to"),
        (
            {"logit_bias": {"a": 1}},
            "spec.sampling.logit_bias: must be a mapping from a whole number of 0 to 4294967295",
        ),
    ],
)
def test_an_options_value_is_refused_with_what_the_field_holds(options: GenerationOptions, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generation_spec(options, "hello")
    assert said in str(refused.value)


@pytest.mark.parametrize("prompt", [3, [], [1, 2], ["a"]])
def test_a_prompt_is_text(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="spec.text: must be text"):
        generation_spec({}, prompt)
