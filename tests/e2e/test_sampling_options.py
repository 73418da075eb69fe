"""Options of sampling change a real server's answers as they say."""

from __future__ import annotations

from typing import Any

from tests.support.rpc import generate, greedy
from tests.support.running_server import RunningServer

STORY = "Once upon a time"
TOKENS = 12


def drawn(server: RunningServer, **sampling: Any) -> list[int]:
    """Tokens of one seeded output at a temperature that flattens the distribution."""
    spec = greedy(STORY, TOKENS)
    spec.sampling.temperature, spec.sampling.seed = 3.0, 7
    for name, value in sampling.items():
        setattr(spec.sampling, name, value)
    tokens: list[int] = generate(server.address, spec).tokens[0]
    return tokens


def test_top_n_sigma_keeps_what_is_near_the_highest_logit(server: RunningServer) -> None:
    free, most_likely = drawn(server), generate(server.address, greedy(STORY, TOKENS)).tokens[0]
    assert drawn(server, top_n_sigma=0.0) == free != most_likely
    assert drawn(server, top_n_sigma=1e-6) == most_likely
    near = drawn(server, top_n_sigma=1.0)
    assert near == drawn(server, top_n_sigma=1.0) and near != free
    # A hundred standard deviations are more than there are.
    assert drawn(server, top_n_sigma=100.0) == free
