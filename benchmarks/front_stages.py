"""What one token costs a service process stage by stage, without gRPC.

The stages: the engine's step is parsed and dealt out, taken as messages, encoded.

Runs the service's own code in this process on steps made beforehand, and times each stage over many
of them (CPU time of this thread). What a whole process needs beyond the sum is gRPC, its wake-ups
and the kernel; `bench_front` puts the two beside each other.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.fake_backend import text_tokens
from headrace_model_folder import ModelFolder
from headrace_protos.engine.v1 import engine_pb2
from headrace_service.api import event_wire
from headrace_service.api.session_batch import SessionBatch, SessionWire
from headrace_service.engines.step_dealing import deal
from headrace_service.streams.engine_reader import EngineReader
from headrace_service.streams.generation_stream import GenerationStream
from headrace_service.streams.ledger import DeliveryClock
from headrace_service.streams.render_state import RenderState
from headrace_service.streams.wires import EventWire
from headrace_service.text.detokenizer import PieceTable
from headrace_service.text.text_model import piece_table

_STEPS = 400


def _steps(folder: ModelFolder, num_streams: int) -> list[bytes]:
    """Encoded StepOutputs with one token for each stream."""
    tokens = text_tokens(folder)
    handles = np.arange(1, num_streams + 1, dtype="<u4")
    return [
        engine_pb2.FromEngine(
            step=engine_pb2.StepOutputs(
                step_id=step,
                handles=handles.tobytes(),
                output_indices=np.zeros(num_streams, "<u2").tobytes(),
                tokens=tokens[(handles + step) % tokens.size].tobytes(),
            )
        ).SerializeToString()
        for step in range(_STEPS)
    ]


def _pieces(folder: ModelFolder) -> PieceTable:
    table = folder.token_table
    assert table is not None
    return piece_table(table, max(folder.config.vocab_size, 1))


def _streams(pieces: PieceTable, wires: list[EventWire], ids_only: bool) -> dict[int, GenerationStream]:
    render = RenderState(skip_special=True, with_logprobs=False, ids_only=ids_only)
    return {
        handle: GenerationStream(handle, str(handle), pieces, render, DeliveryClock(0, subscribed=False), wire)
        for handle, wire in enumerate(wires, 1)
    }


def stages(folder: ModelFolder, num_streams: int) -> dict[str, Any]:
    """Microseconds of CPU per token, by way and stage."""
    pieces, encoded = _pieces(folder), _steps(folder, num_streams)
    result: dict[str, Any] = {}
    for way in ("generate", "session-ids", "session-text"):
        batch = SessionBatch(16 << 20)
        session = way != "generate"
        wires: list[EventWire] = [
            SessionWire(batch, number, deltas_are_events=False) if session else event_wire
            for number in range(1, num_streams + 1)
        ]
        streams = _streams(pieces, wires, way == "session-ids")
        result[way] = _time(encoded, streams, batch if session else None)
    return {"streams": num_streams, "us_per_token": result}


def _time(encoded: list[bytes], streams: dict[int, GenerationStream], batch: SessionBatch | None) -> dict[str, float]:
    spent = dict.fromkeys(("parse", "deal", "take", "encode"), 0)
    readers: dict[int, EngineReader] = {**streams}
    for data in encoded:
        began = time.thread_time_ns()
        step = engine_pb2.FromEngine.FromString(data).step
        parsed = time.thread_time_ns()
        deal(step, readers)
        dealt = time.thread_time_ns()
        for stream in streams.values():
            stream.take()
        taken = time.thread_time_ns()
        if batch is not None:
            batch.take()
        spent["parse"] += parsed - began
        spent["deal"] += dealt - parsed
        spent["take"] += taken - dealt
        spent["encode"] += time.thread_time_ns() - taken
    tokens = len(encoded) * len(streams)
    return {stage: round(nanoseconds / tokens / 1e3, 3) for stage, nanoseconds in spent.items()}
