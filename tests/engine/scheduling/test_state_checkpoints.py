"""Prompts of models with recurrent layers begin where a state was kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.engine.fake_worker import expected_tokens
from tests.engine.harness import Reader, request
from tests.engine.scheduling.test_shared_prefixes import cached_tokens, prompt
from tests.engine.stateful_worker import StatefulHarness

from headrace_backend.engine.request import AbortCause, EngineRequest
from headrace_backend.engine.scheduling import checkpoint_places
from headrace_backend.step.plan import StepPlan
from headrace_request.beam_search import BeamSearch
from headrace_request.selection_rules import NO_SAMPLING


def harness(**changes: Any) -> StatefulHarness:
    """An engine whose steps were measured as short, so that only the token budget cuts chunks."""
    engine = StatefulHarness(**{"num_blocks": 400, "model_len": 4096, "max_num_batched_tokens": 4096} | changes)
    for number in range(6):
        engine.add(request(prompt(0, 500, number), 1, tenant="measures"))
        engine.run()
    engine.replace_worker()
    return engine


def served(engine: StatefulHarness, *specs: EngineRequest) -> list[Reader]:
    """Readers of requests that arrive together, at their ends."""
    readers = [engine.add(spec) for spec in specs]
    engine.run()
    for spec, reader in zip(specs, readers, strict=True):
        assert reader.tokens[0] == expected_tokens(spec, 0)[: len(reader.tokens[0])]
    return readers


def hits(engine: StatefulHarness, *specs: EngineRequest) -> list[int]:
    """Prompt tokens that each of them begins behind, one request after the other."""
    return [cached_tokens(served(engine, spec)[0]) for spec in specs]


def test_a_prompt_that_comes_again_begins_at_its_last_whole_block() -> None:
    ids = prompt(500, 0)
    assert hits(harness(), request(ids, 1), request(ids, 1), request(ids[:497], 1)) == [0, 496, 496]


def test_a_conversation_goes_on_behind_its_last_answer() -> None:
    """It loses the answer's last tokens: fewer than lie between two places of its checkpoint."""
    engine, turn = harness(), prompt(300, 0)
    for _ in range(4):
        (reader,) = served(engine, request(turn, 100))
        behind = len(turn) + len(reader.tokens[0])
        turn = turn + reader.tokens[0] + prompt(0, 7, len(turn))
        (found,) = hits(engine, request(turn, 1))
        assert behind - checkpoint_places.LEAST_MOVE_TOKENS - 16 < found < behind


@pytest.mark.parametrize("most_settled", [1, 3, 5])
def test_a_conversation_goes_on_behind_an_answer_of_which_tokens_were_drafted(most_settled: int) -> None:
    """Its state is found where a block ends among the tokens that a step settles."""
    engine, turn, draws = harness(tokens_per_row=5, speculate_tokens="4"), prompt(300, 0), random.Random(most_settled)
    engine.choose_count = lambda most: draws.randint(min(most, (most_settled + 1) // 2), min(most, most_settled))
    for _ in range(4):
        (reader,) = served(engine, request(turn, 200))
        assert reader.done is not None and reader.done.draft_tokens > 0
        behind = len(turn) + len(reader.tokens[0])
        turn = turn + reader.tokens[0] + prompt(0, 7, len(turn))
        (found,) = hits(engine, request(turn, 1))
        assert behind - 2 * checkpoint_places.LEAST_MOVE_TOKENS < found < behind


def test_an_answer_that_others_do_not_go_on_with_leaves_its_prompt_to_them() -> None:
    """A conversation whose reasoning is left out parts from the last turn behind its prompt."""
    engine, ids = harness(), prompt(500, 0)
    assert hits(engine, request(ids, 200), request([*ids, 23, 23, 23], 1)) == [0, 496]


def test_prompts_that_part_keep_a_state_where_they_part() -> None:
    """The second one finds blocks without a state at their end, and leaves it to the third."""
    engine = harness()
    specs = [request(prompt(800, 300, number), 1) for number in range(4)]
    assert hits(engine, *specs) == [0, 0, 800, 800]


def test_short_prompts_are_computed_in_one_step() -> None:
    """A stop costs a step: it has to save more than that."""
    engine = harness()
    served(engine, request(prompt(checkpoint_places.LEAST_STOP_TOKENS - 1, 0), 1))
    assert engine.worker.next_step_id == 2


def test_a_wave_waits_for_the_state_where_its_prompts_part() -> None:
    engine = harness(num_blocks=4000, model_len=20_000, max_num_seqs=32, max_num_batched_tokens=2048)
    specs = [request(prompt(10_000, 0) + [1 + number] + prompt(0, 99, number), 1) for number in range(20)]
    readers = served(engine, *specs)
    assert [cached_tokens(reader) for reader in readers] == [0] + 19 * [10_000]
    assert engine.worker.num_tokens == 10_000 + 20 * 100


def test_a_wave_behind_one_that_kept_no_state_computes_the_prefix_once_more() -> None:
    engine = harness(num_blocks=4000, model_len=20_000, max_num_seqs=32, max_num_batched_tokens=2048)
    specs = [request(prompt(10_000, 0) + [1 + number] + prompt(0, 99, number), 1) for number in range(20)]
    served(engine, specs[0])
    before = engine.worker.num_tokens
    readers = served(engine, *specs[1:])
    assert [cached_tokens(reader) for reader in readers] == [0] + 18 * [10_000]
    assert engine.worker.num_tokens - before == 10_000 + 19 * 100


def test_whoever_comes_late_computes_what_no_state_was_kept_of() -> None:
    """The prompt that is computed is beyond the point where both part: nobody waits for it."""
    engine = harness(max_num_batched_tokens=512)
    engine.add(request(prompt(600, 1500, 1), 1))
    for _ in range(3):
        engine.step()
    late = engine.add(request(prompt(600, 400, 2), 1))
    engine.run()
    # A moving checkpoint stood at the chunk's end, and has moved on since.
    assert cached_tokens(late) in (0, 512)


@pytest.mark.parametrize("changes", [{"tenant": "other"}, {"cache_salt": b"salt"}], ids=["tenant", "salt"])
def test_no_state_is_found_by_others(changes: dict[str, Any]) -> None:
    ids = prompt(500, 0)
    assert hits(harness(), request(ids, 1), request(ids, 1, **changes), request(ids, 1)) == [0, 0, 496]


def test_nothing_is_found_without_checkpoints_and_nothing_copied() -> None:
    engine, ids = harness(num_checkpoints=0), prompt(500, 0)
    assert hits(engine, request(ids, 1), request(ids, 1)) == [0, 0]
    assert engine.worker.copied == []


def test_a_preempted_prompt_goes_on_from_its_last_checkpoint() -> None:
    """Decodes need blocks at once, and take those of a half-computed prompt."""
    engine = StatefulHarness(num_blocks=14, max_num_batched_tokens=64)
    for number in range(4):
        engine.add(request(prompt(0, 14, number), 8))
    spec = request(prompt(140, 0), max_tokens=2)
    reader = engine.add(spec)
    while engine.engine.load().preemptions == 0:
        assert engine.engine.has_work, "nobody was preempted"
        engine.checked_step()
    before = engine.worker.num_tokens
    engine.run()
    assert reader.tokens[0] == expected_tokens(spec, 0)
    assert engine.worker.num_tokens - before < 140


def test_a_cancelled_prompt_leaves_its_settled_state() -> None:
    engine = harness(max_num_batched_tokens=64)
    cancelled = request(prompt(300, 0))
    engine.add(cancelled)
    for _ in range(3):
        engine.step()
    engine.engine.abort(cancelled.request_id, "", AbortCause.CANCELLED)
    # Of the three chunks that settled the last one's state is left, of the one on its way nothing.
    assert hits(engine, request(prompt(300, 20))) == [192]


def test_the_one_unused_for_longest_goes_first_and_with_its_blocks() -> None:
    engine = harness(num_checkpoints=2)

    def asked(number: int) -> EngineRequest:
        return request(prompt(0, 400, number), 1)

    assert hits(engine, *map(asked, (1, 2, 1, 3, 1, 2))) == [0, 0, 384, 0, 384, 0]
    # As many blocks as a prompt of 4,000 takes leave none to the others, and no state.
    small = harness(num_blocks=251)
    assert hits(small, asked(1), request(prompt(4000, 0), 1), asked(1)) == [0, 0, 0]


def test_long_answers_leave_half_of_the_checkpoints_to_prompts() -> None:
    engine = harness(num_checkpoints=4, max_num_seqs=8)
    assert hits(engine, request(prompt(400, 0), 1)) == [0]
    served(engine, *(request(prompt(0, 10, number), 300) for number in range(8)))
    assert hits(engine, request(prompt(400, 0), 1)) == [384]


def test_outputs_begin_behind_a_kept_state() -> None:
    engine, ids = harness(), prompt(500, 0)
    served(engine, request(ids, 1))
    spec = request(ids, 80, n=3)
    (reader,) = served(engine, spec)
    assert cached_tokens(reader) == 496
    assert [reader.tokens[index] for index in range(3)] == [expected_tokens(spec, index) for index in range(3)]


def test_beams_begin_behind_a_kept_state() -> None:
    ids = prompt(500, 0)
    options = {"beam_search": BeamSearch(3), "n": 2, "temperature": NO_SAMPLING.temperature}
    found = []
    for engine in (harness(), harness(num_checkpoints=0)):
        served(engine, request(ids, 1))
        reader = engine.add(request(ids, 40, **options))
        engine.run()
        found.append((cached_tokens(reader), reader.tokens))
    assert [cached for cached, _ in found] == [496, 0]
    assert found[0][1] == found[1][1]


def test_a_poisoned_state_is_never_found() -> None:
    engine, ids = harness(), prompt(500, 0)
    engine.worker.poison_after = 10
    engine.add(request(ids, 1))
    engine.run()
    assert hits(engine, request(ids, 1)) == [0]


def test_a_lost_worker_takes_its_checkpoints_with_it() -> None:
    engine, ids = harness(), prompt(500, 0)
    served(engine, request(ids, 1))
    engine.replace_worker()
    assert hits(engine, request(ids, 1), request(ids, 1)) == [0, 496]


def test_a_state_that_the_same_step_saves_is_read_from_its_row() -> None:
    """The step that copies it into its slot comes only with the next request, which wants it."""
    engine, ids = harness(), prompt(0, 64, 3)
    assert hits(engine, request(ids, 1)) == [0] and engine.worker.copied == []
    assert hits(engine, request([*ids, 7], 4), request([*ids, 8], 4)) == [64, 64]
    [saved, first, second] = engine.worker.copied
    assert saved[0] == first[0] and second[0] == saved[1]


def test_no_state_is_kept_within_a_block() -> None:
    """A prompt's last step ends wherever the prompt does."""
    ids = prompt(200, 0)
    assert hits(harness(), request(ids[:100], 1), request(ids[:130], 1), request(ids[:180], 1)) == [0, 0, 0]


def test_models_without_states_are_planned_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that a worker offers change nothing where rows keep no states."""
    from tests.engine.harness import Harness

    def plans(num_checkpoints: int) -> list[bytes]:
        engine, sent = Harness(400, model_len=4096, num_checkpoints=num_checkpoints), []
        encode = StepPlan.encode
        monkeypatch.setattr(StepPlan, "encode", lambda plan: sent.append(encode(plan)) or sent[-1])
        for number in range(3):
            engine.add(request(prompt(500, 20, number), 80))
            engine.run()
        monkeypatch.undo()
        return sent

    assert plans(8) == plans(0)
