"""User code as it is read, not run: names, lines, whose it is (no torch)."""
