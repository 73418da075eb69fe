"""Requests whose prefix is cached go first where blocks are short, within bounds."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Harness, Reader, request
from tests.support.examples import examples

from headrace_backend.engine.request import EngineRequest
from headrace_backend.engine.scheduling import cached_first

# Tokens of a prefix, of which the pools below hold one but not two.
SHARED = 320
HEAD_START_NS = round(cached_first.HEAD_START_S * 1e9)


def prompt(prefix: int, number: int) -> list[int]:
    """The tokens of a prefix, then some of the number's own."""
    return [1 + (index * (prefix + 2) + index // 20) % 20 for index in range(SHARED)] + [1 + number % 20] * 10


def harness() -> Harness:
    return Harness(num_blocks=30, max_num_seqs=16, max_num_batched_tokens=128)


def in_turns(count: int, **changes: object) -> list[EngineRequest]:
    return [request(prompt(number % 2, number), 2, **changes) for number in range(count)]


def serve(engine: Harness, specs: list[EngineRequest], gap_ns: int) -> list[Reader]:
    """Adds requests one after the other, before anything is computed, and answers all."""
    readers = []
    for spec in specs:
        readers.append(engine.add(spec))
        engine.now_ns += gap_ns
    engine.run()
    assert [reader.tokens[0] for reader in readers] == [expected_tokens(spec, 0) for spec in specs]
    return readers


def cached_tokens(reader: Reader) -> int:
    assert reader.started is not None
    return reader.started.cached_tokens


def test_prefixes_in_turns_are_computed_once_where_the_pool_holds_one() -> None:
    engine = harness()
    specs = in_turns(12)
    readers = serve(engine, specs, 0)
    assert [cached_tokens(reader) > 0 for reader in readers] == 2 * [False] + 10 * [True]
    assert engine.worker.num_tokens < 2 * SHARED + 12 * 30


def test_who_came_too_late_does_not_go_first() -> None:
    engine = harness()
    readers = serve(engine, in_turns(6), HEAD_START_NS + 1)
    # Each request comes just later than the one before may be overtaken by.
    assert all(cached_tokens(reader) < SHARED // 2 for reader in readers)


def test_another_tenants_cached_prefix_does_not_go_first() -> None:
    engine = harness()
    specs = [request(prompt(number % 2, number), 2, tenant=f"t{number % 2}") for number in range(6)]
    readers = serve(engine, specs, 0)
    assert all(cached_tokens(reader) < SHARED // 2 for reader in readers)


def test_order_stays_where_the_front_fits_free_blocks() -> None:
    engine = Harness(num_blocks=100, max_num_seqs=1, max_num_batched_tokens=128)
    order: list[int] = []
    readers = [engine.add(spec) for spec in in_turns(4)]
    while engine.engine.has_work:
        engine.checked_step()
        order += [number for number, reader in enumerate(readers) if reader.done is not None and number not in order]
    assert order == [0, 1, 2, 3]


@pytest.mark.one_in(2)
@hypothesis.settings(max_examples=examples(60), deadline=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1), st.integers(0, 3)), max_size=25),
    st.integers(26, 60),
    st.integers(1, 6),
)
def test_nobody_is_overtaken_by_who_came_much_later(
    arrivals: list[tuple[int, int, int, int]], num_blocks: int, num_rows: int
) -> None:
    """Whoever has its first token before one that came earlier came soon after it, or is smaller.

    All prompts are equally long, so that each of them fits where another one does.
    """
    engine = Harness(num_blocks=num_blocks, max_num_seqs=num_rows, max_num_batched_tokens=400)
    readers: list[tuple[int, int, Reader]] = []
    first_tokens: dict[int, int] = {}
    numbers = iter(range(1_000_000))

    def step() -> None:
        engine.checked_step()
        now = next(numbers)
        for index, (_, _, reader) in enumerate(readers):
            if reader.tokens:
                first_tokens.setdefault(index, now)

    for number, (prefix, tenant, gap, steps) in enumerate(arrivals):
        engine.now_ns += gap * HEAD_START_NS
        spec = request(prompt(prefix, number), 2, tenant=f"t{tenant}")
        readers.append((engine.now_ns, tenant, engine.add(spec)))
        for _ in range(steps):
            step()
    while engine.engine.has_work:
        step()
    assert len(first_tokens) == len(readers)
    # Steps take microseconds on this clock, so that gaps alone tell when somebody came.
    for late, (late_ns, late_tenant, _) in enumerate(readers):
        for early, (early_ns, early_tenant, _) in enumerate(readers[:late]):
            if early_tenant == late_tenant and late_ns - early_ns > 1.5 * HEAD_START_NS:
                assert first_tokens[early] <= first_tokens[late]
