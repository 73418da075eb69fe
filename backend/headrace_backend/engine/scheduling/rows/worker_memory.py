"""What a worker keeps for the sequences with rows, as far as the engine accounts for it."""

from __future__ import annotations

from typing import NamedTuple

from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager
from headrace_backend.engine.scheduling.checkpoint_places import CheckpointPlaces
from headrace_backend.engine.scheduling.rows.row_tables import RowTables
from headrace_backend.engine.scheduling.state_copies import StateCopies


class WorkerMemory(NamedTuple):
    """Accounts of one worker's memory, from its first step until it is lost."""

    kv: KVCacheManager
    # Cache groups, in each of which a row has blocks.
    num_groups: int
    tables: RowTables
    # Copies of states between rows.
    states: StateCopies
    # Places where states are kept for prefixes; None: none are kept.
    places: CheckpointPlaces | None
