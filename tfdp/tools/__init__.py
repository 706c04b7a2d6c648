"""Beside the core: plans, measurements, reports, comparisons, and the commands."""
