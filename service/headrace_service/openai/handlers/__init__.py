"""What answers each path, once it is known who calls."""
