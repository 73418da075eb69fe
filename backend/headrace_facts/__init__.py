"""What services and backends tell the telemetry process: facts, their byte form, and the feed that brings them there. And the pulse that all of them give whoever started them.

For every process that tells; imports nothing of ours and nothing of OpenTelemetry. What facts become (spans, metrics) is `headrace_telemetry`'s.
"""
