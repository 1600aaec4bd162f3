"""The YAML config: validated, frozen, every mistake reported at once with its line (no torch)."""
