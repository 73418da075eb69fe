"""The front end beside a bare grpc.aio server.

It measures messages and tokens per second and core, CPU per token by stage, latency added, and
scaling over processes.

Every party has cores of its own: a fake backend (or the bare server), the services, several client
processes. On a machine with other work the wall clock tells little; the CPU time that the services
themselves took per token says what whole cores would carry. Runs of one invocation:

- `single`: one token a message at a set rate, by Generate, by KServe, by OpenAI's HTTP API, and by
  a bare server of the same message size at the same rate and as fast as it can;
- `first`: how long a first token takes from the request on, by Generate and by OpenAI's HTTP API;
- `full`: as much as one core takes, by Generate, by KServe and by OpenAI's HTTP API;
- `session`: many generations through a few sessions at a set rate, with ids and with text; the rate
  per core follows from the CPU time;
- `latency`: gaps between messages of a stream beyond the period of the backend's steps;
- `scaling`: Generate over 1, 2, 4 services, where the machine has the cores;
- `stages`: CPU per token of each stage, without gRPC.

    python -m benchmarks.bench_front --json benchmarks/results/front.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

from benchmarks import figures, front_first, front_parties, front_stages
from benchmarks.front_client import WARM_UP_S
from headrace_model_folder import ModelFolder
from headrace_service.api import event_wire

_WAYS = ("generate", "kserve", "openai", "session-ids", "session-text")
_RUNS = ("single", "first", "full", "session", "latency", "scaling", "stages")
# Steps a second of the backend in the latency runs, by number of streams: what one core can carry
# one by one, with room.
_LATENCY_RATES = {64: 100.0, 256: 40.0, 1024: 8.0}
_SESSION_RATES = {64: 400.0, 256: 200.0, 1024: 150.0}
_MAX_SERVICES = 4


class _Bench:
    """One invocation: its options and cores."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cores = sorted(os.sched_getaffinity(0))
        if len(self.cores) < 2:
            raise SystemExit(f"{len(self.cores)} core; this needs 2, so that nobody shares the service's")
        if len(self.cores) == 2:
            # Backend and clients share one: a rate that they carry together is needed (--paced).
            self.cores += self.cores[1:]

    def service(self, way: str, streams: int, rate: float, num_services: int = 1) -> dict[str, Any]:
        """One run through services; `rate` is per stream, 0 for as fast as they take."""
        clients = set(self.cores[num_services + 1 :])
        with (
            tempfile.TemporaryDirectory(prefix="hr-") as folder,
            front_parties.services(
                self.cores, self.options.model, folder, rate, num_services, speak_http=way == "openai"
            ) as (address, pids),
        ):
            return self._measure(way, address, pids, clients, streams)

    def bare(self, streams: int, rate: float) -> dict[str, Any]:
        """One run of the bare server."""
        with front_parties.bare_server(self.cores, self.message_bytes, rate) as (address, pids):
            return self._measure("bare", address, pids, set(self.cores[1:]), streams)

    @property
    def message_bytes(self) -> int:
        """Size of one token's message."""
        return len(event_wire.delta(0, 500, [5000], " water", None))

    def _measure(self, way: str, address: str, pids: list[int], client_cores: set[int], streams: int) -> dict[str, Any]:
        start_s = time.monotonic() + 2.0
        num_clients = min(self.options.clients, streams)
        clients = [
            self._client(way, address, streams // num_clients, start_s, client_cores) for _ in range(num_clients)
        ]
        processes = [psutil.Process(pid) for pid in pids]
        time.sleep(max(0.0, start_s + WARM_UP_S - time.monotonic()))
        before = _cpu_s(processes)
        time.sleep(self.options.seconds)
        cpu_s = _cpu_s(processes) - before
        rss_bytes = max(process.memory_info().rss for process in processes)
        results = [json.loads(client.communicate(timeout=90)[0]) for client in clients]
        return {"way": way, "streams": streams, "services": len(pids)} | self._figures(results, cpu_s, rss_bytes)

    def _client(self, way: str, address: str, streams: int, start_s: float, cores: set[int]) -> subprocess.Popen[str]:
        command = ["-m", "benchmarks.front_client", way, address, streams, self.options.seconds, start_s]
        with front_parties.on_cores(cores):
            return subprocess.Popen(
                [sys.executable, *map(str, command)], env=figures.environment(), stdout=subprocess.PIPE, text=True
            )

    def _figures(self, results: list[dict[str, Any]], cpu_s: float, rss_bytes: int) -> dict[str, Any]:
        messages, tokens = (sum(result[key] for result in results) for key in ("messages", "tokens"))
        gaps = [gap for result in results for gap in result["gaps_ms"]]
        seconds = self.options.seconds
        return {
            "tokens_per_s": round(tokens / seconds),
            "messages_per_s": round(messages / seconds),
            "tokens_per_message": round(tokens / max(messages, 1), 3),
            "tokens_per_core_s": round(tokens / cpu_s),
            "cpu_us_per_message": round(cpu_s * 1e6 / max(messages, 1), 1),
            "cpu_us_per_token": round(cpu_s * 1e6 / max(tokens, 1), 3),
            "cpu_share": round(cpu_s / seconds, 3),
            "gap_ms_p50": round(figures.percentile(gaps, 0.5), 2),
            "gap_ms_p99": round(figures.percentile(gaps, 0.99), 2),
            "rss_mib": round(rss_bytes / 2**20, 1),
            "load_average": round(os.getloadavg()[0], 1),
        }


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(one.user + one.system for one in times))


def ways(bench: _Bench, *among: str) -> list[str]:
    """Runs of those ways of the API that were asked for."""
    return [way for way in among if way in bench.options.ways.split(",")]


def _single(bench: _Bench) -> dict[str, Any]:
    """One token a message. The ratio is of messages per second and core."""
    streams, rate = bench.options.streams, bench.options.paced / bench.options.streams
    runs = {
        "bare_full": bench.bare(streams, 0.0),
        "bare_paced": bench.bare(streams, rate),
        **{way: bench.service(way, streams, rate) for way in ways(bench, "generate", "kserve", "openai")},
    }
    ratios = {
        f"{way}_of_{bare}": round(runs[bare]["cpu_us_per_message"] / runs[way]["cpu_us_per_message"], 3)
        for way in ways(bench, "generate", "kserve", "openai")
        for bare in ("bare_full", "bare_paced")
    }
    if "generate" in runs and "openai" in runs:
        ratio = runs["generate"]["cpu_us_per_message"] / runs["openai"]["cpu_us_per_message"]
        ratios["openai_of_generate"] = round(ratio, 3)
    return {"offered_tokens_per_s": bench.options.paced, "message_bytes": bench.message_bytes, **runs, "ratios": ratios}


def _first(bench: _Bench) -> dict[str, Any]:
    """Both kinds of service with one backend, asked in turn, so that they meet the same machine."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, contextlib.ExitStack() as stack:
        services = front_parties.services(bench.cores, bench.options.model, folder, 0.0, 1)
        generate, _ = stack.enter_context(services)
        fronts = front_parties.fronts(bench.cores[:1], f"unix:{folder}/engine.sock", speak_http=True)
        openai, _ = stack.enter_context(fronts)
        return front_first.measure(generate, openai, bench.options.first)


def _full(bench: _Bench) -> dict[str, Any]:
    """Runs as fast as it goes. A chunk of OpenAI's counts as one token, though it may have more."""
    streams = bench.options.streams
    return {way: bench.service(way, streams, 0.0) for way in ways(bench, "generate", "kserve", "openai")}


def _session(bench: _Bench) -> list[dict[str, Any]]:
    """Runs sessions at a set rate.

    As fast as it goes, clients would be the limit, and messages that wait for them hold few tokens.
    """
    return [
        {"steps_per_s": rate, **bench.service(way, streams, rate)}
        for streams, rate in _SESSION_RATES.items()
        for way in ways(bench, "session-ids", "session-text")
    ]


def _latency(bench: _Bench) -> list[dict[str, Any]]:
    runs = []
    for streams, rate in _LATENCY_RATES.items():
        for way in ("bare", *ways(bench, "generate", "kserve", "openai", "session-text")):
            run = bench.bare(streams, rate) if way == "bare" else bench.service(way, streams, rate)
            added = run["gap_ms_p99"] - 1e3 / rate
            runs.append({"period_ms": 1e3 / rate, "itl_p99_added_ms": round(added, 2), **run})
    return runs


def _scaling(bench: _Bench) -> list[dict[str, Any]]:
    counts = [count for count in (1, 2, _MAX_SERVICES) if count + 2 <= len(bench.cores)]
    return [bench.service("generate", bench.options.streams, 0.0, count) for count in counts]


def _stages(bench: _Bench) -> dict[str, Any]:
    return front_stages.stages(ModelFolder.open(bench.options.model, require_weights=False), bench.options.streams)


_FUNCTIONS = {
    "single": _single,
    "first": _first,
    "full": _full,
    "session": _session,
    "latency": _latency,
    "scaling": _scaling,
    "stages": _stages,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the figures go")
    parser.add_argument("--runs", default=",".join(_RUNS), help=f"some of {', '.join(_RUNS)}")
    parser.add_argument("--ways", default=",".join(_WAYS), help=f"some of {', '.join(_WAYS)}")
    parser.add_argument(
        "--model", type=pathlib.Path, default=figures.ROOT / "models" / "demo", help="folder with a tokenizer"
    )
    parser.add_argument("--streams", type=int, default=64, help="concurrent generations")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--first", type=int, default=300, help="requests of each way in `first`")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument(
        "--paced", type=float, default=12_800.0, help="tokens a second offered in `single`, all streams together"
    )
    return parser.parse_args()


def main() -> None:
    """Makes the runs and reports."""
    options = _options()
    names = options.runs.split(",")
    if unknown := set(names) - set(_RUNS):
        raise SystemExit(f"--runs: {', '.join(sorted(unknown))} is none of {', '.join(_RUNS)}")
    bench = _Bench(options)
    result = {}
    for name in names:
        result[name] = _FUNCTIONS[name](bench)
        print(f"{name}: {json.dumps(result[name])}", file=sys.stderr, flush=True)
    figures.report("front", result, options.json)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
