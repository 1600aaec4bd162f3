"""The Record of one run: frozen data, the catalogue of codes, and the file it is kept in (no torch)."""
