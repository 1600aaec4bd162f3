"""Minimal sets of pins that make a step healthy. The search knows only names, neither torch nor modules."""
