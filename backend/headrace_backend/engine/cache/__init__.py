"""Blocks of the KV cache: counted here, filled by the workers.

    block_pool          every block's reference count, and which free blocks still hold a prefix
    cache_group         layers that share a block table, and how far back they look
    kv_cache_manager    the blocks of each sequence: allocated, shared, copied on write, given back
    prefix_keys         hashes by which blocks of one prefix are found, apart for each tenant

Who may have blocks is the scheduler's decision; the memory itself is a worker's.
"""
