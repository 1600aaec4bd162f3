"""Edits of a user's source, with its formatting kept: statements, calls and whole forwards in FP32."""
