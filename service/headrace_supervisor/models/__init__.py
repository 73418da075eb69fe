"""Which models a server runs, and how their backends come and go."""
