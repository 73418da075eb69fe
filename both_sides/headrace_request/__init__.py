"""What every process of a server knows about a request: its limits (`limits`).

For services, the engine and workers alike; imports nothing of ours and no torch.
"""
