"""The worker process: runs the model on one device, step by step, as the engine plans it.

Start-up is `main` (without torch: arguments, model folder), `start_up` (device, memory plan,
weights) and `fitted_runner` (cache, warm-up, graphs). Then a plan's way is

    ring -> channel -> step_loop -> a runner: forward, then sample -> host_copy -> channel -> ring

and there are two runners (`runner` is what they have in common), which keep the same state and
compute the same tokens:

    on a                            CPU             GPU
    order inside a step             cpu_runner      gpu_runner, which replays step_graphs where a
                                                    step_shape fits
    block tables, last tokens       cpu_batch       device_rows
    the model's inputs              cpu_batch       step_columns (on the host), step_buffers (on the
                                                    card)
    choice of tokens                sampler, for both, with row_parameters, logit_changes and
                                    penalty_slots

Both take a plan's entries, and cut them where a step goes in pieces, by `step_entries`, make its
columns flat with `flattening` and keep keys and values in `kv_caches`.
"""
