"""Blocks of the KV cache: counted here, filled by the workers.

    block_pool          every block's reference count, and which free blocks still hold a prefix
    kv_cache_manager    the blocks of each sequence: allocated, shared, copied on write, given back
    state_checkpoints   states of recurrent layers that are kept at the ends of prefixes
    prefix_keys         hashes by which blocks of one prefix are found, apart for each tenant

Which layers share a block table is `headrace_backend.cache_groups`', who may have blocks is the
scheduler's decision; the memory itself is a worker's.
"""
