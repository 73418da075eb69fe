"""Every field is checked, by its name in the public API, and the engine goes on after a refusal."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
import pytest
from tests.engine.fake_worker import VOCAB_SIZE, expected_tokens
from tests.engine.harness import EOS, Harness, request

from headrace_backend.engine.errors import RefusalCode, RequestRefused
from headrace_backend.engine.events import EndReason, OutputEnd

MODEL_LEN = 64


def ids(*values: int) -> bytes:
    return array("I", values).tobytes()


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


BAD: list[tuple[str, dict[str, Any]]] = [
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": "a" * 65}),
    ("request_id", {"request_id": "a/b"}),
    ("request_id", {"request_id": "a\n"}),
    ("tenant", {"tenant": "t" * 257}),
    ("idempotency_key", {"idempotency_key": "k" * 257}),
    ("spec.cache_salt", {"cache_salt": bytes(257)}),
    ("service_ns", {"service_ns": -1}),
    ("spec.token_ids", {"prompt": []}),
    ("spec.token_ids", {"prompt": [1, -1]}),
    ("spec.token_ids", {"prompt": [VOCAB_SIZE]}),
    ("spec.token_ids", {"prompt": [2**31 - 1]}),
    ("spec.token_ids", {"prompt": [1] * MODEL_LEN}),
    ("spec.token_ids", {"prompt_token_ids": b"12345"}),
    ("spec.token_ids", {"prompt_token_ids": b"123"}),
    ("spec.n", {"n": 0}),
    ("spec.n", {"n": -1}),
    ("spec.n", {"n": 5}),
    ("spec.n", {"n": 10**9}),
    ("spec.logprobs", {"num_logprobs": 21}),
    ("spec.logprobs", {"num_logprobs": -2}),
    ("spec.prompt_logprobs", {"num_prompt_logprobs": 21}),
    ("spec.prompt_logprobs", {"num_prompt_logprobs": -2}),
    ("spec.priority", {"priority": 101}),
    ("spec.priority", {"priority": -101}),
    *[("spec.sampling.temperature", {"temperature": t}) for t in (-1.0, math.nan, math.inf, -math.inf, 1e-40, 101.0)],
    *[("spec.sampling.top_p", {"top_p": p}) for p in (0.0, 1.1, -0.1, math.nan)],
    *[("spec.sampling.top_k", {"top_k": k}) for k in (-2, VOCAB_SIZE + 1, 2**31)],
    *[("spec.sampling.min_p", {"min_p": p}) for p in (2.0, -0.1, math.nan)],
    *[("spec.sampling.repetition_penalty", {"repetition_penalty": p}) for p in (0.0, -1.0, 10.1, math.nan, math.inf)],
    *[("spec.sampling.presence_penalty", {"presence_penalty": p}) for p in (2.1, -2.1, math.nan, 1e39)],
    *[("spec.sampling.frequency_penalty", {"frequency_penalty": p}) for p in (2.1, -2.1, math.nan, math.inf)],
    *[("spec.sampling.seed", {"seed": s}) for s in (-1, 2**64)],
    ("spec.sampling.logit_bias", {"logit_bias_ids": ids(1)}),
    ("spec.sampling.logit_bias", {"logit_bias_ids": b"abc", "logit_bias_values": b"abc"}),
    ("spec.sampling.logit_bias", {"logit_bias_ids": ids(VOCAB_SIZE), "logit_bias_values": floats(1)}),
    ("spec.sampling.logit_bias", {"logit_bias_ids": ids(1, 1), "logit_bias_values": floats(1, 1)}),
    ("spec.sampling.logit_bias", {"logit_bias_ids": ids(*[1] * 1025), "logit_bias_values": floats(*[1] * 1025)}),
    *[
        ("spec.sampling.logit_bias", {"logit_bias_ids": ids(1), "logit_bias_values": floats(v)})
        for v in (100.5, math.nan, -math.inf)
    ],
    ("spec.stop.bad_words", {"bad_words": ((),)}),
    ("spec.stop.bad_words", {"bad_words": ((VOCAB_SIZE,),)}),
    ("spec.stop.bad_words", {"bad_words": ((-1,),)}),
    ("spec.stop.bad_words", {"bad_words": ((1,),) * 129}),
    ("spec.stop.bad_words", {"bad_words": ((1,) * 263,)}),
    *[("spec.stop.max_tokens", {"max_tokens": m}) for m in (0, -1, MODEL_LEN, 2**31)],
    ("spec.stop.min_tokens", {"min_tokens": -1}),
    ("spec.stop.min_tokens", {"min_tokens": 9}),
    ("spec.stop.strings", {"strings": (b"",)}),
    ("spec.stop.strings", {"strings": (b"a",) * 17}),
    ("spec.stop.strings", {"strings": (b"a" * 257,)}),
    ("spec.stop.strings", {"strings": (b"a" * (1 << 20),)}),
    ("spec.stop.token_ids", {"token_ids": frozenset([VOCAB_SIZE])}),
    ("spec.stop.token_ids", {"token_ids": frozenset([-1])}),
    ("emitted", {"emitted": (np.array([1], np.int32),) * 2}),
    ("emitted", {"emitted": (np.array([1] * 8, np.int32),)}),
    ("emitted", {"emitted": (np.array([VOCAB_SIZE], np.int32),)}),
    ("emitted", {"emitted": (np.array([1] * 8, np.int32),), "ends": (OutputEnd(0, EndReason.LENGTH),)}),
    ("emitted", {"emitted": (np.array([1], np.int32),), "num_prompt_logprobs": 0}),
]


@pytest.mark.parametrize(("field", "changes"), BAD)
def test_bad_field_is_refused_by_its_name(field: str, changes: dict[str, Any]) -> None:
    harness = Harness(model_len=MODEL_LEN, max_outputs=4)
    spec = request(**{"prompt": [1, 2, 3], "max_tokens": 8, **changes})
    with pytest.raises(RequestRefused) as refusal:
        harness.engine.add(spec, harness.subscriber())
    assert refusal.value.code is RefusalCode.INVALID_ARGUMENT
    assert {violation.field.split("[")[0] for violation in refusal.value.violations} == {field}
    assert len(refusal.value.message) < 300
    assert not harness.engine.has_work
    good = request(5)
    reader = harness.add(good)
    harness.run()
    assert reader.tokens[0] == expected_tokens(good, 0)


def test_every_broken_rule_is_named() -> None:
    with pytest.raises(RequestRefused) as refusal:
        Harness().add(request([], top_p=0.0, min_p=2.0))
    fields = [violation.field for violation in refusal.value.violations]
    assert fields == ["spec.token_ids", "spec.sampling.top_p", "spec.sampling.min_p"]


def test_limits_themselves_are_accepted() -> None:
    harness = Harness(model_len=MODEL_LEN)
    reader = harness.add(
        request(
            10,
            max_tokens=MODEL_LEN - 10,
            request_id="A-z_9" + "x" * 59,
            temperature=float(np.float32(0.01)),
            top_p=1.0,
            top_k=VOCAB_SIZE,
            min_p=1.0,
            repetition_penalty=10.0,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            seed=2**64 - 1,
            logit_bias_ids=ids(VOCAB_SIZE - 1, 0),
            logit_bias_values=floats(100.0, -100.0),
            bad_words=((1, 2),),
            min_tokens=0,
            strings=(b"#" * 256,),
            token_ids=frozenset([EOS, VOCAB_SIZE - 1]),
            priority=-100,
            num_logprobs=20,
            num_prompt_logprobs=20,
            n=8,
        )
    )
    harness.run()
    assert len(reader.ends) == 8


def test_stop_strings_need_the_bytes_of_tokens() -> None:
    harness = Harness()
    harness.engine._intake._validator._has_text = False
    with pytest.raises(RequestRefused, match=r"spec\.stop\.strings"):
        harness.add(request(10, strings=(b"a",)))


def test_request_nobody_reads_must_be_detached() -> None:
    harness = Harness()
    with pytest.raises(RequestRefused, match="detached"):
        harness.engine.add(request(10), None)
    harness.engine.add(request(10, detached=True), None)
    harness.run()
