"""Callers of every kind at once, each with a trace of its own, and what was reported to them.

Traces must agree with it.

Owns the mix (streams, chats, whole answers, several outputs, long prompts, detached generations, a
session, Triton's stream, callers who leave) and the ledger of tokens as the callers counted them.
Public clients only.
"""

from __future__ import annotations

import concurrent.futures
import json
import queue
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as triton

import headrace
from headrace.events import Ledger
from headrace.trace_context import new_traceparent, trace_id_of

_TIMEOUT_S = 120.0
_WORDS = "the old sailor told a story about blocks of keys and values in a valley full of apple trees".split()


@dataclass(frozen=True)
class Answer:
    """What one caller saw.

    Attributes:
        kind: which caller.
        trace_id: the trace that it asked for.
        span_id: its own span, which the server's stand under.
        tokens: for each output, how many tokens came; None: the caller left, or its wire does not
            say.
        ledger: where the time went; None: as above.
    """

    kind: str
    trace_id: str
    span_id: str
    tokens: tuple[int, ...] | None = None
    ledger: Ledger | None = None
    request_id: str = ""


def prompt(chance: random.Random, words: int) -> str:
    """A prompt of about that many tokens, unlike any other."""
    return " ".join(chance.choices(_WORDS, k=words))


def mixed_load(address: str, *, rounds: int = 4, seed: int = 1, threads: int = 12) -> list[Answer]:
    """Runs all kinds of callers, `rounds` of each, some of them at once; returns what they saw."""
    chance = random.Random(seed)
    with headrace.Client(address) as client, concurrent.futures.ThreadPoolExecutor(threads) as pool:
        callers: list[Callable[[], list[Answer]]] = []
        for _ in range(rounds):
            some = chance.randint
            callers += [
                partial(_generate, client, prompt(chance, 6), some(8, 60)),
                partial(_generate, client, prompt(chance, 500), some(40, 80)),
                partial(_generate, client, prompt(chance, 12), some(4, 24), n=3),
                partial(_chat, client, some(8, 30)),
                partial(_complete, client, prompt(chance, 20), some(4, 30)),
                partial(_submit, client, prompt(chance, 30), some(8, 40)),
                partial(_leave, client, prompt(chance, 8)),
                partial(_session, client, [prompt(chance, 10) for _ in range(4)]),
                partial(_triton, address, prompt(chance, 9), some(4, 20)),
            ]
        chance.shuffle(callers)
        found = [future.result() for future in [pool.submit(caller) for caller in callers]]
    return [answer for answers in found for answer in answers]


def traced_as(kind: str, traceparent: str) -> dict[str, str]:
    """What an Answer has from its context."""
    return {"kind": kind, "trace_id": trace_id_of(traceparent), "span_id": traceparent.split("-")[2]}


def _whole(kind: str, traceparent: str, completion: Any) -> list[Answer]:
    tokens = tuple(len(output.token_ids) for output in completion.outputs)
    assert sum(tokens) == completion.usage.output_tokens
    return [
        Answer(
            **traced_as(kind, traceparent), tokens=tokens, ledger=completion.ledger, request_id=completion.request_id
        )
    ]


def _generate(client: headrace.Client, text: str, max_tokens: int, **options: Any) -> list[Answer]:
    context = new_traceparent()
    stream = client.generate(
        text, traceparent=context, timeout=_TIMEOUT_S, max_tokens=max_tokens, ignore_eos=True, **options
    )
    return _whole("generate", context, stream.result())


def _chat(client: headrace.Client, max_tokens: int) -> list[Answer]:
    context = new_traceparent()
    stream = client.chat(
        "What is a KV cache?", traceparent=context, timeout=_TIMEOUT_S, max_tokens=max_tokens, ignore_eos=True
    )
    return _whole("chat", context, stream.result())


def _complete(client: headrace.Client, text: str, max_tokens: int) -> list[Answer]:
    context = new_traceparent()
    answer = client.complete(text, traceparent=context, timeout=_TIMEOUT_S, max_tokens=max_tokens, ignore_eos=True)
    return _whole("complete", context, answer)


def _submit(client: headrace.Client, text: str, max_tokens: int) -> list[Answer]:
    """Detached, and read at once by two."""
    context = new_traceparent()
    submitted = client.submit(text, traceparent=context, timeout=_TIMEOUT_S, max_tokens=max_tokens, ignore_eos=True)
    first = client.subscribe(submitted, timeout=_TIMEOUT_S).result()
    assert client.subscribe(submitted, timeout=_TIMEOUT_S).result().token_ids == first.token_ids
    tokens = tuple(len(output.token_ids) for output in first.outputs)
    # Its ledger is the subscription's, whose time began later than the generation's.
    return [Answer(**traced_as("submit", context), tokens=tokens, request_id=first.request_id)]


def _leave(client: headrace.Client, text: str) -> list[Answer]:
    """A caller who leaves after a few tokens."""
    context = new_traceparent()
    stream = client.generate(text, traceparent=context, timeout=_TIMEOUT_S, max_tokens=1000, ignore_eos=True)
    seen = 0
    for event in stream:
        seen += isinstance(event, headrace.Delta)
        if seen == 3:
            break
    stream.close()
    return [Answer(**traced_as("leave", context))]


def _session(client: headrace.Client, texts: list[str]) -> list[Answer]:
    """Generations of one session, each with a context of its own."""
    contexts = [new_traceparent() for _ in texts]
    with client.session(timeout=_TIMEOUT_S) as session:
        generations = [
            session.submit(text, traceparent=context, max_tokens=16, ignore_eos=True)
            for text, context in zip(texts, contexts, strict=True)
        ]
        session.finish()
        answers = [generation.result() for generation in generations]
    return [
        answer
        for context, completion in zip(contexts, answers, strict=True)
        for answer in _whole("session", context, completion)
    ]


def _triton(address: str, text: str, max_tokens: int) -> list[Answer]:
    """Triton's own client, streaming; the context comes as a header of its call."""
    context, came = new_traceparent(), queue.SimpleQueue[Any]()
    asked = json.dumps({"max_tokens": max_tokens, "ignore_eos": True})
    kinds = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES"}
    inputs = [triton.InferInput(name, [1], kind) for name, kind in kinds.items()]
    for tensor, value in zip(inputs, (text.encode(), True, asked.encode()), strict=True):
        tensor.set_data_from_numpy(np.array([value], dtype=bool if value is True else object))
    with triton.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: came.put(error), headers={"traceparent": context})
        client.async_stream_infer("demo", inputs)
        client.stop_stream()
    assert not came.empty()
    while not came.empty():
        assert (error := came.get()) is None, error
    return [Answer(**traced_as("triton", context), tokens=(max_tokens,))]
