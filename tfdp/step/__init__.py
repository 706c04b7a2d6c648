"""What a replica does in a step in addition to the model's own computation."""
