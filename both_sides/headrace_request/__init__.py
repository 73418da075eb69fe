"""What travels from a caller to a kernel, described once.

A request's values (`request`, with `sampling` and `stop` in it), the rules that they keep (`rules`)
and the limits (`limits`).

For services, the engine and workers alike; imports nothing of ours and no torch. A service fills
the structs in, checks them by the rules and sends them as they are; the engine checks what it reads
by the same rules; a worker is given `Sampling` as it is.
"""
