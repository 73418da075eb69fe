"""What a service reports about its calls and generations.

Trace contexts, the recording of tokens on their way out, and facts.

Everything here ends in `headrace_facts`; spans and metrics are made of it in the telemetry process.
With telemetry off nothing of it runs but one branch per call, per generation and per message.
"""
