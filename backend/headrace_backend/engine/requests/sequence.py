"""A request while it lives in the engine, and its sequences.

The scheduler and the settling of steps share this state.

Owns the counters and what follows from them directly. Does not decide anything: who runs is
`scheduler`, which blocks is `kv_cache_manager`, what ends is `settlement`.

A sequence's tokens are its prompt and its output. The engine plans one step ahead of what it has
read, so there are two views of them:

    scheduled  num_tokens    with the tokens that planned steps sample at most, read or not
               num_computed  tokens whose KV planned steps have computed; the next step begins here
    settled    len(tokens)   output tokens that were read
               num_settled   tokens whose KV settled steps have computed

There are no phases: a sequence needs `num_tokens - num_computed` tokens computed; when a step
brings them level, it samples one more. A step that drafts tokens may settle fewer than planned:
what its result lacks goes from both scheduled counters, so that they are upper bounds while steps
are in flight and exact when all are settled.
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import Final

from headrace_backend.engine.events import Event, RequestDone
from headrace_backend.engine.limits.tenant_account import Claim, TenantAccount, TokenCharge
from headrace_backend.engine.output_grammar import OutputGrammar
from headrace_backend.engine.request import EngineRequest, RequestState, Subscriber
from headrace_backend.engine.requests.acceptance import Acceptance
from headrace_backend.engine.requests.beam_search import BeamSearch
from headrace_backend.engine.requests.ledger import Ledger
from headrace_backend.engine.requests.outbox import Stream
from headrace_backend.engine.requests.prompt_log import PromptLog
from headrace_backend.engine.requests.request_trace import RequestTrace
from headrace_backend.engine.requests.selection import Selection
from headrace_backend.engine.requests.stops import StopWatch
from headrace_backend.engine.requests.token_log import OutputLog
from headrace_request import limits

NO_ROW = -1


class Sequence:
    """One output of a request: its tokens, its row and its blocks."""

    __slots__ = (
        "acceptance",
        "block_keys",
        "capacity",
        "decodes",
        "ended",
        "epoch",
        "forced",
        "forced_rate",
        "grammar",
        "held",
        "leader",
        "log",
        "max_drafts",
        "max_output_tokens",
        "max_tokens_total",
        "min_tokens",
        "next_masked",
        "num_computed",
        "num_counted_tokens",
        "num_forgotten",
        "num_given",
        "num_prompt_tokens",
        "num_settled",
        "num_tokens",
        "num_unread_drafts",
        "num_unsure_steps",
        "number",
        "paused",
        "planned_in",
        "prompt_log",
        "publish_at",
        "request",
        "row",
        "runs",
        "search",
        "skips_forced",
        "stop_token_ids",
        "table_from",
        "tables",
        "tail_shared",
        "tokens",
        "urgency",
        "wants_logprobs",
        "was_held_up",
        "watch",
    )

    def __init__(self, request: LiveRequest, log: OutputLog, urgency_ns: int, watch: StopWatch | None) -> None:
        """Makes a sequence that has computed nothing.

        `log` may hold tokens that an earlier attempt emitted.
        """
        spec = request.spec
        self.request = request
        # The request's, at hand for who is asked for many.
        self.number = request.sequence_number
        self.log = log
        # The same array as the log's.
        self.tokens = log.tokens
        self.watch = watch
        # The search whose hypotheses it computes; None: it is an output.
        self.search = request.search
        # Of a recorded request whose sequences are its outputs.
        self.runs = None
        if request.trace is not None and request.selection is None:
            self.runs = request.trace.runs[log.output_index]
        self.urgency = (urgency_ns, request.sequence_number, log.output_index)
        self.stop_token_ids = spec.stop_token_ids
        # Says which tokens the output may draw; None: any. How many of its tokens that knows, and
        # the position from which on draws may have masks.
        self.grammar: OutputGrammar | None = spec.grammar.new_output() if spec.grammar is not None else None
        self.num_given = 0
        # The last of these, as far as they must come whether or not they were drawn.
        self.forced = array("i")
        # Whether they are computed side by side. A token of a bad word can't be drawn, and its
        # output ends: so with these each token is.
        self.skips_forced = spec.asked.max_drafts != 0 and not spec.asked.sampling.bad_words
        # Tokens that came to be known behind one that is drawn, on average of late; forms tend to
        # begin with some.
        self.forced_rate = 1.0
        self.next_masked = spec.grammar.first_masked if spec.grammar is not None else 0
        self.min_tokens = spec.asked.stop.min_tokens
        self.wants_logprobs = spec.asked.num_row_logprobs >= 0
        # Set where this output's steps report the log probabilities of the prompt: those of a
        # request's first output.
        self.prompt_log = request.prompt_log if log.output_index == 0 else None
        self.num_prompt_tokens = len(spec.prompt_ids)
        self.max_output_tokens = spec.asked.stop.max_tokens
        # Drafts that its steps may verify, as its caller and the server allow.
        self.max_drafts = spec.asked.max_drafts if spec.asked.max_drafts >= 0 else limits.MAX_DRAFTS
        # The next token of a beam is not drawn.
        if self.search is not None:
            self.max_drafts = 0
        self.acceptance = Acceptance()
        # Never scheduled beyond: the last token's KV is not needed.
        self.max_tokens_total = self.num_prompt_tokens + spec.asked.stop.max_tokens
        self.num_tokens = self.num_prompt_tokens + len(self.tokens)
        # Tokens that steps so far could have settled and did not.
        self.num_forgotten = 0
        # Drafts in steps in flight: the scheduled counters may be too large by as much.
        self.num_unread_drafts = 0
        # A step of it that was read had drafts and settled nothing: the next one to be planned has
        # none, so that whatever they were can't hold it up.
        self.was_held_up = False
        # Of one with a grammar: steps in flight of which nobody knows how many drafts they settle.
        self.num_unsure_steps = 0
        # What the waiting queue counts it for while it is there.
        self.num_counted_tokens = 0
        self.ended = False
        # Waits apart, while others are on trial.
        self.held = False
        # Computes the prefix that this one waits for (`prefix_followers`).
        self.leader: Sequence | None = None
        # Counts the times it lost its row, so that what an earlier stay planned is recognized.
        self.epoch = 0
        self.block_keys: list[bytes] = []
        # Not to be computed before its search says what: its hypothesis was read, or it has none.
        self.paused = False
        self._leave_row()

    def _leave_row(self) -> None:
        self.row = NO_ROW
        # The row's last sampled token is the sequence's last token: a step computes exactly that
        # one.
        self.decodes = False
        self.num_computed = 0
        self.num_settled = 0
        # Its blocks, of each cache group a table; empty while it has no row.
        self.tables: list[list[int]] = []
        # Tokens that each table has room for.
        self.capacity = 0
        # Settled tokens at which the next block is full and can be offered to the prefix cache.
        self.publish_at = 0
        # The last block is partly filled and may be held by other outputs too.
        self.tail_shared = False
        # Index from which on the worker does not know its tables, since it forked from another
        # sequence while it had a row; None: it knows all.
        self.table_from: int | None = None
        # The step that it was planned in last.
        self.planned_in = 0

    def leave_row(self) -> None:
        """Forgets row and blocks (which the caller has given back); the tokens stay."""
        self.epoch += 1
        self._leave_row()

    def forget_unread(self) -> None:
        """The steps in flight will never be read: what they sampled is to be sampled again."""
        self.num_unsure_steps = self.num_unread_drafts = 0
        self.num_tokens = self.num_prompt_tokens + len(self.tokens)
        if self.num_given > len(self.tokens):
            # Where draws have masks again was said of a place behind tokens that must come anew.
            self.next_masked = min(self.next_masked, len(self.tokens))

    def note_given(self, position: int, forced: array[int] | None) -> None:
        """Its grammar knows the tokens before `position`, and `forced`, which must come behind."""
        num_known = max(self.num_given, position + 1)
        self.forced = forced if forced is not None else _NOTHING_FORCED
        self.num_given = position + len(self.forced)
        self.forced_rate += _RATE_WEIGHT * (max(self.num_given - num_known, 0) - self.forced_rate)

    @property
    def num_forced(self) -> int:
        """Tokens that must follow the scheduled ones, and behind which the output may draw.

        A grammar knows tokens that were read, and those behind them that must come. So where it
        knows more than is scheduled, the scheduled ones that were not read yet must come too, but
        for drafts that may be wrong.
        """
        if self.num_unsure_steps:
            return 0
        num_scheduled = self.num_tokens - self.num_prompt_tokens
        if self.num_given - len(self.forced) > max(num_scheduled - 1, len(self.tokens)):
            # Asked for before a worker was lost: those between will be asked for again.
            return 0
        return min(self.num_given - num_scheduled, self.max_tokens_total - self.num_tokens - 1)

    def forget_unsettled(self, count: int) -> None:
        """A step settled, or is known to settle, so many tokens fewer than it could."""
        self.num_tokens -= count
        self.num_forgotten += count
        if self.row != NO_ROW:
            self.num_computed -= count

    @property
    def num_unread(self) -> int:
        """Tokens that planned steps sample at most and that were not read yet."""
        return self.num_tokens - self.num_prompt_tokens - len(self.tokens)

    def take_draft_limit(self) -> int:
        """Most drafts that the step being planned may verify; asked for once a step.

        0 in the first step behind one that had drafts and settled nothing, of which this forgets.
        0 also where tokens must come that are not computed as such only because it is not known how
        many of them are drafted: then it is known once that was read.
        """
        if self.was_held_up:
            self.was_held_up = False
            return 0
        if self.num_unsure_steps and self.num_given > len(self.tokens) + 1:
            return 0
        return min(self.max_drafts, self.max_tokens_total - self.num_tokens)

    @property
    def completing(self) -> bool:
        """Whether all tokens of the sequence are planned; some may not be read yet."""
        return self.num_tokens >= self.max_tokens_total

    def token_bytes(self, start: int, end: int) -> bytes:
        """Ids of the tokens in [start, end), int32 little-endian.

        They must have been read, or must come (`forced`).
        """
        prompt_length = self.num_prompt_tokens
        if end <= prompt_length:
            return self.request.spec.prompt_ids[start:end].tobytes()
        output = self._output_ids(max(start - prompt_length, 0), end - prompt_length).tobytes()
        if start >= prompt_length:
            return output
        return self.request.spec.prompt_ids[start:].tobytes() + output

    def _output_ids(self, start: int, end: int) -> array[int]:
        num_read = len(self.tokens)
        if end <= num_read:
            return self.tokens[start:end]
        first_forced = self.num_given - len(self.forced)
        unread = max(start, num_read)
        assert first_forced <= unread and end <= self.num_given, "what was not read must come"
        return self.tokens[start:num_read] + self.forced[unread - first_forced : end - first_forced]


# Weight of one draw in the rate of tokens that must come.
_RATE_WEIGHT: Final = 0.125
# Of grammars that leave a choice.
_NOTHING_FORCED: Final = array("i")


@dataclasses.dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in the table: what was asked, its sequences, its readers, its account.

    Kept after its end until its log expires.
    """

    spec: EngineRequest
    # Grows with every request; orders listings and breaks ties of urgency.
    sequence_number: int
    created_at_unix_ns: int
    deadline_ns: int
    ledger: Ledger
    num_prompt_tokens: int
    # The stream and handle that came with the request: a request that is not detached ends with
    # them. Of a detached one those of its guardian; None: it has none.
    owner: Subscriber | None
    account: TenantAccount
    # Of a detached request, another service's copy, for the day on which the guardian's service and
    # the engine are lost at once; None: there is none.
    second_guardian: Subscriber | None = None
    # What its account gets back at its end, but for what was used; None where its tokens were not
    # limited.
    token_charge: TokenCharge | None = None
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    logs: list[OutputLog] = dataclasses.field(default_factory=list)
    # Log probabilities of the prompt, if they were asked for.
    prompt_log: PromptLog | None = None
    # Outputs that wait for the first one to compute the prompt that they share. Of a search that
    # has no rows all sequences but the first, which take their rows with it.
    unforked: list[Sequence] = dataclasses.field(default_factory=list)
    # Subscriptions: (stream, handle) of each.
    readers: list[tuple[Stream, int]] = dataclasses.field(default_factory=list)
    # Sequences that have a row, and outputs that have not ended.
    num_rows: int = 0
    num_active: int = 0
    # Readers know that it started.
    announced: bool = False
    # When the worker was lost, until computing goes on; 0: it was not.
    lost_at_ns: int = 0
    # The step counted last in the ledger.
    last_step_id: int = 0
    # Of a recorded request.
    trace: RequestTrace | None = None
    # Chooses the outputs from the sequences, which are more; None: each sequence is an output.
    selection: Selection | None = None
    # The same, where it is a search.
    search: BeamSearch | None = None
    # The subscription that came with it was ended by its service, before the request was.
    given_up: bool = False
    # Steps that it took part in and that could not be computed.
    num_failed_steps: int = 0
    # Set when it has ended.
    done: RequestDone | None = None

    @property
    def active(self) -> bool:
        """Whether some output has not ended."""
        return self.num_active > 0

    @property
    def state(self) -> RequestState:
        """The state of the sequence, as listings show it."""
        if not self.active:
            return RequestState.FINISHED
        return RequestState.RUNNING if self.ledger.started else RequestState.QUEUED

    @property
    def num_readers(self) -> int:
        """Subscriptions of those who read; guardians' copies are nobody's."""
        if not self.spec.detached:
            return len(self.readers)
        return len(self.readers) - (self.owner is not None) - (self.second_guardian is not None)

    @property
    def claim(self) -> Claim:
        """What the request takes of its tenant's limits while it is active."""
        return Claim(self.account, self.token_charge, self.num_readers, self.num_rows)

    @property
    def log_bytes(self) -> int:
        """Bytes of what readers that come later are sent."""
        prompt_bytes = self.prompt_log.num_bytes if self.prompt_log is not None else 0
        return prompt_bytes + sum(log.num_bytes for log in self.logs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs; of outputs that are chosen, of all sequences computed for them."""
        if self.selection is not None:
            return self.selection.num_tokens
        return sum(len(log.tokens) for log in self.logs)

    def publish(self, event: Event) -> None:
        """Sends an event of the whole request to all its readers."""
        for stream, handle in self.readers:
            stream.outbox.events.append((handle, event))

    def took_row(self, now_ns: int) -> None:
        """Notes that one of the request's sequences is about to be computed."""
        self.num_rows += 1
        self.ledger.computing(now_ns)

    def note_prefix(self, num_tokens: int) -> None:
        """Notes the prompt tokens that a sequence found in the prefix cache when it took a row.

        Only the request's first sequence counts.
        """
        if self.num_rows == 1 and not self.announced:
            self.ledger.cached_tokens = num_tokens

    def lost_row(self, now_ns: int) -> None:
        """Notes that one of the request's sequences lost its row.

        The request counts as preempted while its other sequences only wait.
        """
        self.num_rows -= 1
        if self.num_rows == 0 and self.active:
            self.ledger.preempted(now_ns)
