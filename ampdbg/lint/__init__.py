"""Find AMP misuse and apex in source code without running it: rules, their facts, and their fixes (no torch)."""
