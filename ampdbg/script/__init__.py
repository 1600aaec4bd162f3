"""Run and watch an unmodified training script as Python would run it."""
