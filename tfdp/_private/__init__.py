"""Private TensorFlow and Keras names, under public ones.

names, tpu_names    what is imported, and the versions it was checked against
hooks               TensorFlow hooks that tfdp's classes override
optimizer_hooks     the methods by which Keras' optimizers update
keras_models        private state of Keras' models and layers
first_fit           a script that runs until its first fit
keras_calls         what Keras is doing in the calling thread
frames              every inspection of the call stack

Nothing else in the package may import `tensorflow.python` or `keras.src`, or access
underscore attributes of other objects (a test holds this).
"""
