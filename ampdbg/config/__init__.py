"""The YAML config: validated, frozen, with every mistake and its line reported at once (no torch)."""
