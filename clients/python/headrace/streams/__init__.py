"""One generation's events, for threads and for asyncio."""
