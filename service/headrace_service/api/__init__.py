"""The wire headrace.v1: its handlers, its sessions, the pages of its lists, and its events as
bytes.
"""
