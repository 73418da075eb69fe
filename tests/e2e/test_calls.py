"""Every public call once against a real server, by stub and by command line.

Whichever service process answers, the answer is one.
"""

from __future__ import annotations

import subprocess
import sys
import uuid

import psutil
import pytest
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, Transcript, connected, generate, greedy, read
from tests.support.running_server import RunningServer, environment

from headrace.v1 import generation_pb2, inference_pb2

STORY = "Once upon a time"
LEDGER_PARTS = (
    "queued_ns", "prefill_ns", "decode_ns", "preempted_ns", "engine_restart_ns", "detokenize_and_send_ns",
    "blocked_on_reader_ns",
)  # fmt: skip


def ledger_gap_ns(ledger: generation_pb2.Ledger) -> int:
    return abs(ledger.end_to_end_ns - sum(getattr(ledger, part) for part in LEDGER_PARTS))


def test_a_streams_events_come_in_order_and_its_ledger_adds_up(server: RunningServer) -> None:
    transcript = generate(server.address, greedy(STORY, 20, logprobs=2))
    kinds = [str(event.WhichOneof("event")) for event in transcript.events]
    assert kinds[:2] == ["accepted", "started"] and kinds[-2:] == ["output_finished", "done"]
    assert set(kinds[2:-2]) == {"delta"}
    assert transcript.done is not None
    assert ledger_gap_ns(transcript.done.ledger) <= 1_000_000
    assert transcript.done.ledger.ttft_ns > 0 and transcript.done.usage.output_tokens == 20
    logprobs = [event.delta.logprobs for event in transcript.events if event.HasField("delta")]
    assert sum(len(columns.sampled) for columns in logprobs) == 20
    assert {rank for columns in logprobs for rank in columns.ranks} == {1}  # greedy


def test_complete_chat_and_tokenize_agree_with_generate(server: RunningServer) -> None:
    streamed = generate(server.address, greedy(STORY, 20))
    with connected(server.address) as stub:
        answer = stub.Complete(inference_pb2.CompleteRequest(spec=greedy(STORY, 20)), timeout=CALL_TIMEOUT_S)
        assert list(answer.outputs[0].token_ids) == streamed.tokens[0]
        assert "".join(piece.text for piece in answer.outputs[0].content) == streamed.texts[0]
        ids = stub.Tokenize(inference_pb2.TokenizeRequest(text=STORY)).token_ids
        assert len(ids) == streamed.events[0].accepted.prompt_tokens
        assert stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids)).text == STORY
        assert generate(server.address, greedy(list(ids), 20)).tokens == streamed.tokens

        question = inference_pb2.ChatMessage(
            role=inference_pb2.ROLE_USER, parts=[inference_pb2.Part(text="What is a KV cache?")]
        )
        spec = generation_pb2.GenerationSpec(sampling=generation_pb2.SamplingParameters(temperature=0))
        request = inference_pb2.ChatRequest(messages=[question], spec=spec)
        chat: Transcript = read(stub.Chat(request, timeout=CALL_TIMEOUT_S))
    assert chat.reason() == generation_pb2.FINISH_REASON_STOP
    assert "cache" in chat.texts[0] and "<|" not in chat.texts[0]


def test_models_name_their_limits(server: RunningServer) -> None:
    with connected(server.address) as stub:
        model = stub.GetModel(inference_pb2.GetModelRequest()).model
        assert list(stub.ListModels(inference_pb2.ListModelsRequest()).models) == [model]
    assert (model.dtype, model.kv_blocks, model.has_chat_template) == ("fp32", 2048, True)
    assert model.revision.startswith("demo@") and model.device == "cpu"
    plan = model.memory_plan
    assert plan.weight_bytes == 4 * model.parameter_count and not plan.measured
    assert plan.kv_cache_bytes % model.kv_blocks == 0 and plan.kv_cache_bytes > 0
    assert plan.weight_bytes + plan.activation_bytes + plan.kv_cache_bytes <= plan.total_bytes


def command(server: RunningServer, *arguments: str) -> str:
    """Runs `headrace` against the server and returns what it prints on stdout."""
    ended = subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment() | {"HEADRACE_SERVER": server.address},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_command_line_speaks_to_a_real_server(server: RunningServer) -> None:
    text = generate(server.address, greedy(STORY, 12)).texts[0]
    limits = ("--max-tokens", "12", "--temperature", "0")
    assert text in command(server, "generate", *limits, STORY)
    assert "demo" in command(server, "models")
    assert "2,048" in command(server, "load") or "2048" in command(server, "load")
    request_id = command(server, "submit", *limits, STORY).split()[-1]
    assert text in command(server, "subscribe", request_id)
    assert request_id in command(server, "requests")
    command(server, "cancel", request_id)


def num_connections(server: RunningServer) -> dict[int, int]:
    """How many callers each service process has now."""
    return {
        process.pid: sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections("tcp"))
        for process in server.services()
    }


@pytest.mark.slow  # Tests of shared quotas and replicas ask several services.
def test_any_service_process_gives_the_same_answers(server: RunningServer) -> None:
    submitted = inference_pb2.SubmitRequest(spec=greedy(STORY, 200), idempotency_key=uuid.uuid4().hex)
    used: set[int] = set()
    transcripts: list[Transcript] = []
    ids: set[str] = set()

    def ask() -> bool:
        """Asks on one more connection, which the kernel gives to any of the processes."""
        # Those of earlier callers may still go away meanwhile.
        before = num_connections(server)
        with connected(server.address) as stub:
            ids.add(stub.Submit(submitted, timeout=CALL_TIMEOUT_S).request_id)
            request = inference_pb2.SubscribeRequest(request_id=next(iter(ids)))
            transcripts.append(read(stub.Subscribe(request, timeout=CALL_TIMEOUT_S)))
            used.update(pid for pid, number in num_connections(server).items() if number > before[pid])
        return len(used) == len(before) == 2 and len(transcripts) >= 4

    wait_until(ask, 180, "both processes gave an answer")
    assert len(ids) == 1
    assert all((t.tokens, t.texts) == (transcripts[0].tokens, transcripts[0].texts) for t in transcripts)
    assert len(transcripts[0].tokens[0]) == 200
