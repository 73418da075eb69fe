"""`headrace bench` on the command line: flags into a load, the result out, exit codes.

Owns the flags. Measuring is in `figures`, tables and plots are in `report`.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import click

from headrace.cli.help import SectionedCommand
from headrace.cli.options import Connection, server_options
from headrace_supervisor.bench import figures as benchmark
from headrace_supervisor.bench import report as bench_report
from headrace_supervisor.bench.load import Length, Load, Point
from headrace_supervisor.bench.progress import BenchProgress
from headrace_supervisor.bench.sending import BenchError

# click keeps the lines of a paragraph that begins with \b.
_EXAMPLES = """\b
Examples:
  headrace bench --concurrency 1,8,64 --plot curve.png
  headrace bench --rate 2,5,10 --seconds 30 --prompt-spread 0.9
"""
_INTERRUPTED = 130
_DEFAULT_CONCURRENCY = (8,)
_DEFAULT_REQUESTS = 64
_TOKENS = click.IntRange(1, 1_000_000)
_SPREAD = click.FloatRange(0, 3)
_LIMIT_MS = click.FloatRange(0, 3_600_000, min_open=True)


def _levels(kind: type[int] | type[float], most: float) -> Callable[[str], tuple[float, ...]]:
    """The type of a flag that takes numbers above 0, none above `most`, with commas between."""

    def numbers(text: str) -> tuple[float, ...]:
        try:
            levels = tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r} is no list of numbers, as in 1,8,64") from None
        if not all(0 < level <= most for level in levels):
            raise click.BadParameter(f"every number must be above 0 and at most {most:,}, is {text}")
        return levels

    return numbers


@click.command(cls=SectionedCommand, context_settings={"help_option_names": ["--help", "-h"]}, epilog=_EXAMPLES)
@server_options
@click.option("--model", default="", help="name of the model; default: the server's")
@click.option("--concurrency", type=_levels(int, 4096), help="requests open at once; 1,8,64 gives a curve; default: 8")
@click.option(
    "--rate", type=_levels(float, 100_000), help="requests per second instead (Poisson arrivals); may be a list, too"
)
@click.option(
    "--requests", type=click.IntRange(1, 1_000_000), help="requests per level; default: 64, or what --seconds allows"
)
@click.option(
    "--seconds", type=click.FloatRange(0, 86_400, min_open=True), help="seconds per level in which requests are begun"
)
@click.option("--prompt-tokens", type=_TOKENS, default=128, show_default=True, help="tokens of each prompt")
@click.option("--output-tokens", type=_TOKENS, default=128, show_default=True, help="tokens of each answer")
@click.option(
    "--prompt-spread",
    type=_SPREAD,
    default=0.0,
    help="log-normal prompts with that median: standard deviation of the logarithm, as in 0.9",
)
@click.option("--output-spread", type=_SPREAD, default=0.0, help="the same for answers")
@click.option(
    "--warm-up", type=click.IntRange(0, 4096), default=8, show_default=True, help="requests first, not counted"
)
@click.option(
    "--ttft-limit-ms", type=_LIMIT_MS, default=500.0, show_default=True, help="goodput: most to the first token"
)
@click.option(
    "--tpot-limit-ms", type=_LIMIT_MS, default=50.0, show_default=True, help="goodput: most per further token, mean"
)
@click.option("--seed", type=int, default=0, show_default=True, help="seed of prompts, lengths and arrivals")
@click.option(
    "--plot", type=click.Path(path_type=pathlib.Path), help="draw the curve: .png, .svg or .pdf; needs the bench extra"
)
def bench(connection: Connection, plot: pathlib.Path | None, **flags: Any) -> None:
    """Measures a running server.

    How soon tokens come, how many a second, and how many answers come in time. Ctrl-C ends it and
    shows the levels that are measured.
    """
    if flags["concurrency"] and flags["rate"]:
        raise click.UsageError("--concurrency and --rate exclude each other: requests open at once, or per second")
    try:
        if plot is not None:
            bench_report.check_plot(plot)
        load = load_of(flags | {"server": connection.server})
        with BenchProgress() as progress:
            result = benchmark.run(load, connection.options, progress)
        if result.points or not result.missing:
            bench_report.report(result, as_json=connection.as_json)
        if plot is not None and result.points:
            bench_report.plot(result, plot)
    except BenchError as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("headrace: interrupted before the server had answered", err=True)
        sys.exit(_INTERRUPTED)
    if result.missing:
        click.echo(f"headrace: interrupted; not measured: {', '.join(result.missing)}", err=True)
        sys.exit(_INTERRUPTED)
    sys.exit(0 if not result.failed else 1)


def load_of(flags: dict[str, Any]) -> Load:
    """The load that the flags describe."""
    if flags["rate"]:
        points = tuple(Point(rate=level) for level in flags["rate"])
    else:
        points = tuple(Point(concurrency=level) for level in flags["concurrency"] or _DEFAULT_CONCURRENCY)
    return Load(
        server=flags["server"],
        model=flags["model"],
        points=points,
        prompt=Length(flags["prompt_tokens"], flags["prompt_spread"]),
        output=Length(flags["output_tokens"], flags["output_spread"]),
        requests=flags["requests"] or (0 if flags["seconds"] else _DEFAULT_REQUESTS),
        seconds=flags["seconds"] or 0.0,
        warm_up=flags["warm_up"],
        ttft_limit_ms=flags["ttft_limit_ms"],
        tpot_limit_ms=flags["tpot_limit_ms"],
        seed=flags["seed"],
    )
