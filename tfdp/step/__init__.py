"""What a replica does in one step besides the model's own arithmetic, in order."""
