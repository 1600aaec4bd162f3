"""Tests of a patch before it is shown: on failing steps, further batches and a training run."""
