"""headrace_backend."""
