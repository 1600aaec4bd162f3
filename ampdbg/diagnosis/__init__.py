"""From a record to findings: pure functions, one family of codes a file."""
