"""Worker processes of one model: their start, their watching, and their replacement.

    worker_supervision  has a group of workers at all times, until replacing them does not help
    worker_group        the ranks of one model: sends plans, reads results, sees what is lost
    host_ranks          the ranks of one host: their ring, their start, their end
    other_hosts         what a group asks of hosts beside its own
    early_workers       those of the first life, which import before they know what they are to do
    worker_process      one rank: its process, descriptors, and what it wrote to its logs
    rank_watch          finds the rank that makes no progress
    worker_losses       whether losses come too often to go on
    start_report        what is logged of a start

What a lost worker means for requests is the engine's business (`engine_loop` asks it).
"""
