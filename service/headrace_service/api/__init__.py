"""The wire headrace.v1: handlers, sessions, pages of lists, and events as bytes."""
