"""What the engine refuses, and when it ends what it took.

    validation          rules of one request, whoever sent it
    admission           room in the waiting queue and in the cache; how soon to retry
    quotas              what each tenant may take (tenant_account: what it has taken)
    sharing             how several engines hold a tenant to its quotas together
    deadlines           whose time is up

A refusal is a `RequestRefused`; the server makes a gRPC status of it.
"""
