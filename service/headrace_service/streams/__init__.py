"""A generation on its way from the engine to its reader: tokens in, the events of a wire out.

`generation_stream` holds what waits for one reader; every protocol that writes events implements
`wires.EventWire`. `generation_fact` makes what telemetry learns of a stream and `ending` sends it,
so that tracing knows no stream.
"""
