"""Models, optimizers and a bound for the tests of owners of matrices.

    python -m tests.support.matrix_training FILE STAGE GROUP CELL...

Under TFDP_* variables every worker trains each cell, such as muon/of-4/clipped/narrow,
and writes its weights to FILE.cell.rank.npz, with dots in the place of slashes.

In float64, where little hides in rounding; `test_conformance.py` has float32. Two
orders of adding the gradients of a batch of B rows, through layers of at most w inputs,
differ by at most d = 2 (B + 2 w) u of their size (Higham 2002, eq. 4.4).

One step: Muon divides a matrix by its norm, which at most doubles d, and each of its
five steps x -> a x + (b A + c A^2) x with A = x x^T multiplies an error in the
direction of a small singular value by at most a = 3.4445: by 3.4445^5 = 485 in all. The
weights move by the rate times 0.2 sqrt(max(m, n)) of it.

Many steps: the factor of each is that of the loss times those 485, so a bound that
holds always is far from what happens. It is measured, as in `conformance_reference.py`:
with inputs raised or lowered at random by d, the root mean square change times sqrt(D),
for D inputs, and the factor 2 for few repetitions (Kenney and Laub 1994).

A replica's share of the loss is a float32 number. Batches have 32 rows, so that every
share is one without rounding: 11/32 and 10/32 on three replicas.
"""

import functools
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model, largest_distance

ROWS, WIDTH, RATE = 32, 33, 0.02
GROWTH = 3.4445**5
D = 2 * (ROWS + 2 * WIDTH) * 2.0**-53
UPDATE = RATE * 0.2 * np.sqrt(WIDTH)
BOUND_OF_ONE_STEP = UPDATE * GROWTH * 2 * D
REPETITIONS = 2


def narrow_model():
    """Sizes that do not divide, and matrices of fewer elements than four replicas."""
    keras.utils.set_random_seed(3)
    units = [WIDTH, 17, 2, 1]
    hidden = [keras.layers.Dense(n, "tanh") for n in units]
    return keras.Sequential([keras.Input((12,)), *hidden, keras.layers.Dense(5)])


def muon(**options):
    return keras.optimizers.Muon(RATE, epsilon=1e-3, **options)


def muon_in_multi(**options):
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(RATE, epsilon=1e-3, **options),
            {".*kernel": keras.optimizers.Muon(RATE, **options)},
        )
    )


def adafactor(**options):
    return keras.optimizers.Adafactor(RATE, epsilon_1=1e-6, **options)


OPTIMIZERS = {"muon": muon, "multi": muon_in_multi, "adafactor": adafactor}
ACCUMULATE = {"each": {}, "of-4": {"gradient_accumulation_steps": 4}}
CLIP = {"unclipped": {}, "clipped": {"global_clipnorm": 0.1}}
MODELS = {"narrow": narrow_model, "two": dense_model}  # of two, on 4 replicas, 2 idle


def data():
    x, y = classification_data()
    return x.astype("float64"), y


def of_float64(is_wanted):
    """Layers and optimizers that are made from now on compute in float64, or again in
    float32."""
    keras.config.set_floatx("float64" if is_wanted else "float32")
    keras.config.set_dtype_policy("float64" if is_wanted else "float32")


def compiled(name, accumulate, clip, build, strategy=None):
    """A model of float64 under a strategy; None: one device."""
    of_float64(True)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = MODELS[build]()
        optimizer = OPTIMIZERS[name](**ACCUMULATE[accumulate], **CLIP[clip])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
        optimizer.build(model.trainable_variables)
    return model


def weights_after(model, x, accumulate):
    epochs = 2 if accumulate == "each" else 8
    options = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    model.fit(x, data()[1], epochs=epochs, **options)
    return [v.numpy() for v in model.weights]


@functools.cache
def one_device(name, accumulate, clip, build):
    """The weights at the end and at the start, and how far rounding may move them."""
    model, (x, _) = compiled(name, accumulate, clip, build), data()
    variables = [*model.weights, *model.optimizer.variables]
    start = [v.numpy() for v in variables]
    expected = weights_after(model, x, accumulate)
    rng, squares = np.random.default_rng(1), 0.0
    for _ in range(REPETITIONS):
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        moved = x * (1 + D * rng.choice([-1.0, 1.0], size=x.shape))
        change = largest_distance(weights_after(model, moved, accumulate), expected)
        squares += change**2 / REPETITIONS
    return expected, start[: len(expected)], 2 * np.sqrt(x.size * squares)


def file_of(path, cell, rank):
    return f"{path}.{'.'.join(cell)}.{rank}.npz"


def main(path, stage, group, cells):
    strategy = tfdp.MultiHostDataParallelStrategy(
        shard=int(stage), shard_group=group, shard_min_bytes=0
    )
    for cell in (one.split("/") for one in cells):
        model = compiled(*cell, strategy)
        weights = weights_after(model, data()[0], cell[1])
        np.savez(file_of(path, cell, strategy.cluster.rank), *weights)
        keras.utils.clear_session()


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
