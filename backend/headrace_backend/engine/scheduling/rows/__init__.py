"""Rows of the batch: which sequences have one, and what each of them computes in a step.

    decodes           tokens for rows that decode, with drafts and with what must follow
    prompts           chunks for rows that catch up with their tokens, before and after admissions
    queue_admission   waiting sequences that take a row
    known_tokens      a chunk in the plan, and the outputs that begin where its prompt ends
    row_blocks        room for what a row computes next, by preemption if need be
    micro_batches     which rows decode in which step, where there are pipeline stages
    batch             who has a row, in order of urgency
    worker_memory     accounts of what a worker keeps for rows: blocks, tables, states
    row_tables        what a row's sequence gains in blocks, written into the plan

A module knows only those below it. The batch is the same over all lives of workers; the others are
made for each worker, on whose memory they work.
"""
