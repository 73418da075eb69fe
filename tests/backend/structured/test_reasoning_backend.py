"""A backend with the demo model: reasoning ends with its budget, and the answer has its form."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Iterator

import jsonschema
import pytest
import pytest_asyncio
from tests.backend.backend_harness import (
    BackendProcess,
    EngineClient,
    Subscription,
    add_message,
    connected,
    idle,
    settled,
    start_backend,
)
from tests.support.running_server import DEMO

from headrace_model_folder import ModelFolder
from headrace_protos.engine.v1 import engine_pb2
from headrace_request.reasoning import Reasoning
from headrace_request.sampling import Sampling
from headrace_request.stop import Stop
from headrace_request.structured_output import StructuredOutput

FOLDER = ModelFolder.open(DEMO)
TOKEN_BYTES = FOLDER.token_table.token_bytes if FOLDER.token_table is not None else ()
END = FOLDER.generation_defaults.eos_token_ids[0]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
    "additionalProperties": False,
}
MARKER = (TOKEN_BYTES.index(b" said"), TOKEN_BYTES.index(b"."))
PROMPT = list(range(300, 312))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendProcess]:
    folder = tmp_path_factory.mktemp("backend")
    engine = {"load": "folder", "dtype": "fp32", "device": "cpu", "worker_threads": 1, "max_model_len": 512}
    started = start_backend(folder, DEMO, worker="real_worker.py", **engine)
    started.wait_listening()
    yield started
    started.process.terminate()
    assert started.process.wait(240) == 0, started.log
    assert "Traceback" not in started.log, started.log


@pytest_asyncio.fixture
async def engine(backend: BackendProcess) -> AsyncIterator[EngineClient]:
    async with connected(backend.address) as client:
        await client.wait_serving()
        yield client
        await idle(client)


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKEN_BYTES[token] or b"" for token in tokens if token != END).decode()


async def reasoned(engine: EngineClient, budget: int | None, max_tokens: int, **fields: object) -> Subscription:
    reasoning = Reasoning((5,), MARKER, budget, begins_inside=True)
    sampling = Sampling(temperature=1.0, seed=3)
    return await engine.add(PROMPT, max_tokens, reasoning=reasoning, sampling=sampling, **fields)


@pytest.mark.slow  # tests/engine/test_reasoning.py spends budgets of any kind.
async def test_the_end_marker_is_forced_when_the_budget_is_spent(engine: EngineClient) -> None:
    free = await settled(await engine.add(PROMPT, 40, sampling=Sampling(temperature=1.0, seed=3), n=2))
    bound = await settled(await reasoned(engine, 9, 40, n=2))
    for output in (0, 1):
        tokens = bound.outputs[output]
        assert tokens[:9] == free.outputs[output][:9]
        assert tuple(tokens[9:11]) == MARKER and len(tokens) == 40
    assert (await settled(await reasoned(engine, None, 40, n=2))).outputs == free.outputs


@pytest.mark.slow  # tests/engine/test_reasoning.py loses workers.
async def test_the_form_begins_behind_the_end_marker_even_if_workers_are_lost(
    engine: EngineClient, backend: BackendProcess
) -> None:
    form = StructuredOutput("json_schema", json.dumps(SCHEMA))
    fields = {"structured_output": form, "n": 3, "stop": Stop(120, token_ids=END.to_bytes(4, "little"))}
    whole = await settled(await reasoned(engine, 12, 120, **fields))
    for tokens in whole.outputs.values():
        assert tuple(tokens[12:14]) == MARKER
        jsonschema.validate(json.loads(text_of(tokens[14:])), SCHEMA)
    again = await reasoned(engine, 12, 120, **fields)
    for pid in backend.worker_pids():
        os.kill(pid, signal.SIGKILL)
    assert (await settled(again)).outputs == whole.outputs


async def test_markers_that_can_not_be_are_refused_at_the_socket(engine: EngineClient) -> None:
    subscription = engine.subscription()
    message: engine_pb2.AddRequest = add_message(
        PROMPT, 5, handle=subscription.handle, reasoning=Reasoning((), (), begins_inside=True)
    )
    await engine.send(add=message)
    await settled(subscription)
    assert subscription.refused is not None
    assert "spec.reasoning.end_ids: must have at least 1 and at most 32 tokens" in subscription.refused.message
