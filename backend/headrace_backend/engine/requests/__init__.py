"""What lives from a request's admission to the end of its log.

    intake              makes a live request of what was asked
    request_table       all live and ended requests, by id and by idempotency key
    sequence            a live request and its outputs: the state that the other rooms read
    token_log           every token of an output, kept for readers to come; prompt_log: log
                        probabilities of the prompt
    stops               where an output ends: token ids, strings
    outbox              what the next message to each service holds; subscriptions: who reads what
    endings             what an end does, in which order
    ledger              a request's time, split by phase; request_trace: what a recorded one leaves

State lives here; decisions about it are taken in `scheduling/`, `settlement` and `endings`.
"""
