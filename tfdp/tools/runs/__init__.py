"""Reads and reports recorded training runs; run files are untrusted input."""
