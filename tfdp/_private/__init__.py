"""Private TensorFlow and Keras names, under public ones.

names, tpu_names    what is imported, and the versions that it was checked against
hooks               what tfdp's classes override of TensorFlow's, and when each runs
optimizer_hooks     the steps that Keras' optimizers take
keras_models        what Keras' models and layers keep to themselves
frames              who asks: every look at the call stack
instance_attributes methods of one object replaced for a while

Nothing else in the package may import `tensorflow.python` or `keras.src`, or reach into
an object's underscore attributes (a test holds this).
"""
