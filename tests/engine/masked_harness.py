"""An engine whose masks are computed as a server's threads do, and a worker that draws by them."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.engine.fake_worker import VOCAB_SIZE, FakeWorker
from tests.engine.harness import EOS, TOKEN_BYTES, Harness

from headrace_backend.engine.output_grammar import MaskState
from headrace_backend.engine.scheduling.masks import MaskCall
from headrace_backend.step.masks import StepMasks, mask_words
from headrace_backend.step.plan import StepPlan
from headrace_backend.structured_output import mask_pool
from headrace_backend.structured_output.compiler import GrammarCompiler
from headrace_backend.structured_output.vocabulary import Vocabulary, make_tokenizer


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


class MaskedHarness(Harness):
    """Computes masks when they are asked for, and settles no step before its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.num_masks = 0
        super().__init__(*arguments, **options)

    def plan(self) -> bool:
        planned = super().plan()
        self.take_masks()
        return planned

    def settle(self) -> None:
        step = StepPlan.decode(self.worker.plans[0])
        assert not step.num_masked or step.step_id in self.worker.masks, "masks are waited for that nobody asks for"
        super().settle()
        self.take_masks()

    def take_masks(self) -> None:
        for call in self.engine.take_mask_calls():
            assert self.engine.is_current(call)
            self.compute(call, self.worker)
            self.read()

    def compute(self, call: MaskCall, worker: FakeWorker) -> None:
        words = np.empty((len(call.jobs), mask_words(VOCAB_SIZE)), np.int32)
        outcomes = list(map(mask_pool.fill_alone, call.jobs, words))
        masked = [index for index, outcome in enumerate(outcomes) if outcome.state is MaskState.MASKED]
        samples = np.array([call.jobs[index].sample for index in masked], np.int32)
        worker.masks[call.step_id] = StepMasks.decode(StepMasks(call.step_id, samples, words[masked]).encode())
        self.num_masks += len(masked)
        self.engine.masks_done(call, outcomes)
