"""Pure functions that compute findings from a record, with one family of codes per file."""
