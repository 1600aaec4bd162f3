"""Runs a patch before it is shown: failing steps, further batches, a training run."""
