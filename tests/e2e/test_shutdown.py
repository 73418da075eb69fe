"""SIGTERM while streams are open: NOT_SERVING, no new calls, streams finish, exit code 0."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy
from tests.support.running_server import running_server

from headrace.v1 import generation_pb2, inference_pb2

STREAMS = 2
# Seconds of work, so that a reader that is held up for a second sees what comes before its end.
TOKENS = 400
OPTIONS = ("--dtype", "fp32", "--device", "cpu", "--num-blocks", "512")


# A backend's streams finish so in tests/backend/test_backend_process, a service's in
# tests/service/test_process.
@pytest.mark.slow
def test_open_streams_finish_after_sigterm() -> None:
    with running_server(*OPTIONS, "--shutdown-grace-s", "240") as server:
        transcripts = [Transcript() for _ in range(STREAMS)]
        ended_at: list[float] = []

        def follow(index: int) -> None:
            with connected(server.address) as stub:
                request = inference_pb2.GenerateRequest(spec=greedy([30 + index, 40], TOKENS))
                for response in stub.Generate(request, timeout=CALL_TIMEOUT_S):
                    transcripts[index].take(response.event)
            ended_at.append(time.monotonic())

        serving = threading.Event()
        not_serving_at: list[float] = []

        def watch() -> None:
            with grpc.insecure_channel(server.address) as channel:
                for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                    serving.set()
                    if response.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                        not_serving_at.append(time.monotonic())
                        return

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert serving.wait(60)
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            followers = [pool.submit(follow, index) for index in range(STREAMS)]
            wait_until(lambda: all(t.tokens.get(0) for t in transcripts), 60, "all streams have tokens")
            server.process.send_signal(signal.SIGTERM)
            for follower in followers:
                follower.result()
        watcher.join(120)
        assert server.process.wait(120) == 0
    assert [len(transcript.tokens[0]) for transcript in transcripts] == [TOKENS] * STREAMS
    assert {transcript.reason() for transcript in transcripts} == {generation_pb2.FINISH_REASON_LENGTH}
    # A start, some work and an end are nothing to be warned of.
    assert [line for line in server.lines if "[info " not in line and not line.startswith("listening on ")] == []
    assert all(transcript.done for transcript in transcripts)
    assert not_serving_at and not_serving_at[0] < min(ended_at)


# A backend's grace is in tests/backend/test_backend_process, a service's in
# tests/service/test_process.
@pytest.mark.slow
def test_streams_beyond_the_grace_end_unavailable() -> None:
    with running_server(*OPTIONS, "--shutdown-grace-s", "0.5", "--drain-grace-s", "0.5") as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            call = pool.submit(generate, server.address, greedy([30, 40], 2000))
            wait_until(lambda: _running(server.address), 60, "the stream runs")
            assert server.stop() == 0
            error = call.exception()
        assert isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.UNAVAILABLE


def _running(address: str) -> bool:
    with connected(address) as stub:
        return bool(stub.GetLoad(inference_pb2.GetLoadRequest(), timeout=60).running_sequences)
