"""The agent of a host that has ranks of an engine elsewhere: `headrace ranks --join HOST:PORT`.

    main       the process: configuration, signals, exit code
    agent      the connection to the engine's backend, again and again
    joining    whether this host can do what the engine asks: version, model, configuration
    host_life  the host's workers of one life: records in and out, marks, ends

A worker does not know of it: it reads a ring and writes a ring, as beside an engine. Torch-free, as
the backend's process is.
"""
