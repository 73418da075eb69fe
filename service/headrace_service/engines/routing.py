"""To which of a model's engines a new request goes, where the set has several.

Owns the policy. Prompts that begin alike go to one engine, whose prefix cache then serves them all;
nothing is remembered for that, so every service process comes to the same answer, and so does the
next life of one. Each prefix has an order of its own over the engines (rendezvous hashing): the
first that serves takes its requests, unless so much is open there that they would wait far longer
than at the others. When an engine is lost or leaves only its own prefixes go elsewhere, and they
come back with it; one that joins takes prefixes from all others and moves none between them. A
tenant's idempotency key has one engine as long as that is in the set, as only that one knows what
was asked under the key. What follows a request (its readers, its end) finds its engine by the
request's id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from headrace_service.text.tokenization import TokenIds

# Tokens by which prompts are distinguished. Fewer would be what a chat template puts before
# everything; prompts that share fewer gain little of each other.
PREFIX_TOKENS = 64
# An engine has far more to do than the others with this many requests more than so many times their
# mean. Chosen, not measured: a few readers of one text stay together, a prefix that everybody has
# spreads.
_SPARE_REQUESTS = 32
_MOST_OF_MEAN = 1.5


class RoutedEngine(Protocol):
    """One engine of a model, as the policy sees it."""

    @property
    def number(self) -> int:
        """Its number among the model's engines, the same in every service process."""

    @property
    def serving(self) -> bool:
        """Whether it makes progress and takes requests."""

    @property
    def is_reachable(self) -> bool:
        """Whether it hears of requests: one that replaces a worker does, and queues them."""

    @property
    def num_open(self) -> int:
        """Requests that this process has there."""


Engine = TypeVar("Engine", bound=RoutedEngine)


class RoutingKey(NamedTuple):
    """What of a new request decides which engine it goes to."""

    token_ids: TokenIds
    cache_salt: bytes
    tenant: str
    # "": it has none.
    idempotency_key: str = ""


def choose(engines: Sequence[Engine], key: RoutingKey) -> Engine:
    """Returns the engine, of at least one, for a new request."""
    if len(engines) == 1:
        return engines[0]
    if key.idempotency_key:
        return home(engines, f"{key.tenant}/{key.idempotency_key}".encode())
    return place(engines, prefix_key(key.token_ids, key.cache_salt))


def prefix_key(token_ids: TokenIds, cache_salt: bytes) -> bytes:
    """What a prompt has in common with others that it can share cached blocks with."""
    return token_ids[:PREFIX_TOKENS].tobytes() + cache_salt


def place(engines: Sequence[Engine], key: bytes) -> Engine:
    """Returns the engine for a request of a prefix.

    Engines that serve come first, then those that will. If there is neither, the prefix's own
    engine is returned, which says what is wrong.
    """
    ordered = _ordered(engines, key)
    able = [engine for engine in ordered if engine.serving] or [engine for engine in ordered if engine.is_reachable]
    if not able:
        return ordered[0]
    most = _SPARE_REQUESTS + _MOST_OF_MEAN * sum(engine.num_open for engine in able) / len(able)
    return next(engine for engine in able if engine.num_open <= most)


def home(engines: Sequence[Engine], key: bytes) -> Engine:
    """Returns the one engine of a key, whether it serves or not.

    No other engine knows what was asked under that key before.
    """
    return _ordered(engines, key)[0]


def _ordered(engines: Sequence[Engine], key: bytes) -> list[Engine]:
    return sorted(engines, key=lambda engine: _weight(key, engine.number), reverse=True)


def _weight(key: bytes, number: int) -> bytes:
    return hashlib.blake2b(key, digest_size=8, salt=number.to_bytes(4, "big")).digest()
