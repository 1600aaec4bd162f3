"""ampdbg: the precision debugger for PyTorch mixed-precision training."""

__version__ = "0.1.0"
