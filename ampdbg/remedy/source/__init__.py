"""Edits of a user's source, with its formatting kept: statements, calls and whole functions in FP32."""
