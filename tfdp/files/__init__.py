"""Atomic writes, checked JSON, and large files past the page cache."""
