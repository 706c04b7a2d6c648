"""Draws Keras programs and compares them with one device; see `__main__.py`."""
