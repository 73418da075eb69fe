"""Triton's own Python client, unchanged, in the server's process: both of its kinds."""

from __future__ import annotations

import asyncio
import json
import queue
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from tests.service.harness import ANSWER, Running
from tritonclient.utils import InferenceServerException

SAMPLING = json.dumps({"max_tokens": "64", "temperature": "0"})


def texts(*elements: str) -> Any:
    return np.array([element.encode() for element in elements], dtype=np.object_)


def tensor(kind: Any, name: str, values: Any, datatype: str) -> Any:
    given = kind.InferInput(name, list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given


def generation(kind: Any = triton, prompt: str = "hello", streamed: bool = True) -> list[Any]:
    return [
        tensor(kind, "text_input", texts(prompt), "BYTES"),
        tensor(kind, "stream", np.array([streamed]), "BOOL"),
        tensor(kind, "sampling_parameters", texts(SAMPLING), "BYTES"),
        tensor(kind, "exclude_input_in_output", np.array([True]), "BOOL"),
    ]


def numbers(kind: Any = triton) -> list[Any]:
    both = [("INPUT0", np.arange(16, dtype=np.int32)), ("INPUT1", np.ones(16, dtype=np.int32))]
    return [tensor(kind, name, values.reshape(1, 16), "INT32") for name, values in both]


@pytest.fixture
def client(running: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(running.address) as client:
        yield client


async def blocking(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The client's calls block, and the server runs in this thread."""
    return await asyncio.to_thread(call, *arguments, **options)


class Stream:
    """A stream of the synchronous client, its responses in a queue."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(callback=lambda result, error: self.came.put((result, error)))

    def until_final(self) -> list[Any]:
        found = []
        while True:
            result, error = self.came.get(timeout=60)
            assert error is None, error
            found.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return found


async def test_the_synchronous_client_infers(client: Any) -> None:
    result = await blocking(client.infer, "simple", numbers(), request_id="1")
    assert result.as_numpy("OUTPUT0").tolist() == [list(range(1, 17))]
    result = await blocking(client.infer, "vllm_model", generation(streamed=False), compression_algorithm="gzip")
    assert result.as_numpy("text_output").tolist() == [ANSWER.encode()]


async def test_the_synchronous_client_streams(client: Any) -> None:
    def run() -> list[Any]:
        stream = Stream(client)
        client.async_stream_infer("vllm_model", generation(), request_id="a", enable_empty_final_response=True)
        found = stream.until_final()
        client.stop_stream()
        return found

    found = await blocking(run)
    assert b"".join(result.as_numpy("text_output")[0] for result in found).decode() == ANSWER
    assert {result.get_response().id for result in found} == {"a"}


async def test_the_synchronous_client_sees_failures(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found") as failure:
        await blocking(client.infer, "nope", numbers())
    assert failure.value.status() == "StatusCode.NOT_FOUND"

    def run() -> Any:
        stream = Stream(client)
        client.async_stream_infer("simple", numbers()[:1])
        result, error = stream.came.get(timeout=60)
        client.stop_stream()
        assert result is None
        return error

    error = await blocking(run)
    assert error.status() is None and "missing required input(s) ['INPUT1']" in error.message()


async def test_the_synchronous_client_cancels(running: Running, client: Any) -> None:
    running.engine.running.clear()

    def begin() -> None:
        Stream(client)
        client.async_stream_infer("vllm_model", generation())

    await blocking(begin)
    await running.until(lambda: len(running.engine.requests) == 1)
    await blocking(client.stop_stream, cancel_requests=True)
    await running.until(lambda: len(running.engine.aborts) == 1)


async def test_the_synchronous_client_reads_statistics_and_settings(client: Any) -> None:
    for _ in range(3):
        await blocking(client.infer, "simple", numbers())
    statistics = await blocking(client.get_inference_statistics, "simple", as_json=True)
    (stats,) = statistics["model_stats"]
    assert stats["inference_count"] == "3" and stats["inference_stats"]["success"]["count"] == "3"
    assert stats["batch_stats"][0]["batch_size"] == "1"
    assert (await blocking(client.get_trace_settings)).settings["trace_level"].value == ["OFF"]
    assert (await blocking(client.get_log_settings)).settings["log_error"].bool_param
    assert (await blocking(client.get_model_config, "simple")).config.max_batch_size == 8
    assert len((await blocking(client.get_model_repository_index)).models) == 13


async def test_the_synchronous_client_passes_tensors_in_shared_memory(client: Any) -> None:
    key = f"/hrtest-{secrets.token_hex(6)}"
    handle = shm.create_shared_memory_region("r", key, 192)
    try:
        shm.set_shared_memory_region(handle, [np.arange(16, dtype=np.int32), np.ones(16, dtype=np.int32)])
        await blocking(client.register_system_shared_memory, "r", key, 192)
        inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        inputs[0].set_shared_memory("r", 64)
        inputs[1].set_shared_memory("r", 64, offset=64)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("r", 64, offset=128)
        result = await blocking(client.infer, "simple", inputs, outputs=[output])
        assert result.get_output("OUTPUT0").parameters["shared_memory_region"].string_param == "r"
        assert shm.get_contents_as_numpy(handle, np.int32, [16], offset=128).tolist() == list(range(1, 17))
        await blocking(client.unregister_system_shared_memory)
    finally:
        shm.destroy_shared_memory_region(handle)


async def test_the_asyncio_client_infers_and_streams(running: Running) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for index in range(3):
            yield {"model_name": "tiny", "inputs": generation(triton_aio), "request_id": str(index)}

    async with triton_aio.InferenceServerClient(running.address) as client:
        assert await client.is_server_ready() and await client.is_model_ready("tiny")
        result = await client.infer("simple", numbers(triton_aio))
        assert result.as_numpy("OUTPUT1").tolist() == [list(range(-1, 15))]
        found: dict[str, str] = {"0": "", "1": "", "2": ""}
        async for result, error in client.stream_infer(requests()):
            assert error is None
            found[result.get_response().id] += result.as_numpy("text_output")[0].decode()
    assert found == dict.fromkeys(found, ANSWER)


async def test_the_asyncio_client_cancels(running: Running) -> None:
    running.engine.running.clear()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "tiny", "inputs": generation(triton_aio)}

    async with triton_aio.InferenceServerClient(running.address) as client:
        responses = client.stream_infer(requests())
        task = asyncio.create_task(responses.__anext__())
        await running.until(lambda: len(running.engine.requests) == 1)
        responses.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await running.until(lambda: len(running.engine.aborts) == 1)
