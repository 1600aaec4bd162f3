"""Runs a patch in fresh processes before it is shown: failing steps, further batches, a training run."""
