"""What a training run has left in files, read as a stranger's, and what it tells."""
