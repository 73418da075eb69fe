"""What holds for every head that drafts: it drafts what an oracle says, and changes no answer.

Tests of each kind of head call these with a target, a head beside it and an oracle of the same
folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Protocol

import numpy as np
import torch
from tests.worker.driver import NUM_ROWS, Entry, admission, execute, step
from tests.worker.speculation.drafted_rows import Job, plain_answers, run
from tests.worker.speculation.test_cpu_verification import OPTIONS, PROMPTS, assert_same, job
from tests.worker.speculation.test_cpu_verification import runner as plain_runner
from tests.worker.speculation.test_draft_model import NUM_DRAFTS, caches_of, drafting_cpu_runner, drafting_gpu_runner

from headrace_backend.models.causal_lm import CausalLM
from headrace_backend.models.draft_head import DraftHead
from headrace_backend.step.plan import StepResult
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.step.cpu_draft_model import CpuDraftModel
from headrace_backend.worker.step.cpu_runner import CpuRunner
from headrace_backend.worker.step.gpu_draft_model import GpuDraftModel
from headrace_backend.worker.step.head_drafts import HeadDrafts
from headrace_kernels.triton_runtime import forced

# A target, and a head that is joined to it: each pair of its own, as a head has its target leave
# states to it.
Pair = tuple[CausalLM, DraftHead]


class Oracle(Protocol):
    """A head's target and mathematics, over whole sequences."""

    # By transformers.
    model: torch.nn.Module

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens behind a sequence whose last token is not computed yet."""


# A row, the place in its sequence of the first draft, and the drafts.
Drafted = tuple[int, int, list[int]]


def noted(drafted: DraftedRows, next_positions: torch.Tensor, drafts: torch.Tensor) -> list[Drafted]:
    places = next_positions[torch.from_numpy(drafted.rows).long()] + 1
    columns = (drafted.rows.tolist(), places.tolist(), drafted.counts.tolist(), drafts.tolist())
    return [(row, place, found[:count]) for row, place, count, found in zip(*columns, strict=True)]


class Recording(CpuDraftModel):
    """Keeps what it drafted."""

    drafted: list[Drafted]

    def draft(self, drafted: DraftedRows) -> torch.Tensor:
        found = super().draft(drafted)
        self.drafted += noted(drafted, self._rows.next_positions, found)
        return found


class GpuRecording(GpuDraftModel):
    """Keeps what it drafted, as all of its kind did since `drafted` was made."""

    drafted: ClassVar[list[Drafted]] = []

    def draft(self, drafted: DraftedRows) -> torch.Tensor:
        found = super().draft(drafted)
        self.drafted.extend(noted(drafted, self._passes._state.next_positions.cpu(), found))
        return found


def cpu_runner(target: CausalLM, head: DraftHead, kv_dtype: str = "auto") -> tuple[CpuRunner, Recording]:
    drafts = HeadDrafts(head, caches_of(head, 1, kv_dtype)[0], NUM_ROWS)
    runner, drafter = drafting_cpu_runner(target, drafts, kv_dtype, Recording)
    assert isinstance(drafter, Recording)
    drafter.drafted = []
    return runner, drafter


def assert_as_oracle(oracle: Oracle, drafter: Recording, jobs: list[Job]) -> None:
    sequences = {each.row: each.prompt + each.tokens for each in jobs}
    assert drafter.drafted
    for row, place, drafts in drafter.drafted:
        # Steps that were planned ahead draft behind an answer's end too.
        if place <= len(sequences[row]):
            assert drafts == oracle.drafts(sequences[row][:place], len(drafts)), (row, place)


def assert_drafts_are_the_oracles(pair: Pair, oracle: Oracle) -> None:
    """Over rows of several lengths, whose answers settle one to five tokens a step."""
    runner, drafter = cpu_runner(*pair)
    assert_as_oracle(oracle, drafter, run(runner, [job(row, 12) for row in (0, 3, 4)], lambda: NUM_DRAFTS))


def _decoded(runner: CpuRunner, row: int, position: int, output_position: int) -> list[int]:
    """One step of a row with drafts: what it settled."""
    entry = Entry(row, position, None, (row,), output_position, num_drafts=NUM_DRAFTS)
    result = execute(runner, step([entry]))
    return result.tokens[: result.counts[0] if result.counts.size else 1].tolist()


def _next_token(oracle: Oracle, tokens: list[int]) -> int:
    return int(oracle.model(torch.tensor([tokens])).logits[0, -1].argmax())


def assert_chunks_and_prefix_hits_draft_the_same(pair: Pair, oracle: Oracle) -> None:
    """The first token of a chunk needs the state before it, which another step or row computed."""
    prompt = PROMPTS[4][:30]
    runner, drafter = cpu_runner(*pair)
    chunks = [Entry(0, 0, prompt[:11]), Entry(0, 11, prompt[11:17]), Entry(0, 17, prompt[17:], (0,))]
    for place, chunk in enumerate(chunks):
        execute(runner, step([chunk], [admission(0)] if not place else [], {0: [5, 2, 7]} if not place else {}))
    _decoded(runner, 0, 30, 1)
    # Another row finds the first block's 16 tokens, and goes on otherwise.
    other = [*prompt[:16], *PROMPTS[3][:9]]
    execute(runner, step([Entry(1, 16, other[16:], (1,))], [admission(1)], {1: [5, 9, 11]}))
    _decoded(runner, 1, 25, 1)
    assert [(row, place) for row, place, _ in drafter.drafted] == [(0, 31), (1, 26)]
    for (_, _, drafts), tokens in zip(drafter.drafted, (prompt, other), strict=True):
        assert drafts == oracle.drafts([*tokens, _next_token(oracle, tokens)], NUM_DRAFTS)


def assert_copied_blocks_have_states(pair: Pair, oracle: Oracle) -> None:
    """A fork draws from its leader's prompt, whose last block is copied for it."""
    prompt = PROMPTS[2]
    runner, drafter = cpu_runner(*pair)
    admitted = [admission(0), admission(1, output_index=1)]
    execute(runner, step([Entry(0, 0, prompt, (0, 1))], admitted, {0: [0, 1, 2], 1: [0, 9, 10]}))
    entries = [Entry(row, len(prompt), None, (row,), 1, num_drafts=NUM_DRAFTS) for row in (0, 1)]
    execute(runner, step(entries, copies=((1, 9),)))
    tokens = [*prompt, _next_token(oracle, prompt)]
    assert [drafts for _, _, drafts in drafter.drafted] == [oracle.drafts(tokens, NUM_DRAFTS)] * 2


def assert_no_answer_changes(pair: Pair, plain: CausalLM, option: str, count: int, kv_dtype: str = "auto") -> None:
    """Answers of a target with a head are those of the same model without one."""
    jobs = [job(row, count, **OPTIONS[option]) for row in (0, 3)]
    expected = plain_answers(lambda: plain_runner(plain, None, kv_dtype), jobs)
    assert_same(run(cpu_runner(*pair, kv_dtype)[0], jobs, lambda: NUM_DRAFTS), expected)


def settled_per_step(results: list[StepResult]) -> float:
    """Tokens that a row's step settles on average, behind prompts."""
    return float(np.concatenate([result.counts for result in results]).mean())


def assert_drafts_are_accepted(pair: Pair, plain: CausalLM, jobs: list[Job], at_least: float) -> None:
    """A head that knows its target settles many tokens in a step, and changes no answer."""
    results: list[StepResult] = []
    found = run(cpu_runner(*pair)[0], jobs, lambda: NUM_DRAFTS, ahead=0, on_result=results.append)
    assert_same(found, plain_answers(lambda: plain_runner(plain), jobs))
    assert settled_per_step(results) > at_least


def assert_a_gpu_drafts_what_a_cpu_drafts(
    make: Callable[[str], Pair], plain: CausalLM, device: str, batch_sizes: tuple[int, ...], kv_dtype: str
) -> None:
    """Answers are equal and, in the interpreter, drafts; a step settles as many tokens.

    Args:
        make: A target with a head, on a device.
        plain: Such a target without a head.
        device: The GPU's runner's; "cpu": it runs in the interpreter.
        batch_sizes: Numbers of rows to which it pads.
        kv_dtype: Type of the caches.
    """
    jobs = [job(0, 8), job(2, 6, **OPTIONS["temperature"])]
    expected, wanted = plain_answers(lambda: plain_runner(plain, None, kv_dtype), jobs), list[list[int]]()
    on_cpu, drafter = cpu_runner(*make("cpu"), kv_dtype)
    run(on_cpu, jobs, lambda: NUM_DRAFTS, on_result=lambda result: wanted.append(result.counts.tolist()))
    jobs = [dataclasses.replace(each, tokens=[], ok=[], num_planned=0) for each in jobs]
    results: list[list[int]] = []
    GpuRecording.drafted.clear()
    with forced() if device == "cpu" else contextlib.nullcontext():
        model, head = make(device)
        drafts = HeadDrafts(head, caches_of(head, 1, kv_dtype)[0], NUM_ROWS)
        on_gpu = drafting_gpu_runner(model, drafts, batch_sizes, kv_dtype, GpuRecording)
        found = run(on_gpu, jobs, lambda: NUM_DRAFTS, on_result=lambda result: results.append(result.counts.tolist()))
    assert_same(found, expected)
    assert results == wanted
    if device == "cpu":
        # A card's products round otherwise, which may turn round two tokens that nearly tie.
        assert GpuRecording.drafted == drafter.drafted
