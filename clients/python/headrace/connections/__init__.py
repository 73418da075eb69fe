"""Channels: how they are opened, used in turn, read and closed, for threads and for asyncio."""
