"""The parity check: whether a model trains on N replicas as on one device."""
