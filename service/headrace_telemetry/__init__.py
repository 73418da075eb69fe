"""The telemetry process: facts of services and backends become spans and metrics.

It has a core of its own.

    facts ─> hub ─┬─> span_sink ─> generation_spans, call_spans, step_spans ─> otlp_bytes ─> exits
                  └─> metrics

    exits: trace_ring (answers GetTrace), trace_file (otlp_json), span_exporter (otlp_channel)

    main -> process     entry; the parts put together, and an end within a bound
    spans, export, otlp how facts become spans; where spans go; the form in which they go
    keeping             which traces are exported; step_export: which steps, and when
    engine_book         steps, members and requests of one life of a backend, in which generations
                        find their steps (step_ids, step_work)
    token_columns, token_spans, span_frame      a generation's tokens, many at once; the span that
                                                they lie in
    resources, counts, newest_table             who tells; what was done and what failed; a bounded
                                                dictionary

Nobody waits for this process, and all that it keeps is bounded. Imports nothing of ours but
`headrace_facts`.
"""
