"""What services and backends tell the telemetry process: facts, their byte form, and the feed that
brings them there.

For every process that tells; imports nothing of ours and nothing of OpenTelemetry. What facts
become (spans, metrics) is `headrace_telemetry`'s. Beside it stands what every process of a server
has: `pulse`, which whoever started it hears, and `log_output`, its own output, whose losses are
told too; and what those have that start processes: `oom_kills`, whether the kernel ended one for
want of memory.
"""
