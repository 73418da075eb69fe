"""The backend process around the engine: socket, streams, worker processes, life and death.

Owns everything that has a descriptor or a clock. Decisions about requests are the engine's. No
torch here, nor in anything imported from here.

    main -> backend     what can be checked before anything starts; how the parts begin and end
                        together (lifetime, logs, model_facts)
    engine_loop         drives the engine: results in, plans out, in time (precise_timer)
    engine_service      services' streams: incoming -> engine -> outgoing, log_replay ->
                        service_stream; socket_tls, statuses, health
    worker_supervision  -> worker_group -> worker_process: start (start_report), watchdog
    (rank_watch), replacement
    telemetry           what the telemetry process is told; model_cost: what steps cost
"""
