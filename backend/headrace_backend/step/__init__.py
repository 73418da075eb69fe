"""The seam between the engine and its workers: the only thing that the two processes share.

The engine decides, a worker computes, and neither imports the other. What crosses is a *step plan*
(engine to workers: what one forward pass of the whole batch computes) and a *step result* (workers
to engine: the tokens that the step chose). Both are columns of bytes in shared memory, so that
writing one costs a copy and reading one costs nothing. The way of one step:

    scheduling -> plan -> ring -> worker        every rank reads the same bytes
    worker -> plan (a result) -> ring -> settlement

    plan          columns of a step plan and of a step result, and their byte form
    plan_bytes    how many bytes a step plan may take: sizes the rings, and bounds admissions
    masks         which tokens rows with a grammar may draw, behind the plan of their step
    drafts        what such rows have drafted, as the masks of draws behind drafts need it
    messages      rare messages beside the steps: start-up progress, memory plan, readiness, failure
    handover      arguments and descriptors for a worker that was started before them
    ring          the transport: records of bytes in shared memory, one writer, several readers
    rank_board    counters by which the server sees how far each rank is

A plan may be sent before the result of the plan before it was read: a token that the engine does
not know yet is the row's last sampled token, which the worker remembers. A worker executes plans
strictly in order. Torch is not imported here, because the engine's side has none.
"""
