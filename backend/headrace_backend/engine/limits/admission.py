"""Admission of requests to the waiting queue.

A request is admitted by the length of the queue, the queued tokens, the expected wait against its
deadline, and the room for its tokens.

Owns the counts of requests that have not started, and the refusals. Does not check the request
itself (`validation`) nor order the queue (`waiting_queue`). A refusal that waiting can cure says
when to come back.
"""

from __future__ import annotations

from headrace_backend.cache_groups import SequenceBlocks
from headrace_backend.config import EngineConfig
from headrace_backend.engine.errors import RefusalCode, RefusalReason, RequestRefused
from headrace_backend.engine.limits.tenant_account import Passed, TenantAccount
from headrace_backend.engine.rates import Rates
from headrace_backend.engine.request import EngineRequest
from headrace_backend.step.plan_bytes import (
    FIELD_BYTES,
    RUN_BYTES,
    SIBLING_BYTES,
    columns_bytes,
    max_plan_bytes,
    table_bytes,
)

_NS_PER_S = 1_000_000_000
_MIN_RETRY_NS = 100_000_000
_MAX_RETRY_NS = 30 * _NS_PER_S
_NOBODY = Passed()


class Admission:
    """Holds the queue's bounds, and refuses requests that exceed them."""

    def __init__(self, config: EngineConfig, rates: Rates, max_model_len: int, blocks: SequenceBlocks) -> None:
        """Nothing waits."""
        self._blocks = blocks
        self._config = config
        self._rates = rates
        num_groups = len(blocks.groups)
        self._column_bytes = columns_bytes(config, num_groups)
        # What sequences that take a row with one step may bring into its plan together
        # (`plan_bytes`).
        self.max_admission_bytes = max_plan_bytes(config, max_model_len, num_groups) - self._column_bytes
        # None until a worker has said how large its cache is.
        self.num_blocks: int | None = None
        self.draining = False
        # Requests that have not started, their prompt tokens and outputs.
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._num_waiting_outputs = 0
        # What requests that have not ended may come to keep of their prompts.
        self._prompt_logprob_bytes = 0
        # Since the engine began; refused are those for which there is no room now.
        self.num_taken = 0
        self.num_refused = 0

    def worker_ready(self, num_blocks: int, plan_bytes: int | None) -> None:
        """Sets the size of the worker's cache in blocks and of its step plans in bytes.

        With None the size of plans stays the same.
        """
        self.num_blocks = num_blocks
        if plan_bytes is not None:
            self.max_admission_bytes = plan_bytes - self._column_bytes

    def entered(self, request: EngineRequest, account: TenantAccount) -> None:
        """Counts a request that began to wait."""
        self.num_taken += 1
        self._count(request, account, 1)
        self._prompt_logprob_bytes += request.prompt_logprob_bytes

    def left(self, request: EngineRequest, account: TenantAccount) -> None:
        """Uncounts a request that started, or ended before it could."""
        self._count(request, account, -1)

    def ended(self, request: EngineRequest) -> None:
        """A request ended; what is kept of it is the request table's to bound."""
        self._prompt_logprob_bytes -= request.prompt_logprob_bytes

    def expected_wait_ns(self, num_running: int, outputs: int = 0, passed: Passed = _NOBODY) -> int:
        """Expected wait in nanoseconds of a request with `outputs` outputs for its first step.

        It is derived from measured rates, and 0 while nothing was measured.

        Two queues are ahead of it: prompts to be computed, and, when rows are short, sequences that
        must leave theirs first. Those that it passes are in neither: of tenants that wait for their
        share of the cache, and the less urgent ones.
        """
        rates, rows = self._rates, self._config.max_num_seqs
        wait = 0.0
        if rates.prefill_tokens_per_s:
            num_tokens = self.num_waiting_tokens - passed.num_tokens
            wait = num_tokens * _NS_PER_S / rates.prefill_tokens_per_s
        num_outputs = self._num_waiting_outputs - passed.num_outputs
        rows_short = num_running + num_outputs + outputs - rows
        if rows_short > 0:
            wait = max(wait, rows_short / rows * rates.row_time_ns)
        return int(wait)

    def check(self, request: EngineRequest, now_ns: int, num_running: int, passed: Passed = _NOBODY) -> None:
        """Lets a valid request in, which passes some that wait.

        Raises:
            RequestRefused: UNAVAILABLE while draining, RESOURCE_EXHAUSTED. Not for a deadline that
                has passed: the request ends by it, before it costs a step, as one does whose
                deadline passes while it waits.
        """
        if self.draining:
            raise RequestRefused(RefusalCode.UNAVAILABLE, "the engine is draining", retry_after_ns=_NS_PER_S)
        self._check_sizes(request)
        try:
            self._check_queue(request, num_running)
            self._check_wait(request, now_ns, num_running, passed)
        except RequestRefused:
            self.num_refused += 1
            raise

    def check_fits(self, request: EngineRequest) -> str | None:
        """Explains why one output can never be computed; returns None if it can.

        The output is taken to have the whole cache and a step plan for itself.
        """
        num_bytes = most_admission_bytes(request, self._blocks, self._config.drafts_from_history)
        if num_bytes > self.max_admission_bytes:
            limit = self.max_admission_bytes
            return f"spec: an output of it may take {num_bytes} bytes of a step plan; the limit is {limit}"
        if self.num_blocks is None:
            return None
        num_blocks, beams = request.most_blocks(self._blocks), request.asked.beam_search
        if num_blocks <= self.num_blocks:
            return None
        if beams is not None and beams.width > 1:
            return (
                f"spec.beam_search.width: prompt and max_tokens of {beams.width} beams need {num_blocks} blocks of "
                f"KV cache; there are {self.num_blocks}"
            )
        num_tokens = len(request.prompt_ids) + request.asked.stop.max_tokens - 1
        capacity = self._blocks.most_tokens(self.num_blocks, num_tokens)
        return f"spec.stop.max_tokens: prompt and max_tokens need {num_tokens} tokens of KV cache; there are {capacity}"

    def _check_sizes(self, request: EngineRequest) -> None:
        reason = self.check_fits(request)
        if reason is not None:
            raise RequestRefused(RefusalCode.RESOURCE_EXHAUSTED, reason)
        asked, num_logprobs = request.asked, request.asked.num_logprobs
        bytes_per_token = 14 + 8 * max(num_logprobs, 0) if asked.selects or num_logprobs >= 0 else 4
        num_bytes = asked.num_sequences * asked.stop.max_tokens * bytes_per_token
        if num_bytes > self._config.max_log_bytes:
            message = (
                f"spec.stop.max_tokens: {asked.num_sequences} outputs of {asked.stop.max_tokens} tokens could take "
                f"{num_bytes} bytes of log; the limit is {self._config.max_log_bytes}"
            )
            raise RequestRefused(RefusalCode.RESOURCE_EXHAUSTED, message)
        num_bytes, limit = request.prompt_logprob_bytes, self._config.max_prompt_logprobs_bytes
        if num_bytes > limit:
            message = (
                f"spec.prompt_logprobs: {request.asked.num_prompt_logprobs} most likely tokens at each of "
                f"{len(request.prompt_ids)} prompt tokens"
                f" take {num_bytes} bytes; the limit is {limit}"
            )
            raise RequestRefused(RefusalCode.RESOURCE_EXHAUSTED, message)

    def _check_queue(self, request: EngineRequest, num_running: int) -> None:
        limits = self._config
        message = None
        if self.num_waiting >= limits.max_waiting_requests:
            message = f"the queue is full: {limits.max_waiting_requests} requests wait"
        elif self.num_waiting and self.num_waiting_tokens + len(request.prompt_ids) > limits.max_waiting_tokens:
            message = f"the queue is full: its prompts may have {limits.max_waiting_tokens} tokens"
        elif self._exceeds_prompt_logprobs(request):
            message = (
                f"spec.prompt_logprobs: running and waiting requests may take {limits.max_log_bytes} bytes for them"
            )
        if message is not None:
            retry_ns = self.expected_wait_ns(num_running) // max(1, self.num_waiting)
            raise RequestRefused(
                RefusalCode.RESOURCE_EXHAUSTED,
                message,
                retry_after_ns=_bounded_retry(retry_ns),
                reason=RefusalReason.QUEUE_FULL,
            )

    def _exceeds_prompt_logprobs(self, request: EngineRequest) -> bool:
        num_bytes, taken = request.prompt_logprob_bytes, self._prompt_logprob_bytes
        return bool(num_bytes and taken) and taken + num_bytes > self._config.max_log_bytes

    def _check_wait(self, request: EngineRequest, now_ns: int, num_running: int, passed: Passed) -> None:
        if request.deadline_ns is None:
            return
        left_ns = max(0, request.deadline_ns - now_ns)
        wait_ns = self.expected_wait_ns(num_running, request.asked.num_sequences, passed)
        if wait_ns > left_ns:
            message = f"the expected wait, {wait_ns / 1e9:.3g} s, exceeds the time left, {left_ns / 1e9:.3g} s"
            raise RequestRefused(
                RefusalCode.RESOURCE_EXHAUSTED,
                message,
                retry_after_ns=_bounded_retry(wait_ns - left_ns),
                reason=RefusalReason.DEADLINE,
            )

    def _count(self, request: EngineRequest, account: TenantAccount, sign: int) -> None:
        self.num_waiting += sign
        self.num_waiting_tokens += sign * len(request.prompt_ids)
        self._num_waiting_outputs += sign * request.asked.num_sequences
        account.num_waiting_tokens += sign * len(request.prompt_ids)
        account.num_waiting_outputs += sign * request.asked.num_sequences


def _bounded_retry(retry_ns: int) -> int:
    return min(max(retry_ns, _MIN_RETRY_NS), _MAX_RETRY_NS)


def most_admission_bytes(request: EngineRequest, blocks: SequenceBlocks, with_history: bool = False) -> int:
    """Most bytes that one output's admission can take in a plan, with its block tables.

    The largest admission has the history of all tokens: the output comes back at its end. Every
    admission has one with `with_history`, but for those of beams, of which all come together.
    """
    sampling, stop = request.asked.sampling, request.asked.stop
    num_tokens = len(request.prompt_ids) + stop.max_tokens
    words = sum(RUN_BYTES + len(word) for word in sampling.bad_words)
    lists = words + 2 * len(sampling.logit_bias_ids) + len(stop.token_ids)
    num_bytes = FIELD_BYTES + lists
    num_bytes += len(blocks.groups) * table_bytes(-(-num_tokens // blocks.block_size))
    if request.asked.beam_search is not None:
        return num_bytes + (request.asked.num_sequences - 1) * SIBLING_BYTES
    return num_bytes + (4 * num_tokens if with_history or sampling.needs_history else 0)
