"""Instructions are counted per token, without what a process takes to start."""

from __future__ import annotations

import pytest
from benchmarks import telemetry_instructions

_OUTPUT = "tokens 10000\n==7== Cachegrind, a high-precision tracing profiler\n==7== I   refs:      1,320,765,049\n"


def test_what_valgrind_says_is_read() -> None:
    assert telemetry_instructions.counted(_OUTPUT) == (1_320_765_049, 10_000)


def test_a_token_takes_what_more_tokens_take_beyond_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_instructions.shutil, "which", lambda name: f"/usr/bin/{name}")

    def output(valgrind: str, way: str, mode: str, lags: str, num_turns: str) -> str:
        tokens = 2000 * int(num_turns)
        per_token = {"off": 100, "not recorded": 100, "on": 107, "recorded": 110}[mode]
        return f"tokens {tokens}\n==7== I refs: {1_000_000 + per_token * tokens:,}\n"

    monkeypatch.setattr(telemetry_instructions, "_output", output)
    found = telemetry_instructions.run()
    assert found["service, the writer waits"]["recorded - not recorded"] == 10
    assert found["engine, 64 rows"] == {"off": 100, "on": 107, "recorded": 110, "on - off": 7, "recorded - on": 3}


def test_without_valgrind_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_instructions.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="needs valgrind"):
        telemetry_instructions.run()


def test_the_ways_that_are_counted_do_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry_instructions.main("service", "recorded", "1", "1")
    assert capsys.readouterr().out == "tokens 2000\n"
    telemetry_instructions.main("engine", "on", "0", "1")
    assert int(capsys.readouterr().out.split()[1]) > 64
