"""Trains the same model on one device and on several, and compares the weights."""

import keras
import numpy as np
import tensorflow as tf

import tfdp

# Rounding of float32 (unit round-off).
UNIT_ROUND_OFF = np.finfo(np.float32).eps / 2


def make_strategy(replicas, shard="none", **communication):
    return tfdp.DataParallelStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        communication=tfdp.Communication(**communication),
        shard=shard,
        # Even the smallest variable is cut; some shards are then empty.
        shard_min_bytes=0,
    )


def stock_strategy(replicas=2):
    """TensorFlow's strategy, with sums that spoil no other test of the process.

    Its default collectives have the keys of every other stock strategy of a process:
    two that sum tensors of different size abort the collectives of all, for good.
    """
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def classification_data(samples=96, features=12, classes=5, seed=7):
    """Rows of very different size, so that no two replicas have alike gradients."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, features)).astype("float32")
    x *= rng.uniform(0.2, 3.0, size=(samples, 1)).astype("float32")
    return x, rng.integers(0, classes, samples)


def dense_model(features=12, classes=5, units=33):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(units, activation="tanh"),
            keras.layers.Dense(classes),
        ]
    )


def loss_and_gradients(model, data):
    """What a `train_step` of `model` begins with, on a batch of rows and labels."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    return loss, tape.gradient(loss, model.trainable_variables)


def normalizing_model(optimizer, features=12, classes=5):
    """Compiled and built: moving statistics, and an optimizer that has its state."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(classes),
        ]
    )
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.optimizer.build(model.trainable_variables)
    return model


def train(
    strategy,
    build=dense_model,
    optimizer=None,
    data=None,
    batch_size=24,
    epochs=2,
    loss=None,
    metrics=None,
    **compile_options,
):
    """Fits `build()` under `strategy` (None: one device); the model and its history."""
    x, y = data if data is not None else classification_data()
    with (strategy or tf.distribute.get_strategy()).scope():
        model = build()
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(0.05, momentum=0.9),
            loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=metrics,
            **{"jit_compile": False, **compile_options},
        )
    history = model.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0
    )
    return model, history.history


def copies(variable):
    """What each replica holds of `variable`; of one device the one that there is."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return [copy.numpy() for copy in getattr(value, "values", [value])]


def is_sharded(variable):
    """Whether each replica stores a part of it only."""
    return hasattr(variable.value, "shard")


def is_accumulator(variable):
    """Whether each replica has gradients of its own in it, until they are reduced."""
    return "gradient_accumulator" in variable.path


def unequal_copies(variables):
    """The paths of those whose copies differ between replicas in any bit.

    Shards, and gradients that are not yet reduced, differ by design.
    """
    return [
        variable.path
        for variable in variables
        if not is_sharded(variable)
        and not is_accumulator(variable)
        and len({copy.tobytes() for copy in copies(variable)}) > 1
    ]


def perturb(gradient, error, seed, *, keep_zeros):
    """Every entry of `gradient`, raised or lowered by `error` at random.

    Args:
      keep_zeros: where no row brought anything (a word that does not occur) the sum is
        exactly 0.
    """
    if isinstance(gradient, tf.IndexedSlices):
        values = perturb(gradient.values, error, seed, keep_zeros=keep_zeros)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    noise = tf.random.stateless_uniform(tf.shape(gradient), seed, -1.0, 1.0)
    change = error * tf.cast(tf.sign(noise), gradient.dtype)
    if keep_zeros:
        change *= tf.cast(tf.not_equal(gradient, 0), gradient.dtype)
    return gradient + change


def largest_difference(a, b):
    """The largest difference between the weights of two models."""
    return largest_distance(*([w.numpy() for w in m.weights] for m in (a, b)))


def largest_distance(a, b):
    """The largest difference between two lists of arrays; NaN where one is NaN.

    Python's `max` would pass over a NaN that does not come first, and every comparison
    with the result would hold.
    """
    pairs = zip(a, b, strict=True)
    return float(np.max([np.max(np.abs(x - y), initial=0.0) for x, y in pairs]))


def rounding_bound(model, steps, batch_size, gradient_bound, learning_rate):
    """How far two float32 runs may drift when only the order of summation differs.

    A sum of n terms in float32 is off by at most (n - 1) u sum|t| (Higham 2002,
    eq. 4.4), whatever the order; so two orders differ by at most twice that. The mean
    gradient of a batch of B samples, each below G, thus differs by 2 B u G, and is
    taken `steps` times with the learning rate (momentum m multiplies it by at most
    1 / (1 - m): put that into `learning_rate`). The forward and backward pass repeat
    sums of up to `width` terms, each adding as much again.
    """
    width = max(max(w.shape) for w in model.trainable_weights)
    terms = 2 * (batch_size + 2 * width)
    return steps * learning_rate * terms * UNIT_ROUND_OFF * gradient_bound
