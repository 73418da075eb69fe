"""The telemetry process: facts of services and backends become spans and metrics, on a core of its own."""
