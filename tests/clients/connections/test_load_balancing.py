"""Targets of several addresses, and the service config that is published for stubs of one's own."""

from __future__ import annotations

import collections
import json
import pathlib
import re
import time
from collections.abc import Iterator

import grpc
import pytest
from tests.clients.balanced_services import balanced_services
from tests.service.model_folder import write_model_folder

from headrace import Client, RetryPolicy
from headrace.connections.channel import LoadBalancing, service_config
from headrace.v1 import inference_pb2, inference_pb2_grpc

CLIENTS = pathlib.Path(__file__).resolve().parents[3] / "clients"
PUBLISHED = json.loads((CLIENTS / "service_config.json").read_text())
# gRPC makes no use of weights before a connection is that old.
BLACKOUT_S = 10
CALLS = 120


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model_path = write_model_folder(tmp_path_factory.mktemp("models") / "tiny")
    with balanced_services(model_path) as addresses:
        yield "ipv4:" + ",".join(addresses)


def shares(client: Client, calls: int) -> list[int]:
    """How many of some calls each of two services answered."""
    answered = collections.Counter(client.load().waiting_tokens for _ in range(calls))
    return [answered[number] for number in (1, 2)]


@pytest.mark.parametrize(("how", "expected"), [("pick_first", {0, 20}), ("round_robin", {10})])
def test_addresses_are_used_by_the_clients_option(target: str, how: LoadBalancing, expected: set[int]) -> None:
    with Client(target, load_balancing=how) as client:
        client.load()
        # Until both are connected, one takes all.
        deadline = time.monotonic() + 60
        while how == "round_robin" and 0 in shares(client, 2) and time.monotonic() < deadline:
            pass
        assert set(shares(client, 20)) == expected


@pytest.mark.slow
def test_weights_are_what_the_servers_engines_can_do(target: str) -> None:
    """The second engine needs twice the rows for the same requests per second."""
    with Client(target, load_balancing="weighted_round_robin") as client:
        shares(client, 2)
        time.sleep(BLACKOUT_S)
        deadline = time.monotonic() + 120
        first = second = 0
        while not 1.6 * second < first < 2.5 * second:
            assert time.monotonic() < deadline, f"{first} and {second} of {CALLS} calls"
            first, second = shares(client, CALLS)
            time.sleep(0.5)


@pytest.mark.slow
def test_grpcs_own_stream_of_reports_gives_weights_too(target: str) -> None:
    """A channel of one's own, whose calls ask for nothing."""
    policy = {"blackoutPeriod": "1s", "oobReportingPeriod": "1s", "enableOobLoadReport": True}
    config = json.dumps({"loadBalancingConfig": [{"weighted_round_robin": policy}]})
    with grpc.insecure_channel(target, [("grpc.service_config", config)]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        deadline = time.monotonic() + 120
        first = 0
        while not 1.6 * (CALLS - first) < first < 2.5 * (CALLS - first):
            assert time.monotonic() < deadline, f"{first} of {CALLS} calls"
            time.sleep(0.5)
            loads = [stub.GetLoad(inference_pb2.GetLoadRequest()) for _ in range(CALLS)]
            first = sum(load.waiting_tokens == 1 for load in loads)


def test_another_way_to_balance_is_refused() -> None:
    with pytest.raises(ValueError, match="load_balancing must be one of pick_first, round_robin, weighted_round_robin"):
        Client("ipv4:127.0.0.1:1", load_balancing="random")  # type: ignore[arg-type]


def test_the_published_service_config_is_the_clients_own() -> None:
    assert json.loads(service_config(RetryPolicy(), "round_robin")) == PUBLISHED


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("go/retry.go", r"idempotent(?:Admin)?Calls = \[\]string\{([^}]*)\}"),
        ("java/src/main/java/io/github/headrace/HeadraceClientBuilder.java", r"List\.of\(\s*([^)]*)\)[,)]"),
    ],
)
def test_the_other_clients_send_the_same_calls_again(path: str, pattern: str) -> None:
    """Reads their lists; their own tests show that they go by them."""
    text = (CLIENTS / path).read_text()
    sent_again = {name for names in re.findall(pattern, text) for name in re.findall(r'"([A-Z]\w+)"', names)}
    (config,) = PUBLISHED["methodConfig"]
    assert sent_again - {"UNAVAILABLE"} == {name["method"] for name in config["name"]}
