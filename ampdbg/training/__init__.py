"""The training loop that is watched."""
