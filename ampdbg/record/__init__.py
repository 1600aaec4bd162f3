"""The record of one run: frozen data, the catalogue of finding codes, and the record file (no torch)."""
