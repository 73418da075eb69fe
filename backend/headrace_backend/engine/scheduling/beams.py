"""Sequences of a search: which of them compute a hypothesis, and with whose blocks.

A search has as many sequences as it is wide, one for each slot. They take their rows together and
lose them together, so that no beam waits for blocks that another one of its search holds. Nothing
is planned of a beam whose last token was not read: which hypotheses go on decides what is computed
next.

    waits       the first sequence alone, with the tokens that all running hypotheses share; the
                others are in no queue (`LiveRequest.unforked`)
    has rows    the first one computes what is shared, the others are paused without blocks
    forked      each running hypothesis has its sequence; one whose slot gets another hypothesis
                gives its blocks up and shares that one's, and copies a block before it writes to it

Owns these moves. Does not own hypotheses (`requests.beam_search`), who runs (`scheduler`) nor
blocks (`kv_cache_manager`).
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace_backend.engine.cache.kv_cache_manager import KVCacheManager
from headrace_backend.engine.request import beam_blocks
from headrace_backend.engine.requests.beam_search import Fork
from headrace_backend.engine.requests.sequence import LiveRequest, Sequence


def restart(request: LiveRequest, block_size: int) -> Sequence:
    """Prepares a search whose sequences have lost rows and blocks to begin again.

    Returns the sequence that waits for all of them.
    """
    search = request.search
    assert search is not None, "only a search has beams"
    leader, *others = request.sequences
    search.number_slots()
    leader.tokens = search.running[0].tokens[: search.num_shared]
    # Its tokens may have been another hypothesis': the keys of the prompt alone are sure.
    del leader.block_keys[leader.num_prompt_tokens // block_size :]
    leader.forget_unread()
    leader.paused = False
    for beam in others:
        beam.paused = True
    request.unforked = others
    return leader


def num_further_blocks(leader: Sequence, block_size: int) -> int:
    """Most blocks that the next tokens of all beams need beyond those of the leader's tokens."""
    search = leader.search
    assert search is not None, "only a search has beams"
    length = leader.num_prompt_tokens + len(search.running[0].tokens) + 1
    num_tokens = min(length, leader.max_tokens_total - 1)
    num_blocks = beam_blocks(len(leader.request.sequences), leader.num_tokens, num_tokens, block_size)
    return num_blocks - -(-leader.num_tokens // block_size)


def take_rows(beams: Iterable[Sequence], kv: KVCacheManager) -> None:
    """The leader's search got rows for its other sequences: they have no blocks yet."""
    for beam in beams:
        kv.hold_nothing(beam)
        beam.paused = True


def go_on(request: LiveRequest, forks: Iterable[Fork], kv: KVCacheManager) -> None:
    """Has the sequences compute the hypotheses that run now; the next token of each is known."""
    search = request.search
    assert search is not None, "only a search has beams"
    for parent, child in forks:
        kv.branch(request.sequences[parent], request.sequences[child])
    tokens = {hypothesis.slot: hypothesis.tokens for hypothesis in search.running}
    for slot, sequence in enumerate(request.sequences):
        sequence.paused = slot not in tokens
        if sequence.paused:
            kv.release(sequence)
            kv.hold_nothing(sequence)
        else:
            sequence.tokens = tokens[slot]
            sequence.forget_unread()
