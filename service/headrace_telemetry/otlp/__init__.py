"""OTLP itself: spans as bytes and as JSON, and the call to a collector."""
