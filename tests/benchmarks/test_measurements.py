"""Arrival times become the right figures.

The roofline's engine is a floor with the arithmetic that it states.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
from benchmarks.ceilings import Ceilings
from benchmarks.measurements import Request, itl_over_time, medians, summary
from benchmarks.results_table import lines, share_of_floor
from benchmarks.roofline import PerfectEngine, StepTime
from benchmarks.shapes import SHAPES, shape_of, write_model_folder
from benchmarks.token_log import TokenLog
from benchmarks.workloads import WORKLOADS, build

# The assumptions behind the published table of floors.
TABLE = Ceilings("cuda", "as in the table", 4.3e12, {2048: 7.9e14})
LLAMA_8B = StepTime(SHAPES["llama-3.1-8b"], TABLE, 2)


def test_the_floor_of_a_mixture_reads_what_its_tokens_hit(tmp_path: pathlib.Path) -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    assert shape_of(write_model_folder("qwen3-30b-a3b", tmp_path)) == dataclasses.replace(shape, rope_scaling=None)
    floor = StepTime(shape, TABLE, 2)
    head = 2 * 151_936 * 2048
    active = 2 * 48 * (2048 * 128 * 72 + 2048 * 128 + 8 * 3 * 2048 * 768)
    assert floor.seconds(1, 1, 0, 0.0) == pytest.approx((active + head) / 4.3e12)
    # 256 tokens miss next to nothing of 128 experts; of one of them logits are wanted.
    every = active + 2 * 48 * 120 * 3 * 2048 * 768
    assert floor.seconds(256, 1, 0, 0.0) == pytest.approx((every + head) / 4.3e12, rel=1e-3)


def test_layers_that_round_their_inputs_have_the_rate_of_8_bits_and_all_else_that_of_the_plain_types() -> None:
    table = Ceilings("cuda", "both rates", 4.3e12, {2048: 7.9e14}, {256: 1.1e15, 8192: 1.4e15})
    assert table.summary() == {
        "copy_tb_s": 4.3,
        "gemm_m2048_tflop_s": 790.0,
        "fp8_gemm_m256_tflop_s": 1100.0,
        "fp8_gemm_m8192_tflop_s": 1400.0,
    }
    floor = StepTime(SHAPES["llama-3.1-8b"], table, 2, bits_per_weight=8.0)
    plain, rounded = (
        dataclasses.replace(floor, rounds_inputs=rounds).seconds(8192, 1, 0, 1e7) for rounds in (False, True)
    )
    multiplied = 2 * floor.shape.multiplied_parameters * 8192
    assert plain - rounded == pytest.approx(multiplied / 7.9e14 - multiplied / 1.4e15)
    # Without a measured rate of 8 bits, and of few tokens, whose weights' bytes take longer.
    one, none = dataclasses.replace(floor, rounds_inputs=True), dataclasses.replace(floor, ceilings=TABLE)
    assert one.seconds(1, 1, 0, 0.0) == floor.seconds(1, 1, 0, 0.0)
    assert dataclasses.replace(none, rounds_inputs=True).seconds(8192, 1, 0, 1e7) == plain


def test_the_floor_of_gpt_oss_counts_windows_and_the_experts_own_bits(tmp_path: pathlib.Path) -> None:
    shape = SHAPES["gpt-oss-20b"]
    assert shape_of(write_model_folder("gpt-oss-20b", tmp_path)) == dataclasses.replace(shape, rope_scaling=None)
    floor = StepTime(shape, TABLE, 2, bits_per_weight=4.25)
    head, plain = 2 * 201_088 * 2880, 2 * 24 * 2880 * (64 * 144 + 32)
    active = 24 * 4 * 3 * 2880 * 2880 * 4.25 / 8
    assert floor.seconds(1, 1, 0, 0.0) == pytest.approx((plain + active + head) / 4.3e12)
    # Two rows of 5,000 tokens: half of the layers read 128 of each.
    cache = 2 * 2 * 8 * 64 * 12 * (10_000 + 256)
    with_cache = floor.seconds(2, 2, 10_000, 0.0) - floor.seconds(2, 2, 0, 0.0)
    assert with_cache == pytest.approx(cache / 4.3e12)


def column(*values: int) -> bytes:
    return np.asarray(values, "<u4").tobytes()


def short_column(*values: int) -> bytes:
    return np.asarray(values, "<u2").tobytes()


def test_tokens_are_dealt_to_their_requests_in_order() -> None:
    log = TokenLog()
    log.append(1.0, column(1, 2, 1), column(10, 20, 11), short_column(0, 0, 1))
    assert log.of(1)[0].tolist() == [10, 11]
    log.append(2.0, column(2, 1), column(21, 12), short_column(0, 0))
    tokens, times = log.of(1)
    assert (tokens.tolist(), times.tolist()) == ([10, 11, 12], [1.0, 1.0, 2.0])
    assert log.of(2)[0].tolist() == [20, 21]
    assert log.of(3)[0].size == 0
    assert [tokens.tolist() for tokens in log.outputs_of(1, 2)] == [[10, 12], [11]]


def test_figures_of_two_requests() -> None:
    requests = [
        Request(10.0, 5, np.asarray([10.1, 10.2, 10.4])),
        Request(10.5, 7, np.asarray([11.5])),
    ]
    figures = summary(requests, 10.0)
    assert figures["requests"] == 2
    assert figures["wall_s"] == pytest.approx(1.5)
    assert figures["output_tok_s"] == pytest.approx(4 / 1.5, abs=0.05)
    assert figures["input_tok_s"] == pytest.approx(12 / 1.5)
    assert figures["ttft_p95"] == pytest.approx(1000.0)
    assert figures["itl_p50"] == pytest.approx(200.0)
    assert figures["tpot_p50"] == pytest.approx(150.0)
    assert figures["e2e_p50"] == pytest.approx(1000.0)
    # The first has its first token in time but 150 ms a token, the second none in time.
    assert figures["goodput"] == 0.0
    assert [row[1] for row in itl_over_time(requests, 10.0, bins=2)] == [100.0, 200.0]


def test_single_tokens_have_no_inter_token_latency() -> None:
    figures = summary([Request(0.0, 1, np.asarray([0.1]))], 0.0)
    assert figures["itl_p50"] is None and figures["tpot_p50"] is None and figures["goodput"] == 1.0


def test_repeats_give_medians_and_their_spread() -> None:
    middle, spread = medians([{"a": 1, "b": 5}, {"a": 3, "b": 5}, {"a": 2, "b": 5}])
    assert (middle, spread) == ({"a": 2, "b": 5}, {"a": [1, 3]})


@pytest.mark.parametrize(("rows", "milliseconds"), [(1, 3.52), (8, 3.74), (32, 4.49), (128, 7.49), (256, 12.9)])
def test_step_times_are_those_of_the_published_table(rows: int, milliseconds: float) -> None:
    seconds = LLAMA_8B.seconds(rows, rows, 1024 * rows, 0.0)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_an_output_layer_of_fewer_bits_is_read_in_less_time_where_tokens_are_sampled() -> None:
    low = dataclasses.replace(LLAMA_8B, head_bits_per_weight=8.25)
    saved = 128_256 * 4096 * (2 - 8.25 / 8) / 4.3e12
    assert LLAMA_8B.seconds(1, 1, 0, 0.0) - low.seconds(1, 1, 0, 0.0) == pytest.approx(saved)
    assert LLAMA_8B.seconds(64, 0, 0, 0.0) == low.seconds(64, 0, 0, 0.0)


def test_the_time_of_a_prompt_is_that_of_the_published_table() -> None:
    assert LLAMA_8B.seconds(8192, 1, 0, 8192**2 / 2) * 1e3 == pytest.approx(167, rel=0.01)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_perfect_engine_gives_every_token_once_and_in_order(name: str) -> None:
    workload = build(name, requests=40)
    requests = PerfectEngine(LLAMA_8B, 16, 2048).serve(workload)
    if workload.users is None:
        assert [len(request.arrivals_s) for request in requests] == [output for _, output in workload.trace]
        assert [request.prompt_tokens for request in requests] == [len(prompt) for prompt, _ in workload.trace]
    assert all((np.diff(request.arrivals_s) > 0).all() and request.ttft_s > 0 for request in requests)
    # Nothing is faster than its own steps alone.
    fastest = LLAMA_8B.seconds(1, 1, 16, 0.0)
    assert all(gap >= fastest * 0.99 for request in requests for gap in np.diff(request.arrivals_s))


def test_users_of_the_perfect_engine_think_between_their_requests() -> None:
    workload = build("users1000", requests=30)
    assert workload.users is not None
    served = iter(PerfectEngine(LLAMA_8B, 256, 2048).serve(workload))
    for turns in workload.users.turns:
        now_s = 0.0
        for turn in turns:
            if now_s + turn.think_s > 300:
                break
            request = next(served)
            assert request.start_s == pytest.approx(now_s + turn.think_s)
            assert len(request.arrivals_s) == workload.trace[turn.index][1]
            now_s = float(request.arrivals_s[-1])
    assert next(served, None) is None


def test_single_requests_do_not_overlap() -> None:
    requests = PerfectEngine(LLAMA_8B, 256, 2048).serve(build("single"))
    starts = [request.start_s for request in requests]
    ends = [float(request.arrivals_s[-1]) for request in requests]
    assert starts[1:] == ends[:-1]


@pytest.mark.parametrize(("better", "share"), [(True, 0.5), (False, 2.0)])
def test_shares_of_the_floor_are_one_at_the_floor(better: bool, share: float) -> None:
    assert share_of_floor(1.0, 2.0, better) == share
    assert share_of_floor(None, 2.0, better) is None


def test_ranks_share_a_step_evenly() -> None:
    shared = dataclasses.replace(LLAMA_8B, ranks=4)
    assert shared.seconds(8, 8, 4000, 0.0) == pytest.approx(LLAMA_8B.seconds(8, 8, 4000, 0.0) / 4)


def test_requests_that_were_given_up_are_no_good_answers_and_are_said() -> None:
    requests = [Request(0.0, 8, np.array([0.1, 0.12])), Request(0.0, 8, np.array([3.0, 3.1]))]
    assert summary(requests, 0.0)["goodput"] == 0.5
    found = summary(requests, 0.0, unanswered=2)
    assert found["goodput"] == 0.25 and found["requests"] == 2
    shown = lines({**found, "name": "users1000", "floor": None, "unanswered": 2})
    assert "  2 more were given up unanswered: they are in no percentile" in shown
