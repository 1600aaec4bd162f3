"""AMP misuse and apex found in source code as it is read: rules, their facts, and their fixes (no torch)."""
