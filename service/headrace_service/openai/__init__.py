"""OpenAI's HTTP API over the same engines as headrace.v1, in processes of its own.

From the wire inwards: `door` (the process), `app` (paths), `gate` (who calls, and how a call ends),
`handlers` (a file for each kind of path), `requests` (JSON to GenerationSpec), `events` (a stream's
events to JSON), `http` (uvicorn's server with this server's bounds, one exchange, errors).
"""
