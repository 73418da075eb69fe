"""A rank that is not asked for tokens sends none, and reports what it made late, once each."""

from __future__ import annotations

import os

import numpy as np

from headrace_backend.step.drafts import StepDrafts
from headrace_backend.step.messages import Notice, RecordKind, decode_message
from headrace_backend.step.plan import StepResult
from headrace_backend.step.ring import RingReader, RingWriter, create_ring
from headrace_backend.worker.channel import FollowerChannel


def test_only_late_work_is_reported() -> None:
    plans, results = create_ring(4096, 1), create_ring(4096, 1)
    reader = RingReader(results.memory, results.data_events[0], results.space_event, 0)
    channel = FollowerChannel(
        RingReader(plans.memory, plans.data_events[0], plans.space_event, 0), RingWriter(results), os.getppid()
    )
    for step_id, late_work in enumerate((0, 0, 2, 2, 3), start=1):
        channel.send_result(
            StepResult(step_id, 0, 0, np.array([5], np.int32), np.ones(1, np.uint8), late_work=late_work)
        )
    # All ranks draft the same, and one of them says what.
    channel.send_drafts(StepDrafts(6, np.array([7, 8], np.int32)))
    found = []
    while (record := reader.try_read()) is not None:
        kind, payload = record
        assert kind == RecordKind.MESSAGE
        found.append(decode_message(payload))
    assert [message.text[:1] for message in found if isinstance(message, Notice)] == ["2", "3"] and len(found) == 2
    for ring in (plans, results):
        ring.close()
