"""Imported by scripts, and used by none of them."""

multi_tensor_applier = None
