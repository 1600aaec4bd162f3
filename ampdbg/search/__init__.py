"""Minimal sets over a predicate: which pins make a step healthy. It knows neither torch nor modules, only names."""
