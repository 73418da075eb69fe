"""A worker without a model, for tests.

It follows step plans to the letter, and its "model" makes every mistake of a plan visible.

The KV of a token is a chain over everything before it, *read through the row's block table*; a
sampled token depends on all of them, on the seed, the output, the position and, where penalties are
in use, on the history in the row. Blocks are never cleared. So a wrong table, a missed copy, a
stale or shared block, a wrong start or a token in the wrong place changes the answer, which
`expected_tokens` knows without any of this. A slot can be made to hold what is not finite: so does
every slot behind it that sees it, and no state that sees it is reported as finite.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from headrace_backend.cache_groups import ONE_GROUP, CacheGroup
from headrace_backend.engine.request import EngineRequest
from headrace_backend.step.masks import StepMasks
from headrace_backend.step.plan import FRAME_BYTES, MAX_PROMPT_LOGPROBS, RowAdmission, StepPlan, StepResult
from headrace_backend.step.plan_bytes import table_bytes
from headrace_request.selection_rules import NO_SAMPLING

VOCAB_SIZE = 24
_EMPTY_SLOT = -1
POISON = -2


def chain(previous: int, token: int) -> int:
    """KV of a token after the KV before it."""
    return POISON if previous == POISON else hash((previous, token))


def draw(slots: list[int], seed: int, output_index: int, position: int, history: tuple[int, ...]) -> int:
    """The token sampled after these slots."""
    return hash((tuple(slots), seed, output_index, position, history)) % VOCAB_SIZE


def allowed_tokens(words: np.ndarray) -> list[int]:
    """The tokens that a mask allows."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]).tolist()


def choose(allowed: Sequence[int] | None, token: int) -> int:
    """What is drawn where only some tokens may be, None: any, and this one would be without."""
    return token if allowed is None else allowed[token % len(allowed)]


def top_tokens(token: int, num_logprobs: int) -> list[int]:
    """The tokens that the worker reports as most likely beside a sampled token.

    Beside some tokens there are fewer than were asked for.
    """
    return [(token + offset) % VOCAB_SIZE for offset in range(min(num_logprobs, 1 + token % 3))]


def ranked_tokens(slots: list[int]) -> list[tuple[int, float]]:
    """All tokens that may follow these slots in a search, the most likely first.

    Their log probabilities, and sums of them, are exact in float32.
    """
    logprobs = {token: -(1 + hash((tuple(slots), token)) % 8191) / 1024 for token in range(VOCAB_SIZE)}
    return sorted(logprobs.items(), key=lambda entry: -entry[1])


def expected_tokens(
    request: EngineRequest,
    output_index: int,
    allowed: Callable[[list[int]], Sequence[int] | None] = lambda tokens: None,
) -> list[int]:
    """max_tokens tokens of an output, ignoring stops, computed without any engine.

    `allowed` says which tokens may follow an output's tokens; None: any; if none may, it ends.
    """
    prompt = request.prompt_ids.tolist()
    tokens = request.emitted[output_index].tolist() if request.emitted else []
    slots: list[int] = []
    for token in prompt + tokens:
        slots.append(chain(slots[-1] if slots else 0, token))
    while len(tokens) < request.asked.stop.max_tokens:
        history = tuple(prompt + tokens) if request.asked.sampling.needs_history else ()
        left = allowed(tokens)
        if left is not None and not left:
            break
        tokens.append(choose(left, draw(slots, request.asked.sampling.seed, output_index, len(tokens), history)))
        slots.append(chain(slots[-1], tokens[-1]))
    return tokens


PromptEntry = tuple[float, int, list[int]]


def prompt_entry(slot: int, token: int, num_tops: int) -> PromptEntry:
    """The reported entry of a prompt's token that follows the KV in `slot`.

    It has the token's log probability, its rank and the most likely tokens.
    """
    value = hash((slot, token))
    return -float(value % 1009), 1 + value % 31, [(value + offset) % VOCAB_SIZE for offset in range(num_tops)]


def expected_prompt(request: EngineRequest) -> list[PromptEntry]:
    """The entries of the prompt's second token and all after it, computed without any engine."""
    entries, slot = [], 0
    prompt = request.prompt_ids.tolist()
    for token, following in itertools.pairwise(prompt):
        slot = chain(slot, token)
        entries.append(prompt_entry(slot, following, request.asked.num_prompt_logprobs))
    return entries


def column_bytes(plan: StepPlan) -> int:
    """Bytes of a plan without its admissions."""
    columns = [plan.released_rows, plan.prompt_logprobs.joined()]
    for part in (plan.forward, plan.sample):
        columns += [getattr(part, field.name) for field in dataclasses.fields(part)]
    return FRAME_BYTES + sum(column.nbytes for column in columns)


def whole_table_bytes(plan: StepPlan, searching: set[int], num_rows: int) -> int:
    """What block tables take that come with the plan's admissions, or of rows of a search."""
    admitted, forward = {admission.row for admission in plan.admissions} | searching, plan.forward
    updates = zip(forward.table_rows.tolist(), forward.table_counts.tolist(), strict=True)
    return sum(table_bytes(count) for row, count in updates if row % num_rows in admitted)


@dataclasses.dataclass
class Row:
    admission: RowAdmission
    history: list[int]
    # Of each cache group; None: a block that the worker never heard of.
    tables: list[list[int | None]] = dataclasses.field(default_factory=lambda: [[]])

    @property
    def table(self) -> list[int | None]:
        """The table of the first group, which keeps everything."""
        return self.tables[0]

    # None until the first entry says where the prefix cache left off.
    num_computed: int | None = None
    last_token: int | None = None


class FakeWorker:
    """Executes plans in order, each when its result is asked for."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        num_rows: int,
        groups: tuple[CacheGroup, ...] = ONE_GROUP,
    ) -> None:
        self.block_size = block_size
        assert groups[0].window is None, "draws depend on everything that the first group holds"
        self.groups = groups
        self.token_budget = token_budget
        self.num_rows = num_rows
        # Of each slot the group that wrote it, and what of the sequence was computed there.
        self.blocks = [[(0, _EMPTY_SLOT)] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, Row] = {}
        self.plans: deque[bytes] = deque()
        # Rows of searches, of plans that were pushed.
        self.searching: set[int] = set()
        self.next_step_id = 1
        self.non_finite_rows: set[int] = set()
        # Its ring takes no plan of more bytes, of which so many are those of columns.
        self.plan_bytes, self.column_bytes = sys.maxsize, 1 << 30
        self.largest_plan_bytes = 0
        self.num_tokens = 0
        self.attention_window: int | None = None
        self.num_copies = 0
        self.num_prompt_logprobs = 0
        # A prompt token whose log probability is not a number.
        self.non_finite_prompt_token: int | None = None
        # How many of the tokens that are computed next are to pass before one whose KV is not
        # finite; None: all.
        self.poison_after: int | None = None
        # The row whose KV came out so, each time.
        self.poisoned_rows: list[int] = []

        # Of steps by their number: masks that came behind the plan, where somebody computes them.
        self.masks: dict[int, StepMasks] = {}
        # Tokens of outputs that it did not draw.
        self.num_forced = 0
        # Of the step at hand: the tokens that rows with a mask may draw, behind so many drafts.
        self._allowed: dict[tuple[int, int], list[int]] = {}

    def push(self, plan: StepPlan) -> None:
        encoded = plan.encode()
        for admission in plan.admissions:
            (self.searching.add if admission.sampling == NO_SAMPLING else self.searching.discard)(admission.row)
        columns = column_bytes(plan) - whole_table_bytes(plan, self.searching, self.num_rows)
        assert len(encoded) <= self.plan_bytes, "a plan outgrows its ring"
        assert columns <= self.column_bytes, "columns outgrow their part"
        assert len(encoded) - columns <= self.plan_bytes - self.column_bytes, "admissions outgrow their part"
        self.largest_plan_bytes = max(self.largest_plan_bytes, len(encoded))
        self.plans.append(encoded)

    def run(self) -> StepResult:
        """Executes the oldest plan."""
        plan = StepPlan.decode(self.plans.popleft())
        assert plan.step_id == self.next_step_id
        self.next_step_id += 1
        self._move_rows(plan)
        self._note_forced(plan)
        self._update_tables(plan)
        self._copy_blocks(plan)
        hidden = self._forward(plan)
        self._read_masks(plan)
        result = self._sample(plan, hidden)
        if plan.prompt_logprobs.counts.size:
            self._report_prompts(plan, hidden, result)
        return StepResult.decode(result.encode())

    def _note_forced(self, plan: StepPlan) -> None:
        for row, first, ids in plan.forward.forced_tokens():
            assert ids.size and first > 0
            self.num_forced += ids.size
            if self.rows[row].admission.sampling.needs_history:
                self.rows[row].history += ids.tolist()

    def _read_masks(self, plan: StepPlan) -> None:
        masks = self.masks.pop(plan.step_id, None)
        self._allowed = {}
        if masks is not None:
            draws = zip(plan.sample.rows[masks.samples].tolist(), masks.places.tolist(), masks.masks, strict=True)
            self._allowed = {(row, place): allowed_tokens(words) for row, place, words in draws}
            assert len(self._allowed) == masks.samples.size, "a draw has two masks"

    def _masked(self, row: int, token: int, place: int = 0) -> int:
        """What is drawn instead of a token that a mask may exclude."""
        return choose(self._allowed.get((row, place)), token)

    def _move_rows(self, plan: StepPlan) -> None:
        for row in plan.released_rows.tolist():
            del self.rows[row]
        for admission in plan.admissions:
            assert admission.row not in self.rows, "a row is taken twice"
            assert 0 <= admission.row < self.num_rows
            history = np.frombuffer(admission.prompt_ids + admission.output_ids, np.int32).tolist()
            self.rows[admission.row] = Row(admission, history, [[] for _ in self.groups])

    def _update_tables(self, plan: StepPlan) -> None:
        forward = plan.forward
        first = 0
        for row, start, count in zip(
            forward.table_rows.tolist(), forward.table_starts.tolist(), forward.table_counts.tolist(), strict=True
        ):
            group, row = divmod(row, self.num_rows)
            table = self.rows[row].tables[group]
            if self.groups[group].window is not None:
                # Behind a window there are blocks that this worker never hears of.
                table += [None] * (start - len(table))
            assert start <= len(table), "a table has a hole"
            table[start : start + count] = forward.table_blocks[first : first + count].tolist()
            first += count
        assert first == forward.table_blocks.size

    def _copy_blocks(self, plan: StepPlan) -> None:
        sources, targets = plan.forward.copy_sources.tolist(), plan.forward.copy_targets.tolist()
        # A GPU copies them all at once.
        assert not set(sources) & set(targets)
        assert len(set(targets)) == len(targets)
        for source, target in zip(sources, targets, strict=True):
            self.blocks[target] = list(self.blocks[source])
            self.num_copies += 1

    def _forward(self, plan: StepPlan) -> list[tuple[Row, int]]:
        """Returns per token of the step the row and the number of tokens up to it."""
        forward = plan.forward
        rows = forward.rows.tolist()
        assert len(set(rows)) == len(rows), "a row is in the step twice"
        assert 1 <= plan.num_tokens <= self.token_budget, "the token budget is passed"
        self.num_tokens += plan.num_tokens
        known = forward.token_ids.tolist()
        hidden: list[tuple[Row, int]] = []
        writes: list[tuple[int, int]] = []
        for row_index, start, count, known_count in zip(
            rows, forward.starts.tolist(), forward.counts.tolist(), forward.known_counts.tolist(), strict=True
        ):
            row = self.rows[row_index]
            assert count >= 1 and count - known_count in (0, 1)
            if row.admission.sampling != NO_SAMPLING:
                # A row of a search goes on where another one was.
                assert row.num_computed in (None, start), "a row's tokens are computed in order, once"
            tokens, known = known[:known_count], known[known_count:]
            if count > known_count:
                assert row.last_token is not None, "the row has sampled nothing that could be computed"
                tokens.append(row.last_token)
            for position, token in enumerate(tokens, start):
                previous = self._read(row, position - 1) if position else 0
                if previous == POISON and self.attention_window is not None:
                    # As in the last layer, whose keys and values only those in the window see.
                    previous = 0
                self._check_windows(row, position)
                self._write(row, position, self._poisoned(row_index) or chain(previous, token))
                for table in row.tables:
                    writes.append((table[position // self.block_size], position % self.block_size))
                hidden.append((row, position + 1))
            row.num_computed = start + count
        assert not known
        assert len(set(writes)) == len(writes), "two rows write one slot"
        return hidden

    def _sample(self, plan: StepPlan, hidden: list[tuple[Row, int]]) -> StepResult:
        sample = plan.sample
        tokens, ok = [], []
        logprobs: list[tuple[int, float, int, int]] = []
        tops: list[tuple[int, float]] = []
        assert len(set(sample.rows.tolist())) == len(sample.rows)
        for index, (row_index, token_index, position) in enumerate(
            zip(sample.rows.tolist(), sample.token_indices.tolist(), sample.output_positions.tolist(), strict=True)
        ):
            row = self.rows[row_index]
            source, num_tokens = hidden[token_index]
            slots = [self._read(source, p) for p in range(num_tokens)]
            if row.num_computed is None:
                # A fork: from now on it has computed what the other has, through its own table.
                row.num_computed = num_tokens
                assert [self._read(row, p) for p in range(num_tokens)] == slots
            admission = row.admission
            token = draw(slots, admission.sampling.seed, admission.output_index, position, tuple(row.history))
            token = self._masked(row_index, token)
            if row_index in self.non_finite_rows or not self._is_finite(source, num_tokens):
                tokens.append(0)
                ok.append(0)
            else:
                tokens.append(token)
                ok.append(1)
            row.last_token = token
            if admission.sampling.needs_history:
                row.history.append(token)
            if admission.num_logprobs >= 0:
                entries = [(top, -float(top)) for top in top_tokens(token, admission.num_logprobs)]
                if admission.sampling == NO_SAMPLING:
                    entries = ranked_tokens(slots)[: admission.num_logprobs]
                logprobs.append((index, -float(token), token + 1, len(entries)))
                tops.extend(entries)
        result = StepResult(plan.step_id, 0, 1000, np.array(tokens, np.int32), np.array(ok, np.uint8))
        result.checked_ok = np.array([self._is_finite(*hidden[i]) for i in plan.forward.checked_indices], np.uint8)
        if logprobs:
            samples, sampled, ranks, counts = zip(*logprobs, strict=True)
            result.logprob_indices = np.array(samples, np.int32)
            result.logprob_sampled = np.array(sampled, np.float32)
            result.logprob_ranks = np.array(ranks, np.int32)
            result.logprob_counts = np.array(counts, np.int32)
            result.top_token_ids = np.array([token for token, _ in tops], np.int32)
            result.top_logprobs = np.array([logprob for _, logprob in tops], np.float32)
        return result

    def _report_prompts(self, plan: StepPlan, hidden: list[tuple[Row, int]], result: StepResult) -> None:
        runs = plan.prompt_logprobs
        following = runs.token_ids.tolist()
        entries: list[PromptEntry] = []
        columns = (runs.first_indices, runs.counts, runs.num_tops)
        for first, count, num_tops in zip(*(column.tolist() for column in columns), strict=True):
            for index in range(first, first + count):
                row, num_tokens = hidden[index]
                entries.append(prompt_entry(self._read(row, num_tokens - 1), following[len(entries)], num_tops))
        assert 0 < len(entries) == len(following) <= MAX_PROMPT_LOGPROBS
        self.num_prompt_logprobs += len(entries)
        tops = [token for _, _, ids in entries for token in ids]
        result.prompt_sampled = np.array([sampled for sampled, _, _ in entries], np.float32)
        result.prompt_sampled[np.array(following) == self.non_finite_prompt_token] = np.nan
        result.prompt_ranks = np.array([rank for _, rank, _ in entries], np.int32)
        result.prompt_top_token_ids = np.array(tops, np.int32)
        result.prompt_top_logprobs = -np.array(tops, np.float32)

    def _poisoned(self, row: int) -> int:
        """POISON if it is the next token's turn, else 0."""
        if self.poison_after is None:
            return 0
        if self.poison_after:
            self.poison_after -= 1
            return 0
        self.poison_after = None
        self.poisoned_rows.append(row)
        return POISON

    def _is_finite(self, row: Row, num_tokens: int) -> bool:
        window = self.attention_window or num_tokens
        return all(self._read(row, p) != POISON for p in range(max(0, num_tokens - window), num_tokens))

    def _check_windows(self, row: Row, position: int) -> None:
        """A token reads what was computed before it in each group, as far as its window reaches."""
        for number, group in enumerate(self.groups[1:], 1):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for read in range(first, position):
                assert self._read(row, read, number) == self._read(row, read), "a group holds other tokens"

    def _read(self, row: Row, position: int, group: int = 0) -> int:
        block = row.tables[group][position // self.block_size]
        assert block is not None, "a block behind the window is read"
        of_group, slot = self.blocks[block][position % self.block_size]
        assert slot != _EMPTY_SLOT, "a slot is read that was never written"
        assert of_group == group, "a block is read that another group wrote"
        return slot

    def _write(self, row: Row, position: int, value: int) -> None:
        for group, table in enumerate(row.tables):
            self.blocks[table[position // self.block_size]][position % self.block_size] = (group, value)
