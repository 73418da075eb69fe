"""`headrace bench`: load on a running server, and what its callers would feel.

Owns the figures: rates, percentiles and goodput of each level of load. What is sent is in
`load`, the sending in `sending`, tables and plots in `report`.
"""

from __future__ import annotations

import dataclasses

from headrace.connections.connection import ConnectionOptions
from headrace_supervisor.bench import sending as bench_sending
from headrace_supervisor.bench.load import Load
from headrace_supervisor.bench.progress import BenchProgress
from headrace_supervisor.bench.sending import PointRun, Sample

PERCENTILES = (50, 95, 99)


@dataclasses.dataclass(frozen=True, slots=True)
class PointFigures:
    """One level of load: rates in tokens per second, percentiles in milliseconds."""

    # Closed loop: requests open at once; 0 in an open loop.
    concurrency: int
    # Open loop: requests per second; 0 in a closed loop.
    rate: float
    wall_s: float
    completed: int
    failed: int
    errors: dict[str, int]
    requests_per_s: float
    output_tok_s: float
    input_tok_s: float
    cached_tokens: int
    # Share of all requests, failed ones included, that met both limits.
    goodput: float
    client_busy: float
    # "ttft", "itl", "tpot", "e2e" -> "p50", "p95", "p99".
    percentiles_ms: dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What was measured."""

    server: str
    model: str
    revision: str
    device: str
    load: Load
    points: list[PointFigures]
    # Names of levels that were not measured, because it was interrupted.
    missing: list[str] = dataclasses.field(default_factory=list)

    @property
    def failed(self) -> int:
        """Requests that failed, of all points."""
        return sum(point.failed for point in self.points)


def run(load: Load, connection: ConnectionOptions, progress: BenchProgress) -> Result:
    """Sends the load and measures, until all is measured or it is interrupted (Ctrl-C).

    `connection` holds key and TLS, which no result shows. Raises BenchError if the server can't be
    reached or its model can't take the lengths, KeyboardInterrupt if it was interrupted before the
    server had answered.
    """
    points: list[PointFigures] = []

    def on_point(run: PointRun) -> None:
        points.append(_figures(load, run))
        progress.level_done(run.point, _words(points[-1]))

    sent = bench_sending.run(load, connection, progress, on_point)
    missing = [point.label for point in load.points[len(points) :]]
    return Result(load.server, sent.model.name, sent.model.revision, sent.model.device, load, points, missing)


def _words(point: PointFigures) -> str:
    """What came out of a level, in a few words."""
    ttft = point.percentiles_ms.get("ttft")
    return f"{point.output_tok_s:,.0f} tok/s" + (f", TTFT {ttft['p50']:,.1f} ms" if ttft else "")


def _figures(load: Load, run: PointRun) -> PointFigures:
    good = [sample for sample in run.samples if not sample.error]
    errors = [sample.error for sample in run.samples if sample.error]
    columns = {
        "ttft": [sample.ttft_s for sample in good],
        "itl": [gap for sample in good for gap in sample.gaps_s],
        "tpot": [tpot for sample in good if (tpot := sample.tpot_s) is not None],
        "e2e": [sample.e2e_s for sample in good],
    }
    return PointFigures(
        concurrency=run.point.concurrency,
        rate=run.point.rate,
        wall_s=run.wall_s,
        completed=len(good),
        failed=len(errors),
        errors={name: errors.count(name) for name in sorted(set(errors))},
        requests_per_s=len(good) / run.wall_s,
        output_tok_s=sum(sample.output_tokens for sample in good) / run.wall_s,
        input_tok_s=sum(sample.prompt_tokens for sample in good) / run.wall_s,
        cached_tokens=sum(sample.cached_tokens for sample in good),
        goodput=sum(within_limits(load, sample) for sample in good) / max(1, len(run.samples)),
        client_busy=run.client_busy,
        percentiles_ms={name: percentiles_ms(values) for name, values in columns.items() if values},
    )


def within_limits(load: Load, sample: Sample) -> bool:
    """Whether an answer came as fast as the load's limits ask."""
    tpot_s = sample.tpot_s
    return sample.ttft_s * 1e3 <= load.ttft_limit_ms and (tpot_s is None or tpot_s * 1e3 <= load.tpot_limit_ms)


def percentiles_ms(values_s: list[float]) -> dict[str, float]:
    """p50, p95 and p99 (nearest rank) of times in seconds, in milliseconds."""
    ordered = sorted(values_s)
    return {f"p{percent}": 1e3 * ordered[max(0, -(-percent * len(ordered) // 100) - 1)] for percent in PERCENTILES}
