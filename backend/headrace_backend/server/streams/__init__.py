"""Services' streams: what services ask of the engine, and what the engine sends back.

    engine_service      the RPCs: reads a stream's messages, calls the engine, answers
    guard_offers        which services are asked to guard which requests
    held_engines        which engines services hold, and so whose keys are not to be placed here
    incoming            messages of the wire -> the engine's plain data
    outgoing            the engine's plain data -> messages of the wire
    log_replay          a request's log, for a reader that comes later
    quota_exchange      what engines tell each other of quotas, carried by services
    service_stream      one stream's way out: merged while the service is slow, bounded in bytes
    statuses            gRPC statuses of refusals and of streams that end

Nothing here decides about a request: the engine does.
"""
