"""Replays of a training step: its saved state, its passes, and what the replays show."""
