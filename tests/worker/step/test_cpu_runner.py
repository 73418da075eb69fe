"""Plans driven by hand through a tiny Llama.

What is computed never depends on how it was divided into steps.
"""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.worker.driver import BLOCK_SIZE, NUM_ROWS, Entry, admission, execute, id_bytes, make_runner, step

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.step.plan import StepPlan
from headrace_backend.worker.step.cpu_runner import CpuRunner

PROMPT = [int(x) for x in np.random.default_rng(0).integers(3, 97, 50)]
OTHER = [int(x) for x in np.random.default_rng(1).integers(3, 97, 21)]


@pytest.fixture
def runner(llama: CausalLM) -> CpuRunner:
    return make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim)


def blocks_of(row: int, length: int = 128) -> list[int]:
    """Blocks that only this row uses, in an order that is not theirs in memory."""
    return [row * 8 + (3 * i) % 8 for i in range(-(-length // BLOCK_SIZE))]


def generate(
    runner: CpuRunner, row: int, prompt: list[int], count: int, chunk: int = 1000, **parameters: object
) -> list[int]:
    """One sequence by itself.

    The prompt in chunks, then token by token without reporting the runner what it drew.
    """
    tokens: list[int] = []
    for start in range(0, len(prompt), chunk):
        ids = prompt[start : start + chunk]
        drawing = (row,) if start + chunk >= len(prompt) else ()
        arrival = {"admissions": [admission(row, **parameters)], "tables": {row: blocks_of(row)}} if start == 0 else {}
        tokens += execute(runner, step([Entry(row, start, ids, drawing)], **arrival)).tokens.tolist()  # type: ignore[arg-type]
    for position in range(1, count):
        entry = Entry(row, len(prompt) + position - 1, None, (row,), position)
        tokens += execute(runner, step([entry])).tokens.tolist()
    execute(runner, step([], released=(row,)))
    return tokens


@functools.cache
def transformers_tokens(path: pathlib.Path, count: int) -> list[int]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    generated = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in generated[0, len(PROMPT) :]]


def test_greedy_tokens_are_those_of_transformers(runner: CpuRunner, llama_path: pathlib.Path) -> None:
    assert generate(runner, 3, PROMPT, 30) == transformers_tokens(llama_path, 30)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_a_prompt_in_chunks_gives_the_same_tokens(runner: CpuRunner, chunk: int) -> None:
    assert generate(runner, 0, PROMPT, 12, chunk) == generate(runner, 0, PROMPT, 12)


def test_known_tokens_and_last_sampled_tokens_are_the_same_to_the_model(runner: CpuRunner) -> None:
    tokens = generate(runner, 0, PROMPT, 10)
    plan = step([Entry(1, 0, PROMPT, (1,))], [admission(1)], {1: blocks_of(1)})
    drawn = execute(runner, plan).tokens.tolist()
    for position in range(1, 10):
        entry = Entry(1, len(PROMPT) + position - 1, [drawn[-1]], (1,), position)
        drawn += execute(runner, step([entry])).tokens.tolist()
    assert drawn == tokens


def test_known_tokens_before_an_unknown_one_in_one_entry(runner: CpuRunner) -> None:
    """A preemption leaves recomputed tokens and the last sampled one in one chunk."""
    tokens = generate(runner, 0, PROMPT, 4)
    first = step([Entry(2, 0, PROMPT, (2,))], [admission(2)], {2: blocks_of(2)})
    assert execute(runner, first).tokens.tolist() == tokens[:1]
    again = step([Entry(2, 0, [*PROMPT, 0], (2,), 1), Entry(1, 0, OTHER, (1,))], [admission(1)], {1: blocks_of(1)})
    # The last of row 2's ids is unknown.
    again.forward.known_counts = again.forward.known_counts - np.array([1, 0], np.int32)
    again.forward.token_ids = np.delete(again.forward.token_ids, len(PROMPT))
    result = execute(runner, StepPlan.decode(again.encode()))
    assert result.tokens.tolist() == [tokens[1], generate(runner, 0, OTHER, 1)[0]]


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),  # prompt length
            st.integers(1, 8),  # tokens
            st.integers(0, 6),  # step of arrival
            st.integers(1, 20),  # chunk
            st.sampled_from([0.0, 0.8]),
        ),
        min_size=1,
        max_size=NUM_ROWS,
    )
)
def test_rows_in_mixed_batches_do_not_disturb_each_other(
    llama: CausalLM, jobs: list[tuple[int, int, int, int, float]]
) -> None:
    alone = make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim)
    together = make_runner(llama, llama.num_layers, llama.num_kv_heads, llama.head_dim)
    prompts = [[(7 * i + 5 * row) % 97 for i in range(length)] for row, (length, *_) in enumerate(jobs)]
    expected = [
        generate(alone, row, prompts[row], count, 1000, temperature=temperature, seed=row)
        for row, (_, count, _, _, temperature) in enumerate(jobs)
    ]
    computed = [0] * len(jobs)
    drawn: list[list[int]] = [[] for _ in jobs]
    released: tuple[int, ...] = ()
    for now in range(200):
        entries, arrivals = [], []
        for row, (length, count, arrival, chunk, _) in enumerate(jobs):
            if now < arrival or len(drawn[row]) == count:
                continue
            if computed[row] == 0:
                arrivals.append(row)
            if computed[row] < length:
                ids = prompts[row][computed[row] : computed[row] + chunk]
                drawing = (row,) if computed[row] + len(ids) == length else ()
                entries.append(Entry(row, computed[row], ids, drawing))
            else:
                entries.append(Entry(row, computed[row], None, (row,), len(drawn[row])))
            computed[row] += 1 if entries[-1].ids is None else len(entries[-1].ids)
        admissions = [admission(row, temperature=jobs[row][4], seed=row) for row in arrivals]
        plan = step(entries, admissions, {row: blocks_of(row) for row in arrivals}, released)
        result = execute(together, plan)
        assert result.ok.all()
        for row, token in zip(plan.sample.rows.tolist(), result.tokens.tolist(), strict=True):
            drawn[row].append(token)
        released = tuple(row for row in plan.sample.rows.tolist() if len(drawn[row]) == jobs[row][1])
    assert drawn == expected


def test_copied_blocks_continue_as_their_source(runner: CpuRunner) -> None:
    tokens = generate(runner, 0, PROMPT, 8)
    execute(runner, step([Entry(1, 0, PROMPT, (1,))], [admission(1)], {1: blocks_of(1)}))
    # Row 2 shares row 1's full blocks and gets its own copy of the last one; its first token is
    # known.
    source, target = blocks_of(1)[3], 60
    shared = [*blocks_of(1)[:3], target, 61]
    entries = [Entry(1, len(PROMPT), None, (1,), 1), Entry(2, len(PROMPT), [tokens[0]], (2,), 1)]
    result = execute(runner, step(entries, [admission(2)], {2: shared}, copies=((source, target),)))
    assert result.tokens.tolist() == [tokens[1]] * 2
    # From here on they write to different blocks.
    entries = [Entry(1, len(PROMPT) + 1, [5], (1,), 2), Entry(2, len(PROMPT) + 1, None, (2,), 2)]
    assert execute(runner, step(entries)).tokens.tolist()[1] == tokens[2]
    assert execute(runner, step([Entry(2, len(PROMPT) + 2, None, (2,), 3)])).tokens.tolist() == [tokens[3]]


def test_outputs_of_one_request_draw_from_one_hidden_state(runner: CpuRunner) -> None:
    outputs = (0, 1, 2, 3)
    arrivals = [admission(row, temperature=1.5, seed=9, output_index=row) for row in outputs]
    tables = {row: [*blocks_of(0)[:3], 40 + row] for row in outputs}
    drawn = execute(runner, step([Entry(0, 0, PROMPT, outputs)], arrivals, tables)).tokens.tolist()
    for row in outputs:
        assert [drawn[row]] == generate(runner, 5, PROMPT, 1, temperature=1.5, seed=9, output_index=row)
    assert len(set(drawn)) > 1
    # Each goes on from its own token.
    copies = tuple((40, 40 + row) for row in outputs[1:])
    entries = [Entry(row, len(PROMPT), None, (row,), 1) for row in outputs]
    second = execute(runner, step(entries, copies=copies)).tokens.tolist()
    for row in outputs:
        alone = generate(runner, 5, PROMPT, 2, temperature=1.5, seed=9, output_index=row)
        assert [drawn[row], second[row]] == alone


def test_a_row_is_taken_again_in_the_step_that_releases_it(runner: CpuRunner) -> None:
    expected = generate(runner, 0, OTHER, 3)
    history = {"prompt_ids": id_bytes(*PROMPT)}
    heavy = admission(
        4, repetition_penalty=2.0, logit_bias_ids=id_bytes(7), logit_bias_values=np.float32(50).tobytes(), **history
    )
    biased = execute(runner, step([Entry(4, 0, PROMPT, (4,))], [heavy], {4: blocks_of(4)})).tokens.tolist()
    assert biased == [7]
    plan = step([Entry(4, 0, OTHER, (4,))], [admission(4)], {4: blocks_of(4)}, released=(4,))
    tokens = execute(runner, plan).tokens.tolist()
    for position in (1, 2):
        tokens += execute(runner, step([Entry(4, len(OTHER) + position - 1, None, (4,), position)])).tokens.tolist()
    assert tokens == expected


def test_a_block_table_grows(runner: CpuRunner) -> None:
    expected = generate(runner, 0, OTHER[:15], 4)
    plan = step([Entry(1, 0, OTHER[:15], (1,))], [admission(1)], {1: [20]})
    tokens = execute(runner, plan).tokens.tolist()
    tokens += execute(runner, step([Entry(1, 15, None, (1,), 1)])).tokens.tolist()
    growing = step([Entry(1, 16, None, (1,), 2)], tables={1: [50]})
    growing.forward.table_starts = np.array([1], np.int32)
    tokens += execute(runner, growing).tokens.tolist()
    tokens += execute(runner, step([Entry(1, 17, None, (1,), 3)])).tokens.tolist()
    assert tokens == expected


def test_steps_without_samples_or_without_rows_are_answered(runner: CpuRunner) -> None:
    plan = step([Entry(0, 0, PROMPT)], [admission(0)], {0: blocks_of(0)}, step_id=7)
    result = execute(runner, plan)
    assert (result.step_id, result.tokens.size, result.ok.size) == (7, 0, 0)
    assert execute(runner, step([], released=(0,), step_id=8)).step_id == 8


def test_chunks_report_whether_what_they_saw_is_finite(runner: CpuRunner) -> None:
    tables = {0: blocks_of(0), 1: blocks_of(1)}
    result = execute(runner, step([Entry(0, 0, PROMPT), Entry(1, 0, PROMPT)], [admission(0), admission(1)], tables))
    assert (result.tokens.size, result.checked_ok.tolist()) == (0, [1, 1])
    runner._kv_caches[-1][blocks_of(1)[0]] = torch.nan
    start = len(PROMPT)
    result = execute(
        runner,
        step(
            [Entry(0, start, [5, 6]), Entry(1, start, [5, 6]), Entry(2, 0, [7], (2,))],
            [admission(2)],
            {2: blocks_of(2)},
        ),
    )
    assert (result.ok.tolist(), result.checked_ok.tolist()) == ([1], [1, 0])


def test_a_foul_cache_block_does_not_leak_into_its_next_owner(runner: CpuRunner) -> None:
    """A block whose last owner left NaN behind the new owner's tokens."""
    expected = generate(runner, 0, OTHER, 5)
    for cache in runner._kv_caches:
        cache[blocks_of(0)] = torch.nan
    assert generate(runner, 0, OTHER, 5) == expected


def test_a_table_that_does_not_fit_its_row_is_noticed(runner: CpuRunner) -> None:
    with pytest.raises(AssertionError, match="longer than the context"):
        execute(runner, step([Entry(0, 0, PROMPT)], [admission(0)], {0: list(range(17))}))
    with pytest.raises(AssertionError, match="out of range"):
        execute(runner, step([Entry(0, 0, PROMPT)], [admission(0)], {0: [64]}))
