"""Edits of the user's code that keep pinned modules and lines in FP32."""
