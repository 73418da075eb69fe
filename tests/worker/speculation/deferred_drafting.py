"""A draft model without arithmetic, which is driven through plans as an engine makes them.

What it keeps of a token depends on all tokens before it, as keys and values do, and so do its
drafts. Nothing here needs Triton: what kernels read of a step is read by hand.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch
from tests.worker.driver import Entry, admission, step
from tests.worker.recorded_graphs import RecordedGraphs

from headrace_backend.layers.step_metadata import GroupMetadata
from headrace_backend.step.plan import ForwardPlan, StepPlan
from headrace_backend.worker.plan_columns import Entries, ranges
from headrace_backend.worker.sampling.sampler import Sampler
from headrace_backend.worker.speculation.deferred_steps import DeferredSteps
from headrace_backend.worker.speculation.drafted_rows import DraftedRows
from headrace_backend.worker.speculation.drafter import ComputedTokens
from headrace_backend.worker.speculation.speculation import RowDrafts
from headrace_backend.worker.step.buffers import DeviceRows
from headrace_backend.worker.step.gpu_draft_model import GpuDraftModel
from headrace_backend.worker.step.shape import AttentionSizes
from headrace_kernels.attention.step import PagedAttentionStep

NUM_ROWS, BLOCK_SIZE, MAX_BLOCKS, NUM_DRAFTS, VOCAB = 4, 4, 24, 3, 89
MAX_MODEL_LEN = BLOCK_SIZE * MAX_BLOCKS
# Two for each place in a table: a block is copied to the other one.
NUM_BLOCKS = 2 * NUM_ROWS * MAX_BLOCKS
# Above all token ids.
_PRIME = 1_000_003
CPU = torch.device("cpu")


class ChainModel:
    """Implements `DraftingModel`: a slot holds a digest of all tokens up to its own."""

    attends_in_follow = True
    num_heads = 1
    dtype = torch.float32

    def __init__(self) -> None:
        self.kv_caches = [torch.zeros(NUM_BLOCKS, 2, 1, BLOCK_SIZE, 16)]
        self.digests = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.int64)
        # Tokens of each pass that followed steps or caught up, and number of passes that drafted.
        self.followed: list[int] = []
        self.num_passes = 0

    @property
    def cache_bytes(self) -> int:
        return self.digests.nbytes

    def copy_blocks(self, plan: ForwardPlan) -> None:
        self.digests[torch.from_numpy(plan.copy_targets.astype(np.int64))] = self.digests[
            torch.from_numpy(plan.copy_sources.astype(np.int64))
        ]

    def begin(self, rows: torch.Tensor, positions: torch.Tensor, step: GroupMetadata) -> None:
        pass

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: GroupMetadata
    ) -> torch.Tensor:
        self.num_passes += 1
        return self._digest(token_ids, positions, step)

    def follow(self, token_ids: torch.Tensor, positions: torch.Tensor, step: GroupMetadata, first: int) -> None:
        assert isinstance(step, PagedAttentionStep)
        self.followed.append(int(step.query_start_loc[-1]))
        assert (step.decode is not None) or (step.prefill is not None)
        self._digest(token_ids, positions, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden % VOCAB, VOCAB).float()

    def most_likely(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def _digest(self, token_ids: torch.Tensor, positions: torch.Tensor, step: GroupMetadata) -> torch.Tensor:
        assert isinstance(step, PagedAttentionStep)
        flat, found = self.digests.view(-1), torch.zeros(len(token_ids), dtype=torch.int64)
        begins = step.query_start_loc.tolist()
        for entry, row in enumerate(step.rows.tolist()):
            for place in range(begins[entry], begins[entry + 1]):
                slot, position = int(step.slot_mapping[place]), int(positions[place])
                if slot < 0:
                    continue
                assert step.seq_lens[entry] == position + begins[entry + 1] - place
                before = 0
                if position:
                    block = int(step.block_tables[row, (position - 1) // BLOCK_SIZE])
                    before = int(self.digests[block, (position - 1) % BLOCK_SIZE])
                found[place] = flat[slot] = (before * 31 + int(token_ids[place]) + 1) % _PRIME
        return found


class GreedySampler:
    """Draws the likeliest token."""

    def draw_all(self, logits: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1), torch.ones(len(logits), dtype=torch.bool)


@dataclasses.dataclass
class Drafting:
    """A draft model and its drafter, over tables and rows that it may share with another one."""

    model: ChainModel
    drafter: GpuDraftModel
    deferred: DeferredSteps | None

    @property
    def replayed(self) -> list[str]:
        """Names of the pieces that were replayed, of a drafter that captures passes."""
        assert isinstance(self.drafter._graphs, RecordedGraphs)
        return self.drafter._graphs.replayed


def drafting(tables: DeviceRows, rows: RowDrafts, window: int | None, followed_sizes: tuple[int, ...] = ()) -> Drafting:
    """With a window steps are deferred; without, all are followed.

    Passes over followed tokens are replayed as those of the sizes, if there are any.
    """
    model = ChainModel()
    deferred = None if window is None else DeferredSteps(NUM_ROWS, window, max(followed_sizes, default=16))
    sampler: Sampler = GreedySampler()  # type: ignore[assignment]  # as far as passes use it
    sizes = AttentionSizes.of(1, model.kv_caches[0], torch.float32)
    drafter = GpuDraftModel(model, sampler, rows, tables, sizes, deferred=deferred, followed_sizes=followed_sizes)
    if followed_sizes:
        drafter._graphs = RecordedGraphs()  # type: ignore[assignment]  # in place of a card's
        drafter.capture(lambda *_: None, {}, lambda _: None)
        # While they were captured nothing took part.
        assert set(model.followed) == {0} and not model.digests.any()
        model.followed.clear()
    return Drafting(model, drafter, deferred)


@dataclasses.dataclass
class RowTokens:
    """A sequence in a row: all its tokens, of which the last is not computed."""

    tokens: list[int]
    # By how much the next plan may be too large, because a step with drafts is not read.
    lag: int = 0


class Driven:
    """Rows, and drafters that see the same plans and must draft the same.

    Each has a window or none; with `followed_sizes` one more has the last window, and graphs.
    """

    def __init__(self, windows: tuple[int | None, ...], seed: int = 0, followed_sizes: tuple[int, ...] = ()) -> None:
        self.tables = DeviceRows(NUM_ROWS, MAX_BLOCKS, NUM_BLOCKS, CPU)
        self.state = RowDrafts(NUM_ROWS, 1 + NUM_DRAFTS, CPU)
        self.all = [drafting(self.tables, self.state, window) for window in windows]
        if followed_sizes:
            self.all.append(drafting(self.tables, self.state, windows[-1], followed_sizes))
        self.rows: dict[int, RowTokens] = {}
        self.random = random.Random(seed)

    def admit(self, row: int, length: int, others: dict[int, int] | None = None) -> None:
        """A step with a prompt, which other rows' decodes are beside, with so many drafts each."""
        tokens = [self.random.randrange(VOCAB) for _ in range(length)]
        blocks = [2 * (row * MAX_BLOCKS + place) for place in range(MAX_BLOCKS)]
        others = {other: drafts for other, drafts in (others or {}).items() if other != row}
        released = (row,) if row in self.rows else ()
        self.rows[row] = RowTokens(tokens)
        entries = [*self._decodes(others), Entry(row, 0, tokens, (row,))]
        self._run(step(entries, [admission(row)], {row: blocks}, released), others)
        self._settle(row, [self.random.randrange(VOCAB)])

    def decode(self, drafts: dict[int, int], copied: tuple[int, ...] = (), is_read: bool = False) -> None:
        """A step of decodes, with so many drafts of each row.

        Args:
            drafts: Rows that take part.
            copied: Rows whose last block is copied, as for a write to one that is shared.
            is_read: Whether the engine has read all results.
        """
        if is_read:
            for row in self.rows.values():
                row.lag = 0
        tables, copies = {}, []
        for row in copied:
            table = self.tables.block_tables[0, row].tolist()
            place = (len(self.rows[row].tokens) - 1) // BLOCK_SIZE
            copies.append((table[place], table[place] ^ 1))
            table[place] ^= 1
            tables[row] = table
        self._run(step(self._decodes(drafts), tables=tables, copies=tuple(copies)), drafts)

    def force(self, row: int, count: int) -> None:
        """A step in which a row computes its last token and more that must follow it."""
        tokens = self.rows[row]
        start = len(tokens.tokens) - 1
        forced = [self.random.randrange(VOCAB) for _ in range(count)]
        tokens.lag = 0
        entry = Entry(row, start, [tokens.tokens[-1], *forced], (row,), 1)
        tokens.tokens += forced
        self._run(step([entry]), {})
        self._settle(row, [self.random.randrange(VOCAB)])

    def release(self, row: int) -> None:
        """A step that computes nothing and gives a row back."""
        del self.rows[row]
        self._run(step([], released=(row,)), {})

    def _decodes(self, drafts: dict[int, int]) -> list[Entry]:
        entries = []
        for row, count in drafts.items():
            planned = len(self.rows[row].tokens) - 1 + self.rows[row].lag
            entries.append(Entry(row, planned, None, (row,), 1, num_drafts=count))
        return entries

    def _run(self, plan: StepPlan, drafts: dict[int, int]) -> None:
        self.tables.update_tables(plan.forward)
        drafted, found = DraftedRows.of(plan), torch.zeros(0, NUM_DRAFTS)
        for each in self.all:
            each.drafter.begin(plan)
        if drafted is not None:
            found, *others = [each.drafter.draft(drafted).clone() for each in self.all]
            for other in others:
                for place, count in enumerate(drafted.counts.tolist()):
                    assert other[place, :count].tolist() == found[place, :count].tolist()
            self._assert_same_digests(drafted.rows.tolist())
        by_row = {} if drafted is None else dict(zip(drafted.rows.tolist(), found.tolist(), strict=True))
        if plan.forward.rows.size:
            computed = self._computed(plan, by_row)
            for each in self.all:
                each.drafter.follow(plan, computed)
        # The engine has read the step before when it plans the one after this.
        for each_row in self.rows.values():
            each_row.lag = 0
        for row, count in drafts.items():
            accepted = self.random.randint(0, count)
            self.rows[row].lag = count - accepted
            self._settle(row, [*by_row.get(row, [])[:accepted], self.random.randrange(VOCAB)])

    def _settle(self, row: int, tokens: list[int]) -> None:
        self.rows[row].tokens += tokens
        self.state.last_tokens[row] = tokens[-1]
        self.state.next_positions[row] = len(self.rows[row].tokens) - 1

    def _computed(self, plan: StepPlan, drafts: dict[int, list[int]]) -> ComputedTokens:
        """What the target computes: exact ids, positions and slots, and a token of padding."""
        forward = plan.forward
        starts, ids = [], []
        known = iter(np.split(forward.token_ids, np.cumsum(forward.known_counts)))
        for row, count, own in zip(forward.rows.tolist(), forward.counts.tolist(), known, strict=False):
            tokens = self.rows[row].tokens
            if own.size:
                starts.append(int(forward.starts[len(starts)]))
                ids += own.tolist()
            else:
                starts.append(len(tokens) - 1)
                ids += [tokens[-1], *drafts.get(row, [])][:count]
        entries = Entries(forward.rows, np.array(starts, np.int32), forward.counts)
        positions = torch.from_numpy(ranges(entries.starts, entries.counts))
        rows = torch.from_numpy(np.repeat(entries.rows, entries.counts)).long()
        slots = self.tables.block_tables[0][rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        padding = torch.zeros(1, dtype=torch.int64)
        begins = np.concatenate((np.zeros(1, np.int32), np.cumsum(entries.counts, dtype=np.int32)))
        metadata = PagedAttentionStep(
            query_start_loc=torch.from_numpy(begins),
            seq_lens=torch.from_numpy(entries.seq_lens),
            rows=torch.from_numpy(entries.rows.copy()),
            block_tables=self.tables.group_tables[0],
            slot_mapping=torch.cat((slots, padding - 1)),
            block_size=BLOCK_SIZE,
            decode=None,
            prefill=None,
        )
        return ComputedTokens(torch.cat((torch.tensor(ids), padding)), torch.cat((positions, padding)), metadata)

    def _assert_same_digests(self, rows: list[int]) -> None:
        """All drafters hold the same of the rows' contexts, and what their tokens say."""
        for row in rows:
            digest, expected = 0, []
            for token in self.rows[row].tokens[:-1]:
                digest = (digest * 31 + token + 1) % _PRIME
                expected.append(digest)
            for each in self.all:
                blocks = self.tables.block_tables[0, row].long()
                assert each.model.digests[blocks].view(-1)[: len(expected)].tolist() == expected
