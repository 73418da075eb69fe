"""The backend process around the engine: socket, streams, worker processes, life and death.

Owns everything that has a descriptor or a clock. Decisions about requests are the engine's. No torch here, nor in anything imported from here.
"""
