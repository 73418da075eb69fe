"""The worker process: runs the model on one device, step by step, as the engine plans it.

`main` reads arguments and model folder without torch, then `start_up/` brings the model to where it
computes (device, memory plan, weights, cache, warm-up, graphs). From then on a plan's way is

    ring -> channel -> step/loop -> a runner: forward, then sample -> step/host_copy -> channel
    -> ring

Rooms, each of which knows only those below it:

    main                start-up's first part, and every way that the process can end
    start_up/           from a configuration to a runner that compiles and captures nothing more
    step/               one step: shapes, columns, buffers, graphs, the runners, the loop
    sampling/           the choice of tokens, with what rows remember for it
    channel, plan_columns, device_copies, errors, lifetime    what all of these need
"""
