"""Processes that are started, watched and ended, and what is asked of them while they run."""
