"""Measurements for the work on tfdp itself; see README.md in this folder."""

import os

# What TensorFlow prints while it starts would bury the figures.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
