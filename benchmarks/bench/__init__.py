"""Compares sums and training with the stock strategy, measured in the same run.

A case is a row of `cases.CASES`. The runner starts a child process per case and device
count, since TensorFlow fixes its devices at start; with several workers, a group of
processes per arm. Children time the case's arms (strategies) in turn and return the
seconds of every repeat; `results` makes medians, spreads and ratios of these.
"""
