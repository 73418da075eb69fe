"""The engine: who computes what next, and what became of it.

A pure object without torch, sockets or a clock of its own, driven by one thread.

A request's way in:  engine.add -> limits (validation, admission, quotas) -> requests (intake ->
                     request_table, subscriptions) -> scheduling (waiting_queue)
A step's way out:    engine.plan -> scheduling (plan_timing -> scheduler -> token_budget) -> cache
                     (kv_cache_manager -> block_pool) -> scheduling (plan_builder) -> a step plan
A token's way back:  engine.settle -> settlement -> requests (stops -> token_log -> outbox) -> a
                     service; with the last one endings -> ledger, quotas, request_table

Rooms, each of which knows only those below it:

    engine              the order in which all are asked; with settlement, readers,
                        load_meter, step_log, which know several rooms
    scheduling/         who runs, waits or is preempted; how large a step is, and how long it takes
    cache/              blocks of the KV cache: who holds them, whose prefixes may be shared
    requests/           what lives from admission to the end of a log: table, sequences, token logs,
                        stops, what goes to readers
    limits/             what is refused: rules of a request, room in the queue, quotas, deadlines
    request, answers, events, errors, rates     what is asked, answered, reported and refused, as
                        plain data; measured rates
"""
