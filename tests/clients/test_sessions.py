"""Sessions of both clients.

Steps, events, one view per generation, cancellation, attaching, errors of one and of all.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.clients.canned_service import PROMPT_TOKENS, REQUEST_ID, CannedServer, answer, token, word
from tests.support.processes import wait_until

import headrace
from headrace import Accepted, AsyncClient, Client, Delta, Done, Failed, FinishReason, OutputFinished
from headrace.sessions.session_state import SessionEvent, SessionState, SessionStep, step_from_proto, submission
from headrace.v1 import generation_pb2, inference_pb2


def test_generations_of_a_session_read_as_streams(client: Client, server: CannedServer) -> None:
    with client.session() as session:
        first = session.submit("hello", max_tokens=3)
        second = session.submit(token_ids=[5, 6], max_tokens=5, logprobs=2, prompt_logprobs=1)
        third = session.submit(messages=[("user", "hi")], max_tokens=4, n=2)
        assert first.result().text == answer(3)
        assert list(second.text()) == [word(i) for i in range(5)]
        completion = third.result()
        assert [output.text for output in completion.outputs] == [answer(4), answer(4, 1)]
        assert completion.outputs[1].token_ids == tuple(token(i, 1) for i in range(4))
        whole = second.result()
        assert whole.logprobs is not None and len(whole.logprobs.sampled) == 5
        assert whole.prompt_logprobs is not None and len(whole.prompt_logprobs.logprobs.sampled) == PROMPT_TOKENS - 1
        assert first.request_id == REQUEST_ID and first.usage is not None and first.ledger is not None
    assert server.seen.attempts["Session"] == 1
    assert [request.stream_id for request in server.seen.requests if request] == [1, 2, 3]


def test_steps_are_columns_of_all_generations(client: Client) -> None:
    with client.session() as session:
        ids = [session.submit("hello", max_tokens=4).stream_id for _ in range(3)]
        session.finish()
        steps = list(session.steps())
    for stream_id in ids:
        rows = [row for step in steps for row in zip(step.stream_ids, step.token_ids, step.texts, strict=True)]
        mine = [row for row in rows if row[0] == stream_id]
        assert [row[1] for row in mine] == [token(i) for i in range(4)]
        assert "".join(row[2] for row in mine) == answer(4)
        kinds = [type(e.event) for step in steps for e in step.events if e.stream_id == stream_id]
        assert kinds == [Accepted, headrace.Started, OutputFinished, Done]


def test_steps_keep_what_names_and_ends_a_generation(client: Client) -> None:
    with client.session() as session:
        generation = session.submit("hello", max_tokens=2)
        session.finish()
        for _ in session.steps():
            pass
        assert generation.request_id == REQUEST_ID
        assert generation.usage is not None and generation.usage.output_tokens == 2


def test_token_ids_only_comes_without_text(client: Client) -> None:
    with client.session() as session:
        session.submit("hello", max_tokens=3, token_ids_only=True)
        session.finish()
        steps = list(session.steps())
    assert [token_id for step in steps for token_id in step.token_ids] == [token(i) for i in range(3)]
    assert {text for step in steps for text in step.texts} == {""}


def test_events_name_their_generation_and_one_that_fails_fails_alone(client: Client) -> None:
    with client.session() as session:
        good, bad = session.submit("hello", max_tokens=2), session.submit("invalid")
        session.finish()
        events = list(session.events())
    assert [e for g, e in events if g is good and isinstance(e, Delta)] == [
        Delta(0, i, (token(i),), word(i)) for i in range(2)
    ]
    (failed,) = [e for g, e in events if g is bad]
    assert isinstance(failed, Failed) and isinstance(failed.error, headrace.InvalidRequest)
    assert failed.error.violations[0].field == "spec.text"
    # All of it has been handed out, so the whole answer is there.
    assert good.result().text == answer(2)


def test_a_refused_generation_raises_and_the_session_goes_on(client: Client) -> None:
    with client.session() as session:
        with pytest.raises(headrace.InvalidRequest, match="invalid request"):
            session.submit("invalid").result()
        with pytest.raises(headrace.NotFound):
            session.attach("req-other").result()
        assert session.submit("hello", max_tokens=2).result().text == answer(2)


def test_cancel_ends_one_generation(client: Client, server: CannedServer) -> None:
    server.service.step_seconds = 0.005
    with client.session() as session:
        endless, other = session.submit("endless"), session.submit("hello", max_tokens=6)
        for event in endless:
            if isinstance(event, Delta) and event.first_token_index == 2:
                endless.cancel()
        assert endless.result().finish_reason is FinishReason.CANCELLED
        endless.cancel()
        assert other.result().text == answer(6)
    cancels = [request for request in server.seen.requests if request and request.HasField("cancel")]
    assert len(cancels) == 1


def test_a_cancellation_that_comes_too_late_changes_nothing(server: CannedServer) -> None:
    """A cancellation that comes too late is no other end.

    The server answers it with an error for an id that has ended.
    """
    with Client(server.address) as client, client.session() as session:
        generation = session.submit("hello", max_tokens=1)
        request = session._state.cancel(generation.stream_id)
        assert generation.result().text == answer(1)
        session._send(request)
        wait_until(lambda: any(r and r.HasField("cancel") for r in server.seen.requests))
        assert session.submit("hello", max_tokens=2).result().text == answer(2)


def test_detach_drops_what_was_not_read(client: Client, server: CannedServer) -> None:
    server.service.step_seconds = 0.005
    with client.session() as session:
        endless, other = session.submit("endless"), session.submit("hello", max_tokens=4)
        next(endless)
        endless.detach()
        assert list(endless) == []
        assert other.result().text == answer(4)
    (detach,) = [request for request in server.seen.requests if request and request.HasField("cancel")]
    assert detach.cancel.detach


def test_attach_continues_from_any_token(client: Client) -> None:
    with client.session() as session:
        generation = session.attach(REQUEST_ID, from_token=7)
        deltas = [event for event in generation if isinstance(event, Delta)]
    assert [i for delta in deltas for i in delta.token_ids] == [token(i) for i in range(7, 12)]
    assert deltas[0].first_token_index == 7


def test_cancelling_works_after_finish(client: Client, server: CannedServer) -> None:
    server.service.step_seconds = 0.005
    with client.session() as session:
        endless = session.submit("endless")
        session.finish()
        with pytest.raises(RuntimeError, match="finished"):
            session.submit("hello")
        for generation, event in session.events():
            if isinstance(event, Delta):
                generation.cancel()
        assert endless.result().finish_reason is FinishReason.CANCELLED


def test_leaving_the_block_cancels_on_the_server(client: Client, server: CannedServer) -> None:
    with client.session() as session:
        generation = session.submit("endless")
        next(generation)
    assert server.seen.cancelled.wait(120)
    assert list(generation) == []
    with pytest.raises(RuntimeError, match="closed"):
        session.submit("hello")


def test_a_session_is_read_in_one_way(client: Client) -> None:
    with client.session() as session:
        generation = session.submit("hello")
        next(session.steps())
        with pytest.raises(RuntimeError, match=r"read by steps\(\) already"):
            next(generation)
        with pytest.raises(RuntimeError, match=r"read by steps\(\) already"):
            next(session.events())


def test_threads_share_a_session(client: Client) -> None:
    with client.session() as session, ThreadPoolExecutor(8) as pool:
        generations = [session.submit("hello", max_tokens=20 + i) for i in range(8)]
        texts = list(pool.map(lambda generation: "".join(generation.text()), generations))
    assert texts == [answer(20 + i) for i in range(8)]


def test_closing_from_another_thread_ends_a_waiting_reader(client: Client, server: CannedServer) -> None:
    server.service.step_seconds = 2
    session = client.session()
    generation = session.submit("endless")
    next(generation)
    threading.Timer(0.1, session.close).start()
    # Endless, with two seconds between its tokens.
    assert len(list(generation)) < 5


def test_a_broken_session_fails_its_generations_which_can_be_attached_again(server: CannedServer) -> None:
    server.service.session_breaks_after = 4
    with Client(server.address) as client:
        with client.session() as session:
            generation, other = session.submit("hello", max_tokens=12), session.submit("hello", max_tokens=12)
            seen: list[Delta] = []
            with pytest.raises(headrace.Unavailable) as caught:
                seen.extend(event for event in generation if isinstance(event, Delta))
            assert caught.value.request_id == REQUEST_ID
            with pytest.raises(headrace.Unavailable):
                other.result()
            with pytest.raises(headrace.Unavailable):
                session.submit("hello")
        server.service.session_breaks_after = None
        with client.session() as session:
            rest = session.attach(REQUEST_ID, from_token=seen[-1].first_token_index + 1).result()
    assert "".join(delta.text for delta in seen) + rest.text == answer(12)


def test_a_session_ends_at_its_timeout(client: Client) -> None:
    with client.session(timeout=0.3) as session, pytest.raises(headrace.DeadlineExceeded):
        session.submit("endless").result()


def test_what_cannot_be_sent_is_refused_before_anything_is(client: Client, server: CannedServer) -> None:
    with client.session() as session:
        for arguments in ({}, {"prompt": "a", "token_ids": [1]}, {"prompt": "a", "messages": "b"}):
            with pytest.raises(headrace.InvalidRequest, match="exactly one"):
                session.submit(**arguments)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="did you mean"):
            session.submit("a", temprature=1)  # type: ignore[call-arg]
        session.submit("a", max_tokens=1, detached=True, idempotency_key="mine").result()
    (sent,) = [request for request in server.seen.requests if request]
    assert (sent.stream_id, sent.submit.detached, sent.submit.idempotency_key) == (1, True, "mine")


@given(
    rows=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 99), st.sampled_from(["", "a", "é"]))),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_columns_become_deltas_without_gaps(rows: list[tuple[int, int, int, str]], cuts: list[int]) -> None:
    """However the server cuts the tokens into steps, an output's deltas follow each other.

    Together they hold its tokens and text.
    """
    state = SessionState()
    for _ in range(3):
        state.submit(submission("x", None, None, {}, None, None, None, {}))
    edges = sorted({0, *(min(cut, len(rows)) for cut in cuts), len(rows)})
    deltas: list[tuple[int, Delta]] = []
    for first, end in zip(edges, edges[1:], strict=False):
        columns: tuple[tuple[int, ...], ...] = tuple(zip(*rows[first:end], strict=True))  # type: ignore[arg-type]
        step = SessionStep(*columns, events=())  # type: ignore[arg-type, misc]
        for event in state.events(step):
            assert isinstance(event.event, Delta)
            deltas.append((event.stream_id, event.event))
    for stream_id in (1, 2, 3):
        for output in range(3):
            mine = [delta for sid, delta in deltas if sid == stream_id and delta.output_index == output]
            expected = [row for row in rows if row[:2] == (stream_id, output)]
            assert [t for delta in mine for t in delta.token_ids] == [row[2] for row in expected]
            assert "".join(delta.text for delta in mine) == "".join(row[3] for row in expected)
            position = 0
            for delta in mine:
                assert delta.first_token_index == position
                position += len(delta.token_ids)


def test_events_newer_than_this_client_are_left_out() -> None:
    response = inference_pb2.SessionResponse()
    response.events.add(stream_id=1, event=generation_pb2.GenerationEvent())
    response.events.add(stream_id=1, event=generation_pb2.GenerationEvent(started=generation_pb2.Started()))
    assert step_from_proto(response).events == (SessionEvent(1, headrace.Started(0)),)


async def test_async_generations_read_by_tasks(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client, client.session() as session:
        generations = [session.submit("hello", max_tokens=5 + i, logprobs=0 if i % 2 else None) for i in range(6)]
        completions = await asyncio.gather(*(generation.result() for generation in generations))
        assert [completion.text for completion in completions] == [answer(5 + i) for i in range(6)]
        pieces = [piece async for piece in session.submit(messages="hi", max_tokens=2).text()]
        assert pieces == [word(0), word(1)]
    assert server.seen.attempts["Session"] == 1


async def test_async_steps_and_events(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client:
        async with client.session() as session:
            session.submit("hello", max_tokens=3)
            session.finish()
            steps = [step async for step in session.steps()]
        assert [text for step in steps for text in step.texts] == [word(i) for i in range(3)]
        async with client.session() as session:
            bad = session.submit("invalid")
            attached = session.attach(REQUEST_ID, from_token=10)
            session.finish()
            events = [(generation, event) async for generation, event in session.events()]
        assert [type(event) for generation, event in events if generation is bad] == [Failed]
        assert (await attached.result()).text == word(10) + word(11)


async def test_a_cancelled_task_does_not_end_the_session(server: CannedServer) -> None:
    server.service.step_seconds = 0.02
    async with AsyncClient(server.address) as client, client.session() as session:
        endless, other = session.submit("endless"), session.submit("slow", max_tokens=8)

        async def read() -> None:
            async for _ in endless:
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.15)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await other.result()).text == answer(8)
        endless.cancel()
        assert (await endless.result()).finish_reason is FinishReason.CANCELLED
        # What came between the cancellation of the task and the end was kept.
        text = (await endless.result()).text
        assert text == answer(len(text.split()))


async def test_async_cancelled_steps_lose_no_step(server: CannedServer) -> None:
    server.service.step_seconds = 0.02
    tokens: list[int] = []
    async with AsyncClient(server.address) as client, client.session() as session:
        session.submit("hello", max_tokens=30)
        session.finish()

        async def read() -> None:
            async for step in session.steps():
                tokens.extend(step.token_ids)

        while len(tokens) < 30:
            try:
                await asyncio.wait_for(read(), 0.05)
            except TimeoutError:
                continue
    assert tokens == [token(i) for i in range(30)]


async def test_async_session_failures(server: CannedServer) -> None:
    server.service.session_breaks_after = 3
    async with AsyncClient(server.address) as client:
        async with client.session() as session:
            generations = [session.submit("hello", max_tokens=50) for _ in range(2)]
            results = await asyncio.gather(*(g.result() for g in generations), return_exceptions=True)
            assert all(isinstance(result, headrace.Unavailable) for result in results)
            with pytest.raises(headrace.Unavailable):
                session.submit("hello")
        server.service.session_breaks_after = None
        async with client.session() as session:
            generation = session.submit("endless")
            await anext(generation)
        assert [event async for event in generation] == []
        with pytest.raises(RuntimeError, match="closed"):
            session.submit("hello")


async def test_async_no_task_is_left_behind(server: CannedServer) -> None:
    before = asyncio.all_tasks()
    async with AsyncClient(server.address) as client, client.session() as session:
        await anext(session.submit("endless"))
    async with asyncio.timeout(120):
        while asyncio.all_tasks() != before:
            await asyncio.sleep(0.01)
