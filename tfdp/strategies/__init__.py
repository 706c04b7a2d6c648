"""Strategies, and the TensorFlow extended objects that implement them."""
