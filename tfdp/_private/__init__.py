"""The one place that touches private TensorFlow and Keras names.

`names` imports them and records the versions they were checked against; the other
files here are the thin framework-facing classes built on them. Nothing else in the
package may import `tensorflow.python` or `keras.src`, or reach into an object's
underscore attributes (a test holds this).
"""
