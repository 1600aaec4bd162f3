"""The command line: one command a file; the only place that prints and exits."""
