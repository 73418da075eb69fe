"""Between service and backend."""
