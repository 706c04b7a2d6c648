"""Runs one row of the conformance table, on replicas and on one device.

The problem is small (42 weights in three variables, one of them an embedding with
sparse gradients) and compiled once per optimizer, option and layout; the kinds of
batches run through the same compiled step, because its batch dimension is open.
"""

import dataclasses
import functools

import keras
import numpy as np
import tensorflow as tf

from tests.support.conformance_table import (
    BAD_BATCH,
    KINDS,
    LAYOUTS,
    MOST_ROWS,
    OPTIONS,
    STEPS,
    build,
    make_optimizer,
)
from tests.support.parity import copies, is_accumulator, is_sharded, make_strategy
from tests.support.tpu_stand_in import StandInStrategy

FEATURES, WORDS, OUTPUTS = 4, 6, 3


@dataclasses.dataclass
class Outcome:
    """Where a run ended.

    Args:
      state: the model's weights and the optimizer's floats, as float64 arrays.
      exact: counters and loss scales, which must agree to the last bit.
      loss: the mean loss over all samples.
    """

    state: list
    exact: list
    loss: float


class Problem(keras.Model):
    """A tanh layer of the features and of the embedding of the last one."""

    def __init__(self):
        super().__init__()
        # The bias starts at random, too: a norm of zero would switch LAMB's ratio off.
        normal = keras.initializers.RandomNormal(stddev=0.3)
        self.embedding = keras.layers.Embedding(WORDS, 3, normal.clone())
        self.dense = keras.layers.Dense(
            OUTPUTS, "tanh", bias_initializer=normal.clone()
        )

    def call(self, inputs):
        words = keras.ops.cast(inputs[:, -1], "int32")
        joined = [inputs[:, :-1], self.embedding(words)]
        return self.dense(keras.ops.concatenate(joined, axis=1))


def make_problem(policy):
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(3)
    model = Problem()
    model(np.zeros((1, FEATURES + 1), "float32"))
    keras.config.set_dtype_policy("float32")
    return model


@functools.cache
def global_batches(kind, bad_row):
    """The global batches of a kind, as NumPy arrays: rows of very different size."""
    rng = np.random.default_rng(11)
    batches = []
    for step, counts in enumerate(KINDS[kind][2]):
        rows = sum(counts)
        x = rng.normal(size=(8, FEATURES)) * rng.uniform(0.2, 2.0, size=(8, 1))
        words = rng.integers(0, WORDS, size=(8, 1))
        x = np.concatenate([x, words], axis=1).astype("float32")
        y = rng.normal(size=(8, OUTPUTS)).astype("float32") + 0.5
        if bad_row is not None and step == BAD_BATCH:
            x[bad_row, 0] = np.inf
        batches.append((x[:rows], y[:rows]))
    return batches


@functools.cache
def strategy_of(layout):
    chosen = LAYOUTS[layout]
    if chosen.engine == "tpu":
        return StandInStrategy(
            chosen.replicas,
            pad_batches=MOST_ROWS,
            shard=chosen.shard,
            shard_min_bytes=0,
        )
    # A hundred bytes in a bucket: several buckets even for this problem.
    return make_strategy(
        chosen.replicas,
        engine=chosen.engine,
        hierarchy=chosen.hierarchy,
        shard=chosen.shard,
        repeated_rows=chosen.repeated_rows,
        bucket_bytes=100,
        first_bucket_bytes=50,
    )


@functools.cache
def distributed_batches(layout, bad_row):
    """By kind, the batches as the replicas get them; and their common type."""
    replicas = LAYOUTS[layout].replicas
    signature = (
        tf.TensorSpec((None, FEATURES + 1)),
        tf.TensorSpec((None, OUTPUTS)),
    )

    def whole():
        for kind in KINDS:
            yield from global_batches(kind, bad_row)

    def parts():
        for kind, counts in KINDS.items():
            batches = zip(global_batches(kind, bad_row), counts[replicas], strict=True)
            for (x, y), rows in batches:
                ends = np.cumsum(rows)[:-1]
                yield from zip(np.split(x, ends), np.split(y, ends), strict=True)

    if LAYOUTS[layout].engine == "tpu":
        dataset = strategy_of(layout).experimental_distribute_dataset(
            tf.data.Dataset.from_generator(whole, output_signature=signature)
        )
        return by_kind(list(dataset)), dataset.element_spec
    dataset = strategy_of(layout).distribute_datasets_from_function(
        # Replicas take elements in turn: each element is one replica's part.
        lambda context: tf.data.Dataset.from_generator(
            parts, output_signature=signature
        )
    )
    return by_kind(list(dataset)), dataset.element_spec


def by_kind(found):
    return {kind: found[i * STEPS : (i + 1) * STEPS] for i, kind in enumerate(KINDS)}


class Replicas:
    """One optimizer with one option, compiled for one layout."""

    def __init__(self, optimizer, option, layout):
        self.strategy = strategy_of(layout)
        self.option = OPTIONS[option]
        self.batches, specification = distributed_batches(layout, self.option.bad_row)
        with self.strategy.scope():
            self.model = make_problem(self.option.policy)
            self.model.compile(
                make_optimizer(optimizer, self.option),
                "mse",
                jit_compile=False,
                auto_scale_loss=False,
            )
            build(self.model.optimizer, self.model.trainable_variables)
        self.variables = [*self.model.weights, *self.model.optimizer.variables]
        self.start = [variable.numpy() for variable in self.variables]

        @tf.function(input_signature=[specification], autograph=False)
        def step(batch):
            self.strategy.run(self.model.train_step, args=(batch,))

        self.step = step

    def run(self, kind):
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)
        self.model.reset_metrics()
        for batch in self.batches[kind]:
            self.step(batch)
        loss = float(self.model.metrics[0].result())
        return outcome(self.model, inner_of(self.model.optimizer), loss)


@functools.lru_cache(maxsize=1)
def replicas_of(optimizer, option, layout):
    """The compiled row; kept for the next kind of batches."""
    return Replicas(optimizer, option, layout)


def inner_of(optimizer):
    """What does the update inside `DistributedOptimizer`, whose state is its own."""
    if getattr(optimizer, "reduces_gradients", False):
        return optimizer.inner_optimizer
    return optimizer


def value_of(variable):
    is_copied = hasattr(variable.value, "values") and not is_sharded(variable)
    if is_accumulator(variable) and is_copied:
        return sum(copy.astype("float64") for copy in copies(variable))
    return variable.numpy().astype("float64")


def outcome(model, optimizer, loss):
    variables = [v for v in optimizer.variables if "learning_rate" not in v.path]
    is_exact = [
        not v.dtype.startswith("float") or "dynamic_scale" in v.path for v in variables
    ]
    pairs = list(zip(variables, is_exact, strict=True))
    floats = [*model.weights, *(v for v, exact in pairs if not exact)]
    return Outcome(
        state=[value_of(variable) for variable in floats],
        exact=[v.numpy().item() for v, exact in pairs if exact],
        loss=loss,
    )
