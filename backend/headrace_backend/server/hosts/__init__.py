"""Other hosts that have ranks of this engine: who has joined, and what crosses to them and back.

    ranks_service  the RPC that their agents open: who may join, heartbeats, the end of the stream
    host_table     the places of all hosts: who is there, who is missing, where ranks meet
    joined_host    one host that is there: its ranks of one life of the workers after the other
    routes         which address and network of this machine lead to another

The other end of the stream is `headrace_backend.rank_agent`. What a lost host means is decided
where a lost worker's is (`server.workers`).
"""
