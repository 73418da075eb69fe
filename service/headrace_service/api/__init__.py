"""The wire headrace.v1: its handlers, its events as bytes, its sessions, and the pages of its lists."""
