"""An unchanged training script, run as Python would run it, and watched."""
