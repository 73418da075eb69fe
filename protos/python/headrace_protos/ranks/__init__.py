"""Between a backend and the rank agents of other hosts."""
