"""What `headrace bench` sends and what it makes of the answers, without a server."""

from __future__ import annotations

import importlib.util
import pathlib
import statistics
from typing import Any

import pytest
from click.testing import CliRunner

from headrace_supervisor.bench import figures as benchmark
from headrace_supervisor.bench import report as bench_report
from headrace_supervisor.bench.command import bench, load_of
from headrace_supervisor.bench.load import Length, Load, Point, prompts
from headrace_supervisor.bench.sending import BenchError, PointRun, Sample

FLAGS: dict[str, Any] = {
    "server": "127.0.0.1:1",
    "model": "",
    "concurrency": None,
    "rate": None,
    "requests": None,
    "seconds": None,
    "prompt_tokens": 100,
    "output_tokens": 50,
    "prompt_spread": 0.0,
    "output_spread": 0.0,
    "warm_up": 0,
    "ttft_limit_ms": 500.0,
    "tpot_limit_ms": 50.0,
    "seed": 0,
}


def load(**flags: Any) -> Load:
    return load_of(FLAGS | flags)


def figures(samples: list[Sample], wall_s: float = 2.0) -> benchmark.PointFigures:
    return benchmark._figures(load(), PointRun(Point(concurrency=4), samples, wall_s, 0.1))


def result(*points: benchmark.PointFigures) -> benchmark.Result:
    return benchmark.Result("127.0.0.1:1", "demo", "demo@1", "cpu", load(), list(points))


def test_levels_are_points_and_64_requests_are_the_default() -> None:
    assert load().points == (Point(concurrency=8),) and load().requests == 64
    assert load(rate=(2.0, 5.0)).points == (Point(rate=2.0), Point(rate=5.0))
    assert load(seconds=3.0).requests == 0
    assert (load(seconds=3.0, requests=7).requests, load(seconds=3.0, requests=7).seconds) == (7, 3.0)


def test_prompts_have_the_lengths_asked_for_and_are_the_same_for_a_seed() -> None:
    made = list(prompts(load(requests=5), 0, 1000, 2048))
    assert [(len(p.token_ids), p.output_tokens, p.at_s) for p in made] == [(100, 50, 0.0)] * 5
    assert all(0 <= token < 1000 for p in made for token in p.token_ids)
    assert list(prompts(load(requests=5), 0, 1000, 2048)) == made
    assert list(prompts(load(requests=5, seed=1), 0, 1000, 2048)) != made
    # No request finds another's prefix.
    assert len({tuple(p.token_ids[:16]) for p in made}) == 5


def test_log_normal_lengths_have_their_median_and_fit_the_context() -> None:
    drawn = list(prompts(load(requests=600, prompt_spread=0.9, output_spread=0.7), 0, 1000, 400))
    assert statistics.median(len(p.token_ids) for p in drawn) == pytest.approx(100, rel=0.15)
    assert all(p.token_ids and p.output_tokens and len(p.token_ids) + p.output_tokens <= 400 for p in drawn)
    assert max(len(p.token_ids) for p in drawn) > 300
    assert Length(10, 0.5).tokens == 10


def test_arrivals_are_poisson_and_end_with_the_seconds() -> None:
    arrivals = [p.at_s for p in prompts(load(rate=(50.0,), seconds=20.0), 0, 1000, 2048)]
    assert arrivals == sorted(arrivals) and arrivals[-1] <= 20.0
    assert len(arrivals) == pytest.approx(1000, rel=0.1)
    gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    # Of an exponential the deviation is the mean.
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.15)


def test_figures_count_failed_requests_against_goodput_only() -> None:
    samples = [
        Sample(10, ttft_s=0.1, e2e_s=0.5, output_tokens=5, gaps_s=[0.1] * 4),
        Sample(10, ttft_s=0.1, e2e_s=0.18, output_tokens=5, gaps_s=[0.02] * 4, cached_tokens=3),
        Sample(10, ttft_s=0.6, e2e_s=0.6, output_tokens=1),
        Sample(10, error="Unavailable"),
    ]
    point = figures(samples)
    assert (point.completed, point.failed, point.errors) == (3, 1, {"Unavailable": 1})
    # The first is too slow per token, the third to its first token.
    assert point.goodput == pytest.approx(1 / 4)
    assert point.output_tok_s == pytest.approx(11 / 2) and point.input_tok_s == pytest.approx(15)
    assert point.cached_tokens == 3
    assert point.percentiles_ms["ttft"]["p50"] == pytest.approx(100)
    assert point.percentiles_ms["itl"]["p99"] == pytest.approx(100)
    assert point.percentiles_ms["tpot"]["p50"] == pytest.approx(20)


def test_a_run_in_which_everything_failed_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    broken = result(figures([Sample(1, error="Unavailable")]))
    bench_report.report(broken, as_json=False)
    assert "1 requests failed" in capsys.readouterr().out
    assert broken.failed == 1


def test_levels_are_rows_that_fit_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    slow = figures([Sample(10, ttft_s=1.234, e2e_s=3.5, output_tokens=9, gaps_s=[0.15] * 8)])
    bench_report.report(result(slow, slow), as_json=False)
    out = capsys.readouterr().out
    assert "1,234/1,234" in out and "…" not in out


def test_a_plot_is_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    point = figures([Sample(10, ttft_s=0.1, e2e_s=0.5, output_tokens=5, gaps_s=[0.1] * 4)])
    bench_report.plot(result(point, point), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    bench_report.plot(result(point, figures([Sample(1, error="Unavailable")])), tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_plots_that_cannot_be_drawn_are_refused_before_anything_is_sent(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match=r"must end in \.png, \.svg"):
        bench_report.check_plot(tmp_path / "curve.gif")
    with pytest.raises(BenchError, match="there is no folder"):
        bench_report.check_plot(tmp_path / "absent" / "curve.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install 'headrace-server\[bench\]'"):
        bench_report.check_plot(tmp_path / "curve.png")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--concurrency", "1,x"], "no list of numbers"),
        (["--concurrency", "0"], "above 0"),
        (["--rate", "nan"], "above 0"),
        (["--rate", "1", "--concurrency", "1"], "exclude each other"),
    ],
)
def test_wrong_levels_are_refused(arguments: list[str], reason: str) -> None:
    refused = CliRunner().invoke(bench, arguments)
    assert refused.exit_code == 2 and reason in refused.output
