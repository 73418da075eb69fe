"""The benchmarks run as a person runs them, on the demo shape and a CPU.

They end, and their JSON says what results must say.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from benchmarks import figures
from tests.support.warm_python import WarmPython

# What every engine's result states, in this order; more may follow.
FIELDS = (
    "name gpu gpus shape dtype quant kv_dtype seed git date command requests wall_s output_tok_s input_tok_s ttft_p50"
    " ttft_p95 itl_p50 itl_p99 tpot_p50 e2e_p50 e2e_p95 e2e_p99 goodput peak_memory_gib startup_s load_gb_s floor"
    " ceilings"
).split()
# 64 blocks hold one sequence of the demo's 2,048 tokens.
QUICK = ("--threads", "1", "--device", "cpu", "--git", "abc1234", "--set", "num_blocks=512", "--repeats", "1")


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(
        command, cwd=figures.ROOT, env=figures.environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def engine_results(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("bench") / "engine.json"
    run(
        "bench_engine",
        "--load",
        "folder",
        "--quant-head",
        "int8",
        "--workloads",
        "single,longprompt_poisson15",
        "--requests",
        "1",
        "--json",
        str(path),
        *QUICK,
    )
    return path


# The same command ends by a signal in test_ending.
@pytest.mark.slow
def test_engine_results_have_the_stated_fields(engine_results: pathlib.Path) -> None:
    results: list[dict[str, Any]] = json.loads(engine_results.read_text())
    assert [result["name"] for result in results] == ["single", "longprompt_poisson15"]
    for result in results:
        assert list(result)[: len(FIELDS)] == FIELDS
        assert (result["git"], result["gpus"], result["shape"], result["dtype"]) == ("abc1234", 0, "demo", "fp32")
        assert (result["quant"], result["quant_head"], result["engine"]["quantize_head"]) == ("", "int8", "int8")
        assert result["cached_tokens"] == 0 and result["cut"] and result["warm"]
        assert 0 < result["itl_p50"] <= result["itl_p99"] <= result["e2e_p99"]
        assert result["floor"]["output_tok_s"] > 0 and result["ceilings"]["copy_tb_s"] > 0
        assert result["load_gb_s"] > 0 and result["startup_s"] > 0 and result["peak_memory_gib"] > 0
        # Nothing of the machine it ran on.
        assert "/tmp" not in json.dumps(result["engine"])
    assert results[1]["apart"]["requests"] == 1 and results[1]["requests"] == 1


@pytest.mark.slow
def test_exposed_communication_is_what_a_step_takes_beyond_a_silent_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "communication.json"
    run(
        "bench_communication",
        "--device",
        "cpu",
        "--shape",
        "demo",
        "--ranks",
        "2",
        "--steps",
        "1x32,chunk300",
        "--cut-mib",
        "0.001",
        "--quant",
        "int8",
        "--json",
        str(path),
    )
    found = json.loads(path.read_text())
    assert (found["name"], found["ranks"], found["shape"], found["quant"]) == ("communication", 2, "demo", "int8")
    assert found["cut_mib"] == 0.001
    assert [case["step"] for case in found["cases"]] == ["1x32", "chunk300"]
    for case in found["cases"]:
        assert case["silent_us"] > 0
        assert case["exposed_us"] == pytest.approx(case["step_us"] - case["silent_us"], abs=0.2)


# What both ways draw is compared in tests/parallel/test_dealt_rows.
@pytest.mark.slow
def test_draws_of_ranks_are_timed_both_ways(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "draws.json"
    about = ("--device", "cpu", "--ranks", "2", "--rows", "5,8", "--vocab-size", "512")
    run("bench_dealt_draws", *about, "--json", str(path))
    found = json.loads(path.read_text())
    assert (found["name"], found["ranks"], found["vocab_size"]) == ("dealt_draws", 2, 512)
    cases = [(case["kind"], case["rows"], case["way"]) for case in found["cases"]]
    assert cases == [
        (kind, rows, way) for kind in ("greedy", "random", "top_p") for rows in (5, 8) for way in ("whole", "dealt")
    ]
    assert all(0 < case["host_us"] <= case["us"] for case in found["cases"])


# Users are sent in test_ending and test_workloads.
@pytest.mark.slow
def test_users_come_as_they_are_answered(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "users.json"
    front = ("--services", "1", "--clients", "2", "--requests", "3", "--seconds", "2", "--json", str(path))
    run("bench_serving", "--workloads", "users1000", *front, *QUICK)
    (users,) = json.loads(path.read_text())
    assert list(users)[: len(FIELDS)] == FIELDS
    assert (users["users"], users["seconds"], users["cut"], users["loss"]) == (3, 2.0, True, None)
    assert users["repeats"] == 1 and users["cached_tokens"] == 0
    # Nearly seven times what they think is time for many; how many, the machine decides.
    assert users["requests"] >= 1 and users["floor"]["requests"] >= 3
    assert 0 < users["ttft_p50"] <= users["e2e_p50"] <= users["e2e_p95"] and users["floor"]["e2e_p95"] > 0
    assert 0 < users["engine_api"]["e2e_p95"] and users["engine_api"]["requests"] >= 1


@pytest.mark.slow
def test_results_are_drawn(engine_results: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    printed = run("plots", str(engine_results))
    drawn = [pathlib.Path(line) for line in printed.split()]
    assert [path.name for path in drawn] == ["engine-latency.svg", "engine-itl.svg"]
    assert all("<svg" in path.read_text() for path in drawn)


@pytest.mark.slow
def test_text_through_grpc_is_measured_beside_the_engine(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "serving.json"
    front = ("--services", "2", "--clients", "2", "--requests", "2", "--json", str(path))
    run("bench_serving", "--workloads", "burst256,poisson15", *front, *QUICK)
    burst, poisson = json.loads(path.read_text())
    assert list(burst)[: len(FIELDS)] == FIELDS
    assert burst["engine_api"]["requests"] == burst["requests"] == 2
    assert burst["loss"] == pytest.approx(1 - burst["output_tok_s"] / burst["engine_api"]["output_tok_s"], abs=1e-4)
    assert poisson["loss"] is None and (poisson["services"], poisson["clients"]) == (2, 2)
    assert burst["service_us_per_token"] > 0


@pytest.mark.slow
def test_telemetry_is_measured_beside_none(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "serving.json"
    options = ("--telemetry", "off,span", "--clients", "2", "--requests", "2", "--json", str(path))
    printed = run("bench_serving", "--workloads", "burst256", *options, *QUICK)
    (burst,) = json.loads(path.read_text())
    assert list(burst)[: len(FIELDS)] == FIELDS
    tokens = 2 * 256
    # One for every token, and those of requests and steps.
    assert burst["spans_collected"] > tokens and set(burst["turns"]) == {"off", "span"}
    change = burst["telemetry"]["span"]["beyond_off"]["output_tok_s"]
    assert change["median"] == pytest.approx(
        burst["turns"]["span"][0]["output_tok_s"] / burst["turns"]["off"][0]["output_tok_s"] - 1, abs=1e-4
    )
    assert "span  output_tok_s" in printed


@pytest.mark.slow
def test_the_ladder_has_its_rungs(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ladder.json"
    run("bench_ladder", "--requests", "3", "--rows", "2", "--json", str(path), *QUICK)
    record = json.loads(path.read_text())
    names = ["recompute", "kv_cache", "static", "in_flight", "paged", "full", "speculation"]
    assert [rung["rung"] for rung in record["rungs"]] == names
    assert all(0 < rung["mfu"] < 1 for rung in record["rungs"][:-1])
    assert [each["context"] for each in record["contexts"]] == [512]
    assert record["kv_waste"]["waste_paged"] < record["kv_waste"]["waste_contiguous_prompt_and_max_tokens"]


@pytest.mark.slow
def test_envoys_ways_are_compared(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "envoy.json"
    run("bench_envoy", "--first", "5", "--streams", "4", "--seconds", "1", "--rounds", "1", "--json", str(path))
    record = json.loads(path.read_text())
    ways = {"direct", "proxy", "picked", "duplex"}
    assert set(record["first_token"]["ms"]) == set(record["rates"]["tokens_per_s"]) == ways
    assert all(tokens > 0 for tokens in record["rates"]["tokens_per_s"].values())
    assert set(record["rates"]["lost_share"]) == ways - {"direct"}


def test_mistakes_are_refused_in_a_line() -> None:
    warm = WarmPython([f"benchmarks.bench_{name}" for name in ("engine", "ladder", "serving")], figures.environment())
    for name, arguments, reason in (
        ("bench_engine", ["--workloads", "burst257"], "no workload 'burst257'"),
        ("bench_engine", ["--set", "block_size=17"], "block_size"),
        ("bench_engine", ["--rows", "0.5"], "--rows"),
        ("bench_engine", ["--quant-head", "int4"], "--quant-head"),
        ("bench_ladder", ["--low-bits", "int5"], "--low-bits: 'int5' is none of int8"),
        ("bench_ladder", ["--acceptance", "1"], "--acceptance is a probability from 0 to below 1, is 1"),
        ("bench_ladder", ["--quant-head", "int8"], "the ladder takes schemes as --low-bits"),
        ("bench_serving", ["--telemetry", "array,span"], "--telemetry: off and some of array, span"),
        ("bench_serving", ["--telemetry", "off,span", "--workloads", "users1000"], "--telemetry: turns must be alike"),
        ("bench_engine", ["--seconds", "301"], "--seconds must be above 0 and at most 300, is 301"),
    ):
        (refused,) = warm.run([(f"benchmarks.{name}", ["--device", "cpu", *arguments])])
        assert refused.returncode != 0 and reason in refused.stderr and "Traceback" not in refused.stderr
