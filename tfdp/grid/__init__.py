"""A second axis: weights in parts by Keras' layouts (`layout=`), or in stages."""
