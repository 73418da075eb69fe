"""Trace contexts that callers send, by metadata and in sessions."""

from __future__ import annotations

import pytest
from tests.clients.canned_service import CannedServer

from headrace import AsyncClient, Client, InvalidRequest
from headrace.trace_context import checked, new_traceparent, trace_id_of
from headrace_service.tracing import context as server_context

CONTEXT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def test_every_call_that_generates_sends_its_context(server: CannedServer) -> None:
    with Client(server.address, metadata=[("x-own", "kept")]) as client:
        list(client.generate("hello", traceparent=CONTEXT))
        list(client.chat("hello", traceparent=CONTEXT))
        client.complete("hello", traceparent=CONTEXT)
        client.submit("hello", traceparent=CONTEXT)
        list(client.generate("hello"))
    *traced, plain = server.seen.metadata
    assert [(seen["traceparent"], seen["x-own"]) for seen in traced] == [(CONTEXT, "kept")] * 4
    assert "traceparent" not in plain


async def test_so_does_the_asyncio_client(server: CannedServer) -> None:
    async with AsyncClient(server.address) as client:
        async for _ in client.generate("hello", traceparent=CONTEXT):
            pass
        await client.complete("hello", traceparent=CONTEXT)
    assert [seen["traceparent"] for seen in server.seen.metadata] == [CONTEXT] * 2


def test_a_generation_of_a_session_has_its_own(server: CannedServer) -> None:
    with Client(server.address) as client, client.session() as session:
        list(session.submit("hello", traceparent=CONTEXT))
        with pytest.raises(InvalidRequest, match="traceparent"):
            session.submit("hello", traceparent="nonsense")
    submits = [request.submit for request in server.seen.requests if hasattr(request, "submit")]
    assert [submit.traceparent for submit in submits] == [CONTEXT]


# What callers may send, and whether it is a context: of the server and of each client alike.
LATER = "cc" + CONTEXT[2:]
RULES = {
    CONTEXT: True,
    CONTEXT[:-2] + "00": True,
    LATER: True,
    LATER + "-what-comes-later": True,
    LATER + "-": True,
    LATER + "-" + "x" * 200: True,
    LATER + "-" + "x" * 201: False,
    LATER + "x": False,
    LATER + "-\x7f": False,
    LATER + "-x\n": False,
    CONTEXT + "-more": False,
    CONTEXT + "\n": False,
    "ff" + CONTEXT[2:]: False,
    CONTEXT.replace("a", "0"): False,
    CONTEXT.replace("b", "0"): False,
    CONTEXT.upper(): False,
    CONTEXT[1:]: False,
    "nonsense": False,
    "": False,
}


@pytest.mark.parametrize(("context", "is_one"), RULES.items())
def test_client_and_server_have_one_rule(context: str, is_one: bool) -> None:
    assert (server_context.parse(context) is not None) is is_one
    if is_one:
        assert checked(context) == context and trace_id_of(context) == "a" * 32
        return
    with pytest.raises(InvalidRequest, match="traceparent"):
        checked(context)


@pytest.mark.parametrize("malformed", [context for context, is_one in RULES.items() if not is_one])
def test_a_malformed_context_is_refused_before_it_is_sent(server: CannedServer, malformed: str) -> None:
    with Client(server.address) as client, pytest.raises(InvalidRequest, match="traceparent"):
        client.generate("hello", traceparent=malformed)
    assert not server.seen.requests


def test_a_new_context_is_sampled_and_new() -> None:
    contexts = {new_traceparent() for _ in range(100)}
    assert len({trace_id_of(context) for context in contexts}) == 100 and all(
        context.endswith("-01") for context in contexts
    )
