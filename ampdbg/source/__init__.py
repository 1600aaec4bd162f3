"""Static analysis of user code: names, lines and ownership (no torch)."""
