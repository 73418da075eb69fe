"""Which waiting sequence goes first where admitting the most urgent one would evict prefixes.

Requests of two prefixes that come in turns, in a cache that can't hold both, would compute their
prefix each time anew: each request evicts what the next one needs. So a sequence whose prefix is
cached may go before the front of the queue, under these conditions:

- The front does not fit into free blocks alone: it would evict somebody's prefix, or has to wait.
- At least `LEAST_SHARED_TOKENS` more of its tokens are cached than of the front's.
- It is of the same tenant, so that no tenant waits for another one's prefixes.
- It came at most `HEAD_START_S` later than the front, counted as urgency counts (a step of priority
  weighs as much as `ageing_s` of waiting). So whoever waits is overtaken by those alone that came
  soon after it.

Owns this choice. Does not own the queue's order (`waiting_queue`), nor who is admitted
(`scheduler`).
"""

from __future__ import annotations

from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager
from headrace_backend.engine.requests.sequence import Sequence
from headrace_backend.engine.scheduling.prefix_followers import LEAST_SHARED_TOKENS
from headrace_backend.engine.scheduling.waiting_queue import WaitingQueue

# Seconds by which a sequence may have come later than one that it overtakes.
HEAD_START_S = 2.0
# Sequences behind the front that are looked at, since each costs a lookup in every step in which
# blocks are short.
MOST_LOOKED_AT = 16


def bring_forward(waiting: WaitingQueue, kv: KVCacheManager) -> None:
    """Has the queue show a sequence whose prefix is cached, if one may go before the front.

    Args:
        waiting: The queue, with nothing brought forward.
        kv: The cache.
    """
    front = waiting.peek()
    # A search takes rows for all its beams, and what was preempted before its last token was read
    # waits for that: both keep their turn.
    if front is None or front.search is not None or front.num_unread or kv.fits_free_blocks(front):
        return
    latest = front.urgency[0] + round(HEAD_START_S * 1e9)
    least = _num_known(front, kv) + LEAST_SHARED_TOKENS
    last_block = -(-least // kv.block_size) - 1
    for sequence in waiting.behind_front(MOST_LOOKED_AT):
        if sequence.urgency[0] > latest:
            return
        if sequence.search is not None or sequence.num_unread or not kv.knows_block(sequence, last_block):
            continue
        if _num_known(sequence, kv) >= least:
            waiting.bring_forward(sequence)
            return


def _num_known(sequence: Sequence, kv: KVCacheManager) -> int:
    return len(kv.find_prefix(sequence)[0]) * kv.block_size
