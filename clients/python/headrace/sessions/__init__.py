"""Many generations over one call, for threads and for asyncio."""
