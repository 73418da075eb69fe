"""A generation on its way from the engine to its reader: tokens in, the events of a wire out.

`generation_stream` holds what waits for one reader; `wires` is what every protocol that writes events implements. What a stream leaves
to telemetry (`generation_fact`, told by `ending`) is made here, so that tracing knows no stream.
"""
