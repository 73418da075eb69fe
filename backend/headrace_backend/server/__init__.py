"""The backend process around the engine: socket, streams, worker processes, life and death.

Owns everything that has a descriptor or a clock. Decisions about requests are the engine's. No
torch here, nor in anything imported from here.

    main -> backend     what can be checked before anything starts; how the parts begin and end
                        together (lifetime, logs, socket_tls, model_facts)
    streams/            services' streams: messages in, calls of the engine, messages out; statuses
    engine_loop         drives the engine: results in, plans out, in time (precise_timer)
    workers/            worker processes: start, watchdog, replacement
    health, telemetry   what callers and the telemetry process get; model_cost: what steps cost
"""
