"""The terminal report: a Record in, a string out."""
