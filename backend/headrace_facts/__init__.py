"""What services and backends tell the telemetry process: facts, their byte form, and the feed that brings them there.

For every process that tells; imports nothing of ours and nothing of OpenTelemetry. What facts become (spans, metrics) is `headrace_telemetry`'s.
`log_output` is every process's own output, whose losses are told too.
"""
