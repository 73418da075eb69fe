"""The server's commands: configuration, supervisor, doctor and load generator.

The supervisor starts and restarts processes.

Owns the way from defaults, file, environment and flags to one frozen object per process, and the
life of those processes. Does not own what they do: it knows the configurations of
`headrace_service` and `headrace_backend` and nothing else of them, and it imports no torch.
"""
