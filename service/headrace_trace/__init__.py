"""`headrace trace`: one request's trace as a page, a picture and an explanation.

    sources (files, a server, jaeger) ─> spans ─> reading ─> trace_model ─> windows, causes ─>
    explanation ─┬─> words
                                                                                                           ├─>
                                                                                                           page
                                                                                                           (page_data,
                                                                                                           the
                                                                                                           folder
                                                                                                           page)
                                                                                                           └─>
                                                                                                           picture

Knows OpenTelemetry's spans and the public client, and nothing of the server.
"""
