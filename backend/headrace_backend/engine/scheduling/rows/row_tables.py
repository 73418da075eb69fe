"""Block tables on their way to the worker: what a row's sequence gains in blocks, the plan says.

Owns the order of rows in the worker's tables: those of the second cache group follow those of the
first. Does not own blocks (`kv_cache_manager`) nor who may have them (`scheduler`).
"""

from __future__ import annotations

from headrace_backend.cache_groups import NO_BLOCK
from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager
from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.plan_builder import PlanBuilder


class RowTables:
    """Writes what the rows' block tables gain into the plan."""

    __slots__ = ("_num_rows",)

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def write(self, sequence: Sequence, builder: PlanBuilder, start: int = 0) -> None:
        """Writes the tables of a sequence from index `start` on, but for blocks that went back."""
        for group, table in enumerate(sequence.tables):
            first = start
            while first < len(table) and table[first] == NO_BLOCK:
                first += 1
            builder.update_table(group * self._num_rows + sequence.row, first, table[first:])

    def grow(self, sequence: Sequence, num_tokens: int, kv: KVCacheManager, builder: PlanBuilder) -> None:
        """Appends blocks until the tokens fit, which are available."""
        appended = kv.grow(sequence, num_tokens)
        if appended:
            line = sequence.row
            for table in sequence.tables:
                builder.update_table(line, len(table) - appended, table[-appended:])
                line += self._num_rows

    def rewrite(self, sequence: Sequence, num_tokens: int, kv: KVCacheManager, builder: PlanBuilder) -> bool:
        """Does what `copy_on_write` and `grow` do of tables that the worker does not know yet.

        Each place is written once, because workers write all of a plan's at the same time. False:
        the plan has no room for it, and nothing has changed.
        """
        assert sequence.table_from is not None, "there is something that the worker does not know"
        first = min(sequence.table_from, sequence.num_computed // kv.block_size)
        if not builder.take_table(kv.num_blocks_for(num_tokens) - first):
            return False
        for copy in kv.copy_on_write(sequence):
            builder.add_copy(copy)
        kv.grow(sequence, num_tokens)
        self.write(sequence, builder, first)
        sequence.table_from = None
        return True

    def copy_on_write(self, sequence: Sequence, kv: KVCacheManager, builder: PlanBuilder) -> None:
        """Makes the blocks that the sequence writes to next its own."""
        index = sequence.num_computed // kv.block_size
        for copy in kv.copy_on_write(sequence):
            builder.add_copy(copy)
            builder.update_table(copy.group * self._num_rows + sequence.row, index, [copy.target])
