"""What `benchmarks.simulate_quotas` shows of a quota that holds over two engines."""

from __future__ import annotations

import argparse

import pytest
from benchmarks import simulate_quotas


@pytest.mark.slow  # tests/engine/limits has the rules.
def test_a_noisy_key_within_its_streams_moves_another_keys_first_tokens_at_most_1_2_times() -> None:
    """Simulated, so a busy machine changes nothing; 60 s and three seeds give 1.00."""
    arguments = argparse.Namespace(
        quiet_rate=8.0,
        streams=8,
        tokens_per_minute=0,
        callers=32,
        rows=16,
        step_ms=20.0,
        seconds=25.0,
        seeds=1,
        arms="alone,streams",
    )
    alone, beside = simulate_quotas.simulate("fixed", arguments)
    assert beside["requests"] == alone["requests"] > 80, "the quiet key asks for the same"
    assert beside["refused"] > beside["noisy"] > 50, "the noisy one asks for more than it gets"
    assert beside["most_noisy"] == 8, "both engines together give all of its quota and no more"
    assert beside["p95_ratio"] <= 1.2
