"""What a program makes: a strategy, and what TensorFlow asks of its inside."""
