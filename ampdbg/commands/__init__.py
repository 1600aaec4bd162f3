"""The command line: one file for each command. No other part of the package prints or exits."""
