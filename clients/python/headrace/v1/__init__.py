"""Stubs generated from protos/headrace/v1."""
