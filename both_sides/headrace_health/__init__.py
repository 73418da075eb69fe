"""Whether a process does its work, as grpc.health.v1 tells whoever watches it from outside.

    address    what an address for probes looks like
    servicer   Check and Watch over what the process says of itself
    probe      an address that answers them alone, without TLS and keys

Imports nothing of ours but the bounds that strangers get.
"""
