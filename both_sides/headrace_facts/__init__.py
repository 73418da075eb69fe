"""Facts that services and backends report to telemetry, their byte form, and the feed.

For every process that reports; imports nothing of ours and nothing of OpenTelemetry. What facts
become (spans, metrics) is `headrace_telemetry`'s. Beside it stands what every process of a server
has: `pulse`, which whoever started it hears, `log_output`, its own output, whose losses are
reported too, and `process_age`, how long it lives already; and what those have that start
processes: `oom_kills`, whether the kernel ended one for want of memory.
"""
