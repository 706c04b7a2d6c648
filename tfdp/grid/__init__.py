"""A second axis: weights that a mesh cuts by Keras' layouts (`layout=`)."""
