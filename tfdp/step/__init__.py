"""The parts that tfdp adds to a replica's training step."""
