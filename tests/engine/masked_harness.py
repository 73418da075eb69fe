"""An engine whose masks are computed as a server's threads do, and a worker that draws by them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
from tests.engine.drafting_worker import DraftingWorker
from tests.engine.fake_worker import VOCAB_SIZE, FakeWorker
from tests.engine.harness import EOS, TOKEN_BYTES, Harness

from headrace_backend.engine.output_grammar import MaskOutcome
from headrace_backend.engine.scheduling.masks import MaskCall
from headrace_backend.step.masks import StepMasks, mask_words
from headrace_backend.step.plan import RowAdmission, StepPlan
from headrace_backend.structured_output import mask_pool
from headrace_backend.structured_output.compiler import GrammarCompiler
from headrace_backend.structured_output.vocabulary import Vocabulary, make_tokenizer

TOKENS_PER_ROW = 5
# By seed and output.
Answers = dict[int, dict[int, list[int]]]


def small_compiler() -> GrammarCompiler:
    """Compiles for the vocabulary of the harness."""
    vocabulary = Vocabulary(TOKEN_BYTES, [EOS], [EOS])
    return GrammarCompiler(vocabulary, lambda: make_tokenizer(vocabulary, longest_first))


def longest_first(text: str) -> list[int]:
    """Tokens of a text: the longest that fit, and of equals the first."""
    ids, data = [], text.encode()
    while data:
        fitting = [token for token in range(1, VOCAB_SIZE) if data.startswith(TOKEN_BYTES[token])]
        if not fitting:
            break
        ids.append(max(fitting, key=lambda token: (len(TOKEN_BYTES[token]), -token)))
        data = data[len(TOKEN_BYTES[ids[-1]]) :]
    return ids


def report_drafts(harness: Harness) -> None:
    """Reports drafts of rows with grammars of the step at hand, once."""
    worker = harness.worker
    if isinstance(worker, DraftingWorker) and worker.plans and worker.next_step_id != worker.reported_step_id:
        worker.reported_step_id = worker.next_step_id
        drafts = worker.head_drafts(worker.plans[0])
        if drafts is not None:
            harness.engine.take_drafts(drafts)


class MaskedHarness(Harness):
    """Computes masks when they are asked for, and settles no step before its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.num_masks = 0
        super().__init__(*arguments, **options)

    def plan(self) -> bool:
        planned = super().plan()
        self.report_drafts()
        self.take_masks()
        return planned

    def settle(self) -> None:
        step = StepPlan.decode(self.worker.plans[0])
        assert not step.num_masked or step.step_id in self.worker.masks, "masks are waited for that nobody asks for"
        super().settle()
        self.report_drafts()
        self.take_masks()

    def report_drafts(self) -> None:
        """Reports drafts of the step at hand, once."""
        report_drafts(self)

    def take_masks(self) -> None:
        for call in self.engine.take_mask_calls():
            assert self.engine.is_current(call)
            self.compute(call, self.worker)
            self.read()

    def compute(self, call: MaskCall, worker: FakeWorker) -> None:
        firsts = list(itertools.accumulate([1 + len(job.drafts) for job in call.jobs], initial=0))
        words = np.empty((firsts[-1], mask_words(VOCAB_SIZE)), np.int32)
        lines = [words[first:end] for first, end in itertools.pairwise(firsts)]
        outcomes = list(map(mask_pool.fill_alone, call.jobs, lines))
        masks = mask_pool.step_masks(call, firsts[:-1], words, outcomes)
        worker.masks[call.step_id] = StepMasks.decode(masks.encode())
        self.num_masks += masks.samples.size
        self.engine.masks_filled(call, outcomes)
        self.done(call, outcomes)

    def done(self, call: MaskCall, outcomes: list[MaskOutcome]) -> None:
        """The search for what must come is over."""
        self.engine.masks_done(call, outcomes)


class GuessingHarness(MaskedHarness):
    """Its worker drafts what rows are known to answer, by seed and output, and errs at times."""

    def __init__(
        self, answers: Answers, share_right: float, seed: int = 0, num_drafts: str = "4", **options: Any
    ) -> None:
        self.answers, self.share_right, self.draws = answers, share_right, random.Random(seed)
        # Of workers that are gone.
        self.num_right_before = 0
        super().__init__(tokens_per_row=TOKENS_PER_ROW, speculate_tokens=num_drafts, **options)

    def new_worker(self) -> DraftingWorker:
        if hasattr(self, "worker"):
            self.num_right_before = self.num_right
        worker = super().new_worker()
        assert isinstance(worker, DraftingWorker)
        worker.guess = self.guess
        return worker

    @property
    def num_right(self) -> int:
        assert isinstance(self.worker, DraftingWorker)
        return self.num_right_before + self.worker.num_right

    def guess(self, admission: RowAdmission, position: int) -> list[int]:
        return guessed(self.answers, admission, position, self.share_right, self.draws)


def guessed(
    answers: Answers, admission: RowAdmission, position: int, share_right: float, draws: random.Random
) -> list[int]:
    """Drafts for a row whose answer is known, each of which is wrong now and then."""
    known = answers.get(admission.sampling.seed, {}).get(admission.output_index, [])
    drafts = known[position : position + TOKENS_PER_ROW]
    return [token if draws.random() < share_right else draws.randrange(VOCAB_SIZE) for token in drafts]
