"""Keeps gRPC's core from writing notes of failed handshakes on stderr.

The core logs errors only, as documented, once GRPC_VERBOSITY says so; without the variable it
writes notes (INFO) as well, a line for each failed TLS handshake, beside the exception that says so
already. It reads the variable once, while grpc is imported. Owns that first import; whoever sets
the variable, or imports grpc first, keeps what they chose.
"""

from __future__ import annotations

import os

_VARIABLE = "GRPC_VERBOSITY"

_chosen = os.environ.get(_VARIABLE)
os.environ.setdefault(_VARIABLE, "ERROR")
try:
    import grpc  # noqa: F401
finally:
    if _chosen is None:
        del os.environ[_VARIABLE]
