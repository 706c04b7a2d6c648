"""A strategy that needs TensorFlow's collectives, made after TensorFlow has started."""

import tensorflow as tf

import tfdp

if __name__ == "__main__":
    tf.constant(1.0)
    tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(engine="tensorflow", timeout_seconds=30)
    )
