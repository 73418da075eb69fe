"""The engine: who computes what next, and what became of it.

A pure object without torch, sockets or a clock of its own, driven by one thread.

A request's way in:  engine.add -> validation -> admission, quotas -> intake -> request_table,
subscriptions -> scheduler (waiting_queue)
A step's way out:    engine.plan -> plan_timing -> scheduler (token_budget, kv_cache_manager ->
                     block_pool) -> plan_builder -> a step plan
A token's way back:  engine.settle -> settlement (stops) -> token_log -> outbox -> a service; with
the last one endings -> ledger, quotas, request_table

    engine            the order in which all are asked
    requests, answers, errors, sequence     plain data: what is asked, what is answered, what is
                                            refused, what lives in between
    readers, subscriptions                  who reads, and what follows when somebody leaves;
                                            deadlines: whose time is up
    tenant_account, prefix_keys             what a tenant holds; whose prefixes may be shared
    step_time, rates, load_meter            how long steps take, learned from them, and how busy
                                            that makes the engine
    isolation                               which request makes steps fail
    prompt_log, step_log, request_trace     log probabilities of prompts; what steps and recorded
                                            requests leave for telemetry
"""
