"""Pins by name as plain code: a helper in the file that makes the model, or a file of its own."""
