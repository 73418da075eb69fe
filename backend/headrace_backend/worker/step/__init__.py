"""One step of the batch, from a plan to its result.

There are two runners (`runner` is what they have in common), which keep the same state and compute
the same tokens:

    on a                            CPU             GPU
    order inside a step             cpu_runner      gpu_runner, which replays graphs where a shape
                                                    fits
    block tables, last tokens       cpu_batch       device_rows
    the model's inputs              cpu_batch       columns (on the host), buffers (on the card)

Both take a plan's entries, and cut them where a step goes in pieces, by `step_entries`, make its
columns flat with `flattening`, keep keys and values in `kv_caches`, and choose tokens by
`sampling/`.

    loop                plans in, results out; recovery: after a step that raised
    shape               the sizes that a graph is captured for
    host_copy           tokens on their way to the host; finish_times: when they arrived
    launch_times        times of launches on the device, for the choice of graphs
"""
