"""The ladder's lower rungs compute the same answers: they differ in how, not in what."""

from __future__ import annotations

import random

import pytest
import torch
from benchmarks.plain_model import PlainModel
from benchmarks.plain_rungs import Rungs
from benchmarks.shapes import Shape
from benchmarks.workloads import Trace

TINY = Shape("LlamaForCausalLM", 32, 2, 4, 2, 8, 48, 64, 128, 10_000.0)


@pytest.fixture(scope="module")
def trace() -> Trace:
    rng = random.Random(1)
    return [([rng.randrange(64) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 12)) for _ in range(7)]


def test_every_rung_gives_the_answers_of_recomputing(trace: Trace) -> None:
    rungs = Rungs(PlainModel(TINY, torch.float32, torch.device("cpu")), rows=3, max_len=40)
    answers = rungs.recompute(trace)
    assert [len(answer) for answer in answers] == [output for _, output in trace]
    assert len({token for answer in answers for token in answer}) > 5
    for rung in (rungs.cached, rungs.static, rungs.in_flight):
        assert rung(trace) == answers
