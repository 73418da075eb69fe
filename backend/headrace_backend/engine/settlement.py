"""Reads the result of a step.

Tokens go to their sequences, stops are found, finite blocks are published, and readers get what is
released.

Owns the order of these for one settled step. Tokens are matched to sequences by the record of the
planned step, in its order, never by row: a row may belong to another sequence by now. A sequence
that ended while the step ran is passed over, so the token that was sampled ahead is dropped; one
that was preempted keeps its token, which it must not sample again.

A sample may settle several tokens, or none (`StepResult.counts`). They are read one by one, as if
steps of one token each had sampled them: a stop within them ends the output there and drops the
rest. One with drafts settles none where its logits were not finite, for which the drafts may be to
blame: the sequence computes the same token again, and without drafts once that was read.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as AbstractSequence

import numpy as np

from headrace_backend.engine.events import EndReason, OutputEnd
from headrace_backend.engine.requests.beam_search import BeamSearch
from headrace_backend.engine.requests.endings import Endings
from headrace_backend.engine.requests.request_table import RequestTable
from headrace_backend.engine.requests.sequence import NO_ROW, LiveRequest, Sequence
from headrace_backend.engine.requests.token_log import TokenLogprobs
from headrace_backend.engine.scheduling.draft_lengths import DraftLengths
from headrace_backend.engine.scheduling.in_flight_step import InFlightStep
from headrace_backend.engine.scheduling.masks import grammar_end
from headrace_backend.engine.scheduling.scheduler import Scheduler
from headrace_backend.step.plan import StepResult

_NOT_FINITE = "the model's output was not a number"


class Settlement:
    """Settles steps, in the order in which they were planned."""

    def __init__(
        self,
        scheduler: Scheduler,
        endings: Endings,
        table: RequestTable,
        draft_lengths: DraftLengths,
        block_size: int,
        vocab_size: int,
        token_bytes: AbstractSequence[bytes] | None,
    ) -> None:
        """Works on the scheduler's sequences.

        `token_bytes` are needed only where stop strings are in use.
        """
        self._scheduler = scheduler
        self._endings = endings
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._token_bytes = token_bytes if token_bytes is not None else ()
        self._table = table
        self._draft_lengths = draft_lengths
        # Sequences that were passed over while they decoded, until they go on.
        self._stalled: set[Sequence] = set()

    def settle(self, step: InFlightStep, result: StepResult, now_ns: int, settled_id: int) -> None:
        """Applies the result of a planned step.

        `settled_id` numbers the settled steps over all lives of workers.

        Raises:
            ValueError: The result is not one of this plan; nothing was applied.
        """
        counts = _checked_counts(step, result)
        tokens = self._checked_tokens(step, result, counts)
        logprobs = _checked_logprobs(step, result, counts)
        _check_prompt_logprobs(step, result)
        poisoned = _poisoned(step, result)
        step_id = step.step_id
        starts = [sequence.num_settled for sequence, _ in step.unsure_states]
        if self._table.num_recorded:
            self._note_ways(step, counts, settled_id)
        for sequence, epoch, num_settled in step.chunks:
            if not sequence.ended:
                if sequence.request.last_step_id != step_id:
                    self._count_step(sequence.request, step_id)
                if sequence.epoch == epoch and sequence not in poisoned:
                    sequence.num_settled = num_settled
                    if num_settled >= sequence.publish_at:
                        self._scheduler.publish(sequence)
        for sequence in poisoned:
            self._end_poisoned(sequence, now_ns)
        if step.prompt_runs:
            self._report_prompts(step, result, now_ns)
        is_known = bool(step.forced or step.ends)
        owners = step.samples if counts is None else self._settle_counts(step, counts)
        for index, (sequence, token) in enumerate(zip(owners, tokens, strict=True)):
            if sequence.ended:
                continue
            if sequence.request.last_step_id != step_id:
                self._count_step(sequence.request, step_id)
            if is_known and self._settle_known(step, sequence, now_ns):
                continue
            if token < 0:
                self._end_with_error(sequence, now_ns)
                continue
            if sequence.search is not None:
                # A search that lost its rows meanwhile has it computed again.
                if sequence.planned_in == step_id:
                    self._advance_search(sequence, sequence.search, logprobs[index], now_ns)
                continue
            if sequence.wants_logprobs:
                sequence.log.append_logprobs(logprobs[index])
            self._append(sequence, token, now_ns)
        if step.forgotten and counts is not None:
            self._end_misplanned(step, counts, now_ns)
        for (sequence, num_tokens), start in zip(step.unsure_states, starts, strict=True):
            self._scheduler.settle_state(sequence, num_tokens, start)

    def _end_poisoned(self, sequence: Sequence, now_ns: int) -> None:
        """Ends a sequence that wrote what is not finite: it could sample nothing.

        Outputs that wait for its prompt could not either.
        """
        if sequence.request.unforked:
            self._endings.end_all(sequence.request, EndReason.ERROR, now_ns, error=_NOT_FINITE)
        elif not sequence.ended:
            self._end_with_error(sequence, now_ns)

    def _end_with_error(self, sequence: Sequence, now_ns: int) -> None:
        """Ends an output whose logits are no numbers; a search ends as a whole.

        That its form and its bans leave no token is known before the draw (`masks`).
        """
        if sequence.search is not None:
            self._endings.end_all(sequence.request, EndReason.ERROR, now_ns, error=_NOT_FINITE)
        else:
            end = OutputEnd(sequence.log.output_index, EndReason.ERROR, error=_NOT_FINITE)
            self._endings.end_output(sequence, end, now_ns)

    def _end_misplanned(self, step: InFlightStep, counts: list[int], now_ns: int) -> None:
        """Ends sequences that settled less than was certain, and whose next step relies on it.

        Tokens that must come are settled whatever is drawn, unless the logits are not finite.
        """
        for sequence, count, most in zip(step.samples, counts, _most_counts(step), strict=True):
            is_short = count < most - step.forgotten.get(sequence, most)
            if is_short and not sequence.ended and sequence.planned_in > step.step_id:
                self._end_with_error(sequence, now_ns)

    def _advance_search(self, sequence: Sequence, search: BeamSearch, report: TokenLogprobs, now_ns: int) -> None:
        """Takes the most likely tokens behind a hypothesis; the last has the search go on."""
        request = sequence.request
        sequence.num_settled = sequence.num_computed
        if sequence.num_settled >= sequence.publish_at:
            self._scheduler.publish(sequence)
        if not request.ledger.first_token_at_ns:
            request.ledger.first_token(now_ns)
        forks = search.note(sequence.log.output_index, report)
        if search.is_over:
            self._endings.end_all(request, EndReason.STOP, now_ns)
        elif forks is not None:
            self._scheduler.go_on(request, forks)

    def _settle_counts(self, step: InFlightStep, counts: list[int]) -> list[Sequence]:
        """Takes from the scheduled counters what was not settled.

        Returns the sequence of each settled token.
        """
        step_id, owners = step.step_id, []
        for sequence, count, most in zip(step.samples, counts, _most_counts(step), strict=True):
            owners += [sequence] * count
            if sequence.ended:
                continue
            if count == 0 and sequence.request.last_step_id != step_id:
                self._count_step(sequence.request, step_id)
            ledger = sequence.request.ledger
            ledger.draft_tokens += most - 1
            ledger.accepted_tokens += max(count - 1, 0)
            sequence.num_unread_drafts -= most - 1
            sequence.forget_unsettled(most - count)
            self._draft_lengths.note(sequence.acceptance, most - 1, count)
            sequence.was_held_up |= count == 0 and most > 1
        for sequence in step.unsure:
            sequence.num_unsure_steps -= 1
        # Nothing that is found out of its masks from now on changes what it settled.
        step.unsure.clear()
        for sequence, count in step.forgotten.items():
            if not sequence.ended:
                sequence.forget_unsettled(-count)
        return owners

    def _settle_known(self, step: InFlightStep, sequence: Sequence, now_ns: int) -> bool:
        """Settles what was known of an output before its next token was drawn.

        Returns whether the output ended with it.
        """
        if sequence in step.forced:
            return self._settle_forced(sequence, step.forced[sequence], now_ns)
        return sequence in step.ends and self._ends_here(step, sequence, now_ns)

    def _ends_here(self, step: InFlightStep, sequence: Sequence, now_ns: int) -> bool:
        """Whether the output ends before its next token, as its drafts were right up to there."""
        num_tokens, outcome = step.ends[sequence]
        if len(sequence.tokens) < num_tokens:
            return False
        self._endings.end_output(sequence, grammar_end(sequence, outcome), now_ns)
        return True

    def _settle_forced(self, sequence: Sequence, tokens: array[int], now_ns: int) -> bool:
        """Appends tokens that nobody drew; returns whether the output ended with one of them."""
        for token in tokens:
            if sequence.wants_logprobs:
                # What is masked down to one token has all of the probability.
                tops = [token] if sequence.request.spec.asked.num_logprobs else []
                sequence.log.append_logprobs(TokenLogprobs(0.0, 1, tops, [0.0] * len(tops)))
            self._append(sequence, token, now_ns)
            if sequence.ended:
                return True
        return False

    def _note_ways(self, step: InFlightStep, counts: list[int] | None, settled_id: int) -> None:
        """What the step did for recorded requests, before its tokens are read.

        Whoever decodes was sampled by the step before too, unless it was passed over.
        """
        for sequence, first_token, num_tokens in step.entries:
            trace = sequence.request.trace
            if trace is not None and not sequence.ended:
                trace.note_chunk(settled_id, first_token, num_tokens)
        if counts is not None:
            self._note_counts(step, counts, settled_id)
            return
        joining = step.samples[step.load.num_decodes :]
        if self._stalled or step.stalled:
            self._stalled.update(step.stalled)
            back = self._stalled.intersection(step.samples)
            self._stalled = {sequence for sequence in self._stalled - back if not sequence.ended}
            joining.extend(back)
        for sequence in joining:
            _note_tokens(sequence, 1 + len(step.forced.get(sequence, ())), settled_id)

    def _note_counts(self, step: InFlightStep, counts: list[int], settled_id: int) -> None:
        """Notes each token that the step settled for recorded outputs.

        A sequence for which the step settled none counts as passed over.
        """
        self._stalled.update(step.stalled)
        for sequence, count in zip(step.samples, counts, strict=True):
            if sequence.runs is None or sequence.ended:
                continue
            if count == 0:
                self._stalled.add(sequence)
            else:
                self._stalled.discard(sequence)
            _note_tokens(sequence, count + len(step.forced.get(sequence, ())), settled_id)

    def _report_prompts(self, step: InFlightStep, result: StepResult, now_ns: int) -> None:
        """Reports the prompt logprobs of a step, before its tokens are read.

        A request's first token follows the whole of its prompt.
        """
        first = top_first = 0
        for request, run in step.prompt_runs:
            log = request.prompt_log
            assert log is not None, "runs are those of requests that asked"
            end = first + run.num_tokens
            if request.active:
                if np.isnan(result.prompt_sampled[first:end]).any():
                    self._endings.end_all(request, EndReason.ERROR, now_ns, error=_NOT_FINITE)
                else:
                    request.publish(log.append(run, result, first, top_first))
            first, top_first = end, top_first + run.num_tokens * log.num_tops

    def _checked_tokens(self, step: InFlightStep, result: StepResult, counts: list[int] | None) -> list[int]:
        """Returns the settled tokens, with -1 for tokens that can't be used.

        A token is -1 where the logits are not finite or the token is not in the vocabulary.
        """
        num_tokens = len(step.samples) if counts is None else sum(counts)
        if len(result.tokens) != num_tokens or len(result.ok) != num_tokens:
            raise ValueError(f"step {step.step_id}: the result has {len(result.tokens)} tokens, not {num_tokens}")
        column = result.tokens
        if num_tokens and (not result.ok.all() or column.view(np.uint32).max() >= self._vocab_size):
            finite = (result.ok != 0) & (column >= 0) & (column < self._vocab_size)
            column = np.where(finite, column, np.int32(-1))
        tokens: list[int] = column.tolist()
        return tokens

    def _count_step(self, request: LiveRequest, step_id: int) -> None:
        request.last_step_id = step_id
        request.ledger.step_count += 1

    def _append(self, sequence: Sequence, token: int, now_ns: int) -> None:
        """Appends a token whose logits were finite: what it attended to is settled.

        Its log probabilities are in the log already.
        """
        log = sequence.log
        num_tokens = len(log.tokens) + 1
        if sequence.row != NO_ROW:
            sequence.num_settled = num_settled = sequence.num_prompt_tokens + num_tokens - 1
            if num_settled >= sequence.publish_at:
                self._scheduler.publish(sequence)
        ledger = sequence.request.ledger
        if not ledger.first_token_at_ns:
            ledger.first_token(now_ns)
        if sequence.watch is None and not sequence.wants_logprobs:
            log.append_released(token)
            if token not in sequence.stop_token_ids and num_tokens < sequence.max_output_tokens:
                return
        else:
            log.tokens.append(token)
        end = self._find_end(sequence, token)
        if end is not None:
            self._endings.end_output(sequence, end, now_ns)
        elif sequence.watch is None:
            log.release(num_tokens)
        else:
            # What an earlier attempt emitted stays released, whatever a match could still reach
            # into.
            log.release(max(log.num_released, num_tokens - sequence.watch.num_held))

    def _find_end(self, sequence: Sequence, token: int) -> OutputEnd | None:
        """Finds out whether the output ends with the token just appended.

        A stop token comes first, then a stop string, then the length.
        """
        num_tokens = len(sequence.tokens)
        output_index = sequence.log.output_index
        if token in sequence.stop_token_ids and num_tokens > sequence.min_tokens:
            return OutputEnd(output_index, EndReason.STOP, stop_token_id=token)
        if sequence.watch is not None:
            match = sequence.watch.feed(self._token_bytes[token], num_tokens >= sequence.min_tokens)
            if match is not None:
                return OutputEnd(
                    output_index, EndReason.STOP, stop_string_index=match.string_index, trim_bytes=match.trim_bytes
                )
        if num_tokens >= sequence.max_output_tokens:
            return OutputEnd(output_index, EndReason.LENGTH)
        return None


def _note_tokens(sequence: Sequence, count: int, settled_id: int) -> None:
    """Notes for a recorded output that one step settles its next `count` tokens."""
    if sequence.runs is not None:
        first = len(sequence.tokens)
        sequence.runs.extend([(first + index, settled_id) for index in range(count)])


def _most_counts(step: InFlightStep) -> list[int]:
    """Most tokens that each sample of a planned step may settle."""
    num_drafts = len(step.draft_counts)
    return [1 + count for count in step.draft_counts] + [1] * (len(step.samples) - num_drafts)


def _checked_counts(step: InFlightStep, result: StepResult) -> list[int] | None:
    """How many tokens each sample settled; None: one each, as planned.

    Only a row that computes its last sampled token can settle none: it has a token to go on from.
    """
    if not result.counts.size and not step.draft_counts:
        return None
    counts: list[int] = result.counts.tolist() or [1] * len(step.samples)
    if len(counts) != len(step.samples):
        raise ValueError(f"step {step.step_id}: the result counts {len(counts)} samples, the plan {len(step.samples)}")
    for index, (count, most) in enumerate(zip(counts, _most_counts(step), strict=True)):
        least = 0 if index < step.load.num_decodes else 1
        if not least <= count <= most:
            raise ValueError(f"step {step.step_id}: sample {index} settled {count} tokens, not {least} to {most}")
    return counts


def _checked_logprobs(step: InFlightStep, result: StepResult, counts: list[int] | None) -> dict[int, TokenLogprobs]:
    """The log probabilities of settled tokens whose sequences asked for them, by token index."""
    logprobs = _logprobs_by_token(result) if result.logprob_indices.size else {}
    num_expected = step.num_logprobs
    if counts is not None and num_expected:
        num_expected = sum(
            count for sequence, count in zip(step.samples, counts, strict=True) if sequence.wants_logprobs
        )
    if len(logprobs) != num_expected:
        raise ValueError(f"step {step.step_id}: log probabilities of {len(logprobs)} tokens, not {num_expected}")
    return logprobs


def _poisoned(step: InFlightStep, result: StepResult) -> dict[Sequence, None]:
    """Sequences whose checked hidden states are not all finite, each once."""
    if len(result.checked_ok) != len(step.checked):
        raise ValueError(
            f"step {step.step_id}: {len(result.checked_ok)} hidden states are checked, not {len(step.checked)}"
        )
    if result.checked_ok.all():
        return {}
    return {sequence: None for sequence, ok in zip(step.checked, result.checked_ok.tolist(), strict=True) if not ok}


def _check_prompt_logprobs(step: InFlightStep, result: StepResult) -> None:
    num_tokens = num_tops = 0
    for request, run in step.prompt_runs:
        assert request.prompt_log is not None, "runs are those of requests that asked"
        num_tokens += run.num_tokens
        num_tops += run.num_tokens * request.prompt_log.num_tops
    if (result.prompt_sampled.size, result.prompt_top_token_ids.size) != (num_tokens, num_tops):
        raise ValueError(
            f"step {step.step_id}: log probabilities of {result.prompt_sampled.size} prompt tokens, not {num_tokens}"
        )


def _logprobs_by_token(result: StepResult) -> dict[int, TokenLogprobs]:
    """The result's flat columns, by index of the token."""
    top_token_ids, top_logprobs = result.top_token_ids.tolist(), result.top_logprobs.tolist()
    entries: dict[int, TokenLogprobs] = {}
    first = 0
    columns = (result.logprob_indices, result.logprob_sampled, result.logprob_ranks, result.logprob_counts)
    for index, sampled, rank, count in zip(*(column.tolist() for column in columns), strict=True):
        entries[index] = TokenLogprobs(
            sampled, rank, top_token_ids[first : first + count], top_logprobs[first : first + count]
        )
        first += count
    return entries
