"""Callers of a soak of a whole server, until the time is up.

They make every kind of call of the public client, in random order.

Owns what is sent and which outcomes are right for it. Caller `index` draws from the seed and its
index alone. What the server's processes take meanwhile is `soak_server`'s.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable

from headrace.aio import AsyncClient
from headrace.errors import DeadlineExceeded, HeadraceError, InvalidRequest, Overloaded
from headrace.spec import GenerationOptions

_WORDS = "once upon a time there was a little dog who liked to play in the garden with his friends every day".split()
_LONGEST_PROMPT_WORDS = 120
_MOST_TOKENS = 64
_MOST_OF_A_SESSION = 5
# Most seconds that a caller with a deadline waits: some of these calls end before it, most of them
# by it.
_DEADLINE_S = 0.1


@dataclasses.dataclass(slots=True)
class Outcomes:
    """What came of the calls of all callers.

    Attributes:
        calls: ended calls by kind.
        refused: calls that ended by the error that they asked for, or because the server was full,
            by kind and error.
        wrong: a sentence for each call that ended as it must not.
    """

    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of call: how it is made, how often, and the error that is its right outcome too."""

    make: Callable[[AsyncClient, random.Random], Awaitable[None]]
    weight: int = 1
    error: type[HeadraceError] | None = None


def _prompt(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=int(_LONGEST_PROMPT_WORDS ** rng.random())))


def _options(rng: random.Random) -> GenerationOptions:
    """Options of a generation.

    Each of those that cost the server something is asked for by some calls.
    """
    options = GenerationOptions(
        max_tokens=int(_MOST_TOKENS ** rng.random()), temperature=rng.choice([0.0, 0.7, 1.2]), seed=rng.getrandbits(60)
    )
    if rng.random() < 0.2:
        options["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.1:
        options["prompt_logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.2:
        options["stop"] = [".", "dog"]
    if rng.random() < 0.1:
        options["n"] = rng.randint(2, 4)
    if rng.random() < 0.2:
        options["repetition_penalty"] = 1.2
    if rng.random() < 0.1:
        options["bad_words"] = ["dog"]
    return options


async def _generate(client: AsyncClient, rng: random.Random) -> None:
    await client.generate(_prompt(rng), **_options(rng)).result()


async def _complete(client: AsyncClient, rng: random.Random) -> None:
    await client.complete(_prompt(rng), **_options(rng))


async def _chat(client: AsyncClient, rng: random.Random) -> None:
    await client.chat(_prompt(rng), **_options(rng)).result()


async def _submit(client: AsyncClient, rng: random.Random) -> None:
    submitted = await client.submit(_prompt(rng), **_options(rng))
    await client.subscribe(submitted).result()


async def _session(client: AsyncClient, rng: random.Random) -> None:
    async with client.session() as session:
        generations = [session.submit(_prompt(rng), **_options(rng)) for _ in range(rng.randint(1, _MOST_OF_A_SESSION))]
        for generation in generations:
            await generation.result()


async def _leave(client: AsyncClient, rng: random.Random) -> None:
    """Leaves a stream after some of its messages."""
    options = _options(rng)
    options["max_tokens"] = 4 * _MOST_TOKENS
    stream = client.generate(_prompt(rng), **options)
    messages_left = rng.randint(0, 6)
    async for _ in stream:
        if not messages_left:
            break
        messages_left -= 1
    await stream.aclose()


async def _deadline(client: AsyncClient, rng: random.Random) -> None:
    timeout = rng.uniform(0.001, _DEADLINE_S)
    await client.complete(_prompt(rng), timeout=timeout, max_tokens=4 * _MOST_TOKENS, ignore_eos=True)


async def _invalid(client: AsyncClient, rng: random.Random) -> None:
    await client.complete(_prompt(rng), temperature=-1.0)


async def _tokenize(client: AsyncClient, rng: random.Random) -> None:
    await client.detokenize(await client.tokenize(_prompt(rng)))


async def _look(client: AsyncClient, _rng: random.Random) -> None:
    """Asks for models, load and the newest requests."""
    await client.list_models()
    await client.load()
    async for _ in client.list_requests(page_size=8):
        break


KINDS: dict[str, _Kind] = {
    "generate": _Kind(_generate, weight=3),
    "complete": _Kind(_complete, weight=2),
    "chat": _Kind(_chat, weight=2),
    "submit": _Kind(_submit),
    "session": _Kind(_session),
    "leave": _Kind(_leave),
    "deadline": _Kind(_deadline, error=DeadlineExceeded),
    "invalid": _Kind(_invalid, error=InvalidRequest),
    "tokenize": _Kind(_tokenize),
    "look": _Kind(_look),
}


async def call_until(client: AsyncClient, seed: int, index: int, end_s: float, outcomes: Outcomes) -> None:
    """Makes calls, one after another, until `end_s` (time.monotonic) and notes their outcomes."""
    rng = random.Random(f"{seed} {index}")
    names, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
    while time.monotonic() < end_s:
        name = rng.choices(names, weights)[0]
        kind = KINDS[name]
        try:
            await kind.make(client, rng)
        except HeadraceError as error:
            if isinstance(error, Overloaded) or (kind.error is not None and isinstance(error, kind.error)):
                outcomes.refused[f"{name}: {type(error).__name__}"] += 1
            else:
                outcomes.wrong.append(f"{name} of caller {index}: {type(error).__name__}: {error}")
        outcomes.calls[name] += 1
