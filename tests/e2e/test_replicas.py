"""A server whose model has two engines.

Requests of one prefix meet in one cache, and what a lost engine computed goes on at the other.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from benchmarks.gpu_watch import GpuMemory
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy, idle_load
from tests.support.running_server import RunningServer, running_server

from headrace.v1 import generation_pb2, inference_pb2

OPTIONS = (
    *("--replicas", "2", "--services", "2", "--dtype", "fp32", "--device", "cpu", "--num-blocks", "640"),
    *("--metrics-listen", "127.0.0.1:0", "--hang-timeout-s", "2"),
)
PREFIXES = 4
# Long enough to be there when something happens.
TOKENS = 240


@pytest.fixture(scope="module")
def pair() -> Iterator[RunningServer]:
    with running_server(*OPTIONS) as running:
        yield running
        wait_until(lambda: idle_load(running.address), 60, "no request and no block left")


def prompt(index: int, last: int = 3) -> list[int]:
    """100 tokens that are the index's own, and one more."""
    return [*((37 * index + 11 * place) % 3900 + 10 for place in range(100)), last]


def request_id(transcript: Transcript) -> str:
    return transcript.events[0].accepted.request_id


def engine_of(identifier: str) -> str:
    """What ids of requests of one engine have in common."""
    return identifier.rpartition("-")[2]


def home(server: RunningServer, index: int) -> str:
    return engine_of(request_id(generate(server.address, greedy(prompt(index), 1))))


def settled_homes(server: RunningServer) -> list[str]:
    """The engine of each prefix once both services know both engines.

    A busy machine delays that, so the engines have to be equal in three rounds, each on connections
    of their own.
    """
    rounds: list[list[str]] = []

    def have_settled() -> bool:
        rounds.append([home(server, index) for index in range(PREFIXES)])
        return len(set(rounds[-1])) == 2 and len(rounds) >= 3 and rounds[-3] == rounds[-2] == rounds[-1]

    wait_until(have_settled, 120, "prefixes have homes")
    return rounds[-1]


@pytest.mark.slow  # tests/service/engines/test_routing.py: services come to one engine alike.
def test_requests_of_one_prefix_share_a_cache_whichever_service_they_ask(pair: RunningServer) -> None:
    settled_homes(pair)
    found: list[str] = []
    # An engine that a busy machine keeps from saying that it is there is passed over. So more
    # prefixes are tried until enough have met; if services disagreed, a 32nd of them would.
    for index in range(PREFIXES, 4 * PREFIXES):
        # Each on a connection of its own, that is at either service.
        answers = [generate(pair.address, greedy(prompt(index, last), 2)) for last in range(3, 9)]
        engines = {engine_of(request_id(answer)) for answer in answers}
        cached = [answer.done.usage.cached_tokens for answer in answers if answer.done is not None]
        if len(engines) == 1:
            assert cached == [0, *[96] * 5]
            found += engines
        if len(found) >= PREFIXES and len(set(found)) == 2:
            return
    pytest.fail(f"of {3 * PREFIXES} prefixes {len(found)} met their like")


@pytest.mark.slow  # The other test of this file has the same two engines; tests/service/engines has their sums.
def test_two_engines_look_like_one_model(pair: RunningServer, server: RunningServer) -> None:
    assert len(pair.descendants("headrace_backend")) == 2
    with connected(pair.address) as stub:
        [model] = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=CALL_TIMEOUT_S).models
        load = stub.GetLoad(inference_pb2.GetLoadRequest(), timeout=CALL_TIMEOUT_S)
        assert (load.kv_blocks, load.model) == (2 * 640, model.name)
    for index in range(PREFIXES):
        spec = greedy(prompt(index), 20)
        assert generate(pair.address, spec).tokens == generate(server.address, spec).tokens


def figures(server: RunningServer) -> list[Sample]:
    """What telemetry serves."""
    [address] = re.findall(r"metrics are served.*?address\W+(127\.0\.0\.1:\d+)", "".join(server.lines))
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        text = reply.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def test_figures_add_engines_up_and_name_each(pair: RunningServer) -> None:
    def backends() -> dict[str, float]:
        if not any("metrics are served" in line for line in pair.lines):
            return {}
        ups = (sample for sample in figures(pair) if sample.name == "headrace_process_up")
        named = {sample.labels["headrace_process_name"]: sample.value for sample in ups}
        return {name: up for name, up in named.items() if name.startswith("backend")}

    # One that is gone is missed by its name, which an alert waits for.
    wait_until(lambda: backends() == {"backend-demo": 1, "backend-demo/1": 1}, 60, "both backends are connected")

    def blocks() -> float:
        return sum(sample.value for sample in figures(pair) if sample.name == "headrace_kv_blocks")

    wait_until(lambda: blocks() == 2 * 640, 60, "the blocks of both")


def generated(stub: Any, spec: generation_pb2.GenerationSpec) -> Any:
    """A stream that ends with its call."""
    return stub.Generate(inference_pb2.GenerateRequest(spec=spec), timeout=CALL_TIMEOUT_S)


def submitted(stub: Any, spec: generation_pb2.GenerationSpec) -> Any:
    """A stream that reads what was submitted."""
    made = stub.Submit(inference_pb2.SubmitRequest(spec=spec), timeout=CALL_TIMEOUT_S)
    return stub.Subscribe(inference_pb2.SubscribeRequest(request_id=made.request_id), timeout=CALL_TIMEOUT_S)


class Stream(NamedTuple):
    """A stream that is followed."""

    # Once there is a token.
    begun: concurrent.futures.Future[None]
    ended: concurrent.futures.Future[Transcript]


def start(
    server: RunningServer, spec: generation_pb2.GenerationSpec, way: Callable[[Any, Any], Any] = generated
) -> Stream:
    """Asks and follows the answer."""
    begun: concurrent.futures.Future[None] = concurrent.futures.Future()
    ended: concurrent.futures.Future[Transcript] = concurrent.futures.Future()

    def follow() -> None:
        try:
            with connected(server.address) as stub:
                transcript = Transcript()
                for response in way(stub, spec):
                    transcript.take(response.event)
                    if transcript.tokens and not begun.done():
                        begun.set_result(None)
                ended.set_result(transcript)
        except BaseException as error:
            ended.set_exception(error)
            if not begun.done():
                begun.set_exception(error)

    _POOL.submit(follow)
    return Stream(begun, ended)


_POOL = concurrent.futures.ThreadPoolExecutor(2 * PREFIXES)


def every_kind(index: int) -> generation_pb2.GenerationSpec:
    """A request of a prefix, of another kind than those of its neighbours."""
    spec = greedy(prompt(index), TOKENS)
    if index % 3 == 1:
        spec.n = 2
        spec.sampling.temperature, spec.sampling.seed = 0.8, index
        spec.sampling.presence_penalty = 0.5
        spec.logprobs, spec.prompt_logprobs = 1, 1
    elif index % 3 == 2:
        spec.stop.strings[:] = ["no text of the model has this", "\x00\x01"]
    return spec


def without_logprobs(spec: generation_pb2.GenerationSpec) -> generation_pb2.GenerationSpec:
    """Asks for the same tokens, without what a guardian keeps no copy of."""
    plain = generation_pb2.GenerationSpec()
    plain.CopyFrom(spec)
    plain.ClearField("logprobs")
    plain.ClearField("prompt_logprobs")
    return plain


def unbroken(transcript: Transcript) -> tuple[Any, ...]:
    """What must not depend on where an answer was computed, nor on how it was cut into messages."""
    deltas = [event.delta for event in transcript.events if event.HasField("delta")]
    ranks = [
        [rank for delta in deltas if delta.output_index == index for rank in delta.logprobs.ranks]
        for index in sorted(transcript.tokens)
    ]
    prompt_parts = [event.prompt_logprobs for event in transcript.events if event.HasField("prompt_logprobs")]
    prompt_ranks = [rank for part in prompt_parts for rank in part.logprobs.ranks]
    reasons = {index: finished.reason for index, finished in transcript.finished.items()}
    assert transcript.done is not None
    usage = transcript.done.usage
    return transcript.tokens, transcript.texts, ranks, prompt_ranks, reasons, usage.prompt_tokens, usage.output_tokens


def check_ledger(transcript: Transcript) -> None:
    assert transcript.done is not None
    spent = transcript.done.ledger
    parts = (
        *(spent.queued_ns, spent.prefill_ns, spent.decode_ns, spent.preempted_ns, spent.engine_restart_ns),
        *(spent.detokenize_and_send_ns, spent.blocked_on_reader_ns),
    )
    assert sum(parts) == spent.end_to_end_ns and 0 < spent.ttft_ns < spent.end_to_end_ns


def lose_an_engine(pair: RunningServer, signal_number: int, wanted: list[tuple[Any, ...]]) -> list[Transcript]:
    """Ends the engine that was started last while it answers, and checks all answers.

    Returns those that went on at the other engine; none, if a busy machine let all end before.
    """
    first, second = engines(pair)
    streams = [start(pair, every_kind(index)) for index in range(PREFIXES)]
    kept = [start(pair, without_logprobs(every_kind(index)), submitted) for index in range(PREFIXES)]
    # Started together and waited for together: none is to be through before the last has begun.
    for stream in streams + kept:
        stream.begun.result(CALL_TIMEOUT_S)
    # Of one that is stopped the supervisor makes a SIGKILL.
    os.kill(second.pid, signal_number)
    found = [stream.ended.result(CALL_TIMEOUT_S) for stream in streams]
    assert [unbroken(transcript) for transcript in found] == wanted
    found += (read := [stream.ended.result(CALL_TIMEOUT_S) for stream in kept])
    assert [(one.tokens, one.texts) for one in read] == [answer[:2] for answer in wanted]
    for transcript in found:
        check_ledger(transcript)
    wait_until(lambda: not second.is_running(), 120, "the engine is gone")
    assert first.is_running()
    resumed = [transcript for transcript in found if any(event.HasField("resumed") for event in transcript.events)]
    assert not resumed or {one in read for one in resumed} == {False, True}
    return resumed


def engines(pair: RunningServer) -> list[psutil.Process]:
    """Both, in the order of their start."""
    wait_until(lambda: len(pair.descendants("headrace_backend")) == 2, 120, "two engines")
    return sorted(pair.descendants("headrace_backend"), key=lambda process: process.create_time())


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_streams_of_an_engine_that_is_lost_go_on_at_the_other(pair: RunningServer, signal_number: int) -> None:
    homes = settled_homes(pair)
    whole = [start(pair, every_kind(index)) for index in range(PREFIXES)]
    wanted = [unbroken(stream.ended.result(CALL_TIMEOUT_S)) for stream in whole]
    resumed: list[Transcript] = []
    for _ in range(3):
        resumed = lose_an_engine(pair, signal_number, wanted)
        # What began so is answered meanwhile, by whom there is; then by the one that it belongs to.
        wait_until(lambda: [home(pair, index) for index in range(PREFIXES)] == homes, 120, "all prefixes back at home")
        if resumed:
            break
    assert len({engine_of(request_id(transcript)) for transcript in resumed}) == 1
    assert all(one.done is not None and one.done.ledger.engine_restart_ns > 0 for one in resumed)
    restarts = [line for line in pair.lines if "ended and is started again" in line]
    assert any("backend" in line for line in restarts), "".join(pair.lines)


def used_bytes() -> list[int]:
    """Memory in use on the first two cards."""
    cards = [GpuMemory(index) for index in range(2)]
    used = [card.used_bytes or 0 for card in cards]
    for card in cards:
        card.close()
    return used


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several CUDA GPUs")
def test_each_engine_has_a_card_of_its_own() -> None:
    options = ("--replicas", "2", "--services", "2", "--device", "cuda", "--dtype", "bf16", "--num-blocks", "640")
    before = used_bytes()
    with running_server(*options) as on_cards:
        homes = settled_homes(on_cards)
        # The same numbers on the same kind of card: where a prompt is answered does not show in its
        # answer.
        answers = [generate(on_cards.address, greedy(prompt(index), 20)) for index in range(PREFIXES)]
        again = [generate(on_cards.address, greedy(prompt(index), 20)) for index in range(PREFIXES)]
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in again]
        assert [engine_of(request_id(answer)) for answer in answers] == homes
        # What CUDA itself takes is more than this.
        assert all(now > past + (256 << 20) for now, past in zip(used_bytes(), before, strict=True))
