"""Programs written for OpenAI's API, as they are, against a real server with the demo model.

The official clients for Python and Node, and LangChain's. Those for Python are imported where they
are used: that takes 2 s, and every process of pytest imports this file.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest
from tests.support.ports import free_address
from tests.support.processes import wait_until
from tests.support.rpc import CALL_TIMEOUT_S, connected, greedy
from tests.support.running_server import RunningServer, running_server
from tests.support.toolchains import NODE, left_out, require

from headrace.v1 import inference_pb2

NODE_CLIENT = pathlib.Path(__file__).parent / "node"
QUESTION = "What is a KV cache?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}


class Server:
    """A real server, and where its two APIs and its metrics are."""

    def __init__(self, running: RunningServer, url: str, metrics: str) -> None:
        self.running = running
        self.url = url
        self.metrics = metrics

    def client(self, **options: object) -> openai.OpenAI:  # noqa: F821
        """The official client, which sends nothing again."""
        import openai

        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=CALL_TIMEOUT_S, **options)  # type: ignore[arg-type]

    def greedy_chat(self) -> str:
        """What gRPC answers to what the clients ask."""
        message = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER)
        message.parts.add().text = QUESTION
        spec = greedy("", 12)
        spec.ClearField("text")
        spec.stop.ignore_eos = False
        with connected(self.running.address) as stub:
            stream = stub.Chat(inference_pb2.ChatRequest(spec=spec, messages=[message]), timeout=CALL_TIMEOUT_S)
            deltas = [answer.event.delta for answer in stream if answer.event.HasField("delta")]
        return "".join(content.text for delta in deltas for content in delta.content)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    metrics = free_address()
    options = ("--openai-listen", "127.0.0.1:0", "--dtype", "fp32", "--device", "cpu", "--metrics-listen", metrics)
    with running_server(*options) as running:
        found = re.search(r"and (http://\S+)", "".join(running.lines))
        assert found is not None
        yield Server(running, found[1], f"http://{metrics}/metrics")


def test_the_python_client_gets_what_grpc_answers(server: Server) -> None:
    client, expected = server.client(), server.greedy_chat()
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"
    whole = client.chat.completions.create(**ASKED)  # type: ignore[call-overload]
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (expected, "length")
    assert whole.usage.completion_tokens == 12 and whole._request_id
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == 12
    # Helpers of the clients refuse answers that were cut off.
    with client.chat.completions.stream(**{**ASKED, "max_completion_tokens": 200}) as stream:  # type: ignore[arg-type]
        assert str(stream.get_final_completion().choices[0].message.content).startswith(expected)
    completion = client.completions.create(
        model="demo", prompt="2 + 2 =", max_tokens=4, logprobs=2, echo=True, extra_body={"top_k": 5}
    )
    assert completion.choices[0].text.startswith("2 + 2 =")
    assert completion.choices[0].logprobs.token_logprobs[0] is None


def test_the_python_client_raises_its_own_errors(server: Server) -> None:
    import openai

    client = server.client()
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASKED, "temperature": -1})  # type: ignore[call-overload]
    assert (refused.value.param, refused.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**ASKED, "model": "gpt-4"})  # type: ignore[call-overload]
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(model="demo", input="a")


# It asks through the client for Python, above; importing it takes a second.
@pytest.mark.slow
async def test_langchain_answers_and_streams(server: Server) -> None:
    from langchain_openai import ChatOpenAI

    expected = server.greedy_chat()
    model = ChatOpenAI(
        base_url=server.url, api_key="none", model="demo", temperature=0, max_completion_tokens=12, max_retries=0
    )
    answer = await model.ainvoke([("human", QUESTION)])
    assert answer.content == expected
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 12
    pieces = [piece.content async for piece in model.astream(QUESTION)]
    assert "".join(map(str, pieces)) == expected and len(pieces) > 3


# The client for Python, above, asks the same; installing this one takes 4 s of CPU.
@pytest.mark.slow
def test_the_node_client_does_too(server: Server, tmp_path: pathlib.Path) -> None:
    node, npm = require(NODE), shutil.which("npm")
    if npm is None:
        left_out(NODE, "there is no `npm` on PATH")
    for name in ("package.json", "package-lock.json", "client.mjs"):
        shutil.copy(NODE_CLIENT / name, tmp_path)
    installing = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if installing.returncode != 0:
        left_out(NODE, "`npm ci` cannot get the client")
    environment = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none"}
    ended = subprocess.run(
        [node, "client.mjs"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found, expected = json.loads(ended.stdout), server.greedy_chat()
    assert (found["whole"], found["streamed"]) == (expected, expected)
    assert found["helper"].startswith(expected)
    assert (found["models"], found["reason"]) == (["demo"], "length")
    assert found["tokens"] == found["streamedTokens"] == 12 and found["requestId"] and found["left"]
    assert found["error"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}


def test_calls_stand_on_the_metrics_page(server: Server) -> None:
    server.client().chat.completions.create(**ASKED)  # type: ignore[call-overload]

    def counted() -> bool:
        with urllib.request.urlopen(server.metrics, timeout=60) as page:
            lines = page.read().decode().splitlines()
        calls = [
            line for line in lines if "openai.v1/CreateChatCompletion" in line and 'rpc_system_name="http"' in line
        ]
        return bool(calls) and any('wire="openai"' in line for line in lines)

    wait_until(counted, 60, "the call stands on the metrics page")


# A process that dies is started again in tests/supervisor/test_supervisor.
@pytest.mark.slow
def test_a_process_that_dies_is_started_again(server: Server) -> None:
    import openai

    (door,) = server.running.descendants("headrace_service.openai")
    door.kill()

    def answers() -> bool:
        try:
            return bool(server.client().chat.completions.create(**ASKED).choices)  # type: ignore[call-overload]
        except openai.APIError:
            return False

    wait_until(answers, CALL_TIMEOUT_S, "the API answers again")
    assert server.greedy_chat()
