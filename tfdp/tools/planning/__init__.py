"""Predicts what a training will need, before it is launched: `tfdp plan`."""
