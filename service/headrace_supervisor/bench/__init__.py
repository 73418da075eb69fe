"""`headrace bench`: load on a running server, and what its callers would feel."""
