"""Who runs in the next step, and with how many tokens.

    scheduler           the order of a step's parts, and who enters and leaves
    rows                decides row by row: who goes on, who begins, who is preempted
    waiting_queue       who waits for a row, in which order; trial_queue: who is held during trials
    prefix_followers    requests that wait for a prefix which another one is computing
    token_budget        how many tokens a step takes; step_time: how long it would take, learned
    plan_builder        a decision as a step plan; in_flight_step: what is kept until its result
    state_copies        rows that go on from another one's state, or from a kept one
    checkpoint_places   where states are kept for prefixes
    plan_timing         when the next step is planned, so that the device never waits
    scheduler_stats     what scheduling leaves for load reports and the log of steps
    isolation           which request makes steps fail: tries batches in parts until it is found

Blocks are counted by `cache/`, and what a step computed is read by `settlement`; neither is decided
here.
"""
