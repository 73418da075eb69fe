"""The columns of a recording: entries keep step with messages, whatever is written when."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace_service.tracing.recording import Recording

Message = tuple[int, int]


@given(
    st.integers(1, 4).flatmap(
        lambda outputs: st.tuples(
            st.just(outputs), st.lists(st.lists(st.tuples(st.integers(0, outputs - 1), st.integers(0, 5)), max_size=4))
        )
    ),
    st.booleans(),
)
def test_what_was_written_is_told_per_output_and_nothing_else(
    case: tuple[int, list[list[Message]]], last_is_written: bool
) -> None:
    num_outputs, writes = case
    recording = Recording(num_outputs)
    count = [recording.counter_of(index) for index in range(num_outputs)]
    expected: dict[int, list[tuple[int, int, int]]] = {index: [] for index in range(num_outputs)}
    for number, messages in enumerate(writes, 1):
        for output, num_tokens in messages:
            if num_tokens:
                count[output](num_tokens)
            else:
                recording.skip(1)
        if number < len(writes) or last_is_written:
            recording.wrote_all(10 * number, 10 * number + 5)
            for output, num_tokens in messages:
                if num_tokens:
                    expected[output].append((num_tokens, 10 * number, 10 * number + 5))
    emissions = recording.emissions(num_outputs)
    if not any(expected.values()):
        assert emissions == []
        return
    for index, emission in enumerate(emissions):
        rows = zip(
            np.frombuffer(emission.counts, "<u4").tolist(),
            np.frombuffer(emission.made_at_ns, "<u8").tolist(),
            np.frombuffer(emission.written_at_ns, "<u8").tolist(),
            strict=True,
        )
        assert list(rows) == expected[index]
