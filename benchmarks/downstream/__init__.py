"""Programs of libraries that build on Keras, trained plainly and on two replicas."""
