"""One step of the batch, from a plan to its result.

There are two runners (`runner` is what they have in common), which keep the same state and compute
the same tokens:

    on a                            CPU             GPU
    order inside a step             cpu_runner      gpu_runner, which replays graphs where a shape
                                                    fits
    block tables, last tokens       cpu_runner      buffers
    the model's inputs              cpu_runner      columns (on the host), buffers (on the card)
    a small model that drafts       cpu_draft_model gpu_draft_model, by its draft_passes

Both take a plan's entries, cut them where a step goes in pieces and make its columns flat by
`plan_columns`, keep keys and values in `kv_caches`, and choose tokens by `sampling/`.

    loop                plans in, results out; recovery: after a step that raised
    shape               the sizes that a graph is captured for; graphs: their recordings
    host_copy           tokens on their way to the host, and when they arrived
"""
