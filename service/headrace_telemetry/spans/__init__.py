"""Facts as OpenTelemetry spans: generations, calls, steps and tokens, encoded."""
