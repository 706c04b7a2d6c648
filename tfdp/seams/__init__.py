"""Every method of Keras and TensorFlow that tfdp replaces: one table, one way."""
