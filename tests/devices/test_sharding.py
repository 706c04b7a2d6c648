"""Stages 1, 2 and 3 of `shard=` train to the weights that stage 0 trains to.

Two replicas add each gradient element as a + b, whichever of them does it and whatever
is cut, so the stages agree to the last bit. Only where a stage adds in another order is
a bound needed; the cases say where and why. Every variable is cut (`shard_min_bytes=0`)
and the sizes do not divide: 33 units, 5 classes. The rows differ between the replicas.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    largest_distance,
    make_strategy,
    rounding_bound,
    train,
    unequal_copies,
)
from tests.support.slow_rows import made

layers = keras.layers
STAGES = (1, 2, 3)


def sgd(**options):
    return lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options)


def adam(**options):
    return lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, **options)


def model_of(*middle, shape=(12,)):
    """A `build` for `train`: the layers that `middle` makes, then five classes."""

    def build():
        keras.utils.set_random_seed(3)
        made = [make() for make in middle]
        return keras.Sequential([keras.Input(shape), *made, layers.Dense(5)])

    return build


def shared_layer_model():
    keras.utils.set_random_seed(3)
    shared = layers.Dense(12, activation="tanh")
    inputs = keras.Input((12,))
    return keras.Model(inputs, layers.Dense(5)(shared(shared(inputs))))


@functools.cache
def words():
    """Sequences of words, of which many occur in several rows and several times."""
    _, y = classification_data()
    return np.random.default_rng(4).integers(0, 7, (len(y), 6)), y


@functools.cache
def sequences():
    x, y = classification_data()
    return x.reshape(-1, 4, 3), y


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained; and at which stages another order of summation is allowed.

    Args:
      options: of `train`.
      reordered: stages at which numbers are added in another order.
      policy: the dtype policy of the model.
      replicas: how many.
      engine: what moves the tensors.
    """

    options: dict = dataclasses.field(default_factory=dict)
    reordered: tuple[int, ...] = ()
    policy: str = "float32"
    replicas: int = 2
    engine: str = "in_process"


def case(
    build: Callable = dense_model,
    optimizer: Callable | None = None,
    reordered: tuple[int, ...] = (),
    policy: str = "float32",
    replicas: int = 2,
    engine: str = "in_process",
    **options,
) -> Case:
    options |= {"build": build, "optimizer": optimizer or adam()}
    return Case(options, reordered, policy, replicas, engine)


def dense_with(**options):
    return model_of(lambda: layers.Dense(33, **options))


def dense_and_batch_norm():
    return model_of(lambda: layers.Dense(33), layers.BatchNormalization)()


def embedding_model():
    embedding = functools.partial(layers.Embedding, 7, 9)
    return model_of(embedding, layers.GlobalAveragePooling1D, shape=(6,))()


class Branches(layers.Layer):
    """One of two matrices; which one, the rows of the replica decide."""

    def build(self, shape):
        self.upper = self.add_weight(shape=(shape[-1], 9))
        self.lower = self.add_weight(shape=(shape[-1], 9))

    def call(self, x):
        return tf.cond(
            tf.reduce_sum(x) > 0, lambda: x @ self.upper, lambda: x @ self.lower
        )


def lstm_model():
    return model_of(functools.partial(layers.LSTM, 7), shape=(4, 3))()


CASES = {
    "adam": case(),
    "adam-tensorflow": case(engine="tensorflow"),
    "batch-norm": case(dense_and_batch_norm),
    # The weights are gathered outside of the loop over time.
    "lstm": case(lstm_model, data=sequences()),
    # So are those of a conditional: each replica may take another branch.
    "conditional": case(model_of(Branches)),
    "ema": case(optimizer=adam(use_ema=True, ema_momentum=0.5)),
    "ema-overwrite": case(
        optimizer=adam(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    ),
    "loss-scaling": case(policy="mixed_float16"),
    "bfloat16": case(policy="mixed_bfloat16"),
    "steps_per_execution": case(steps_per_execution=3),
    # a + b + c has an order; the shards' owners add as their roots, in any.
    "three-replicas": case(optimizer=sgd(), replicas=3, reordered=STAGES),
    # Each weight is updated whole, by its owner, from a sum in the order of stage 0.
    "adafactor": case(optimizer=lambda: keras.optimizers.Adafactor(0.02), replicas=3),
    # Rows that occur several times are added before the exchange, not after.
    "embedding": case(embedding_model, sgd(), data=words(), reordered=STAGES),
    # A weight that is read twice has two gradients on each replica: (a + a') + (b + b')
    # or (a + b) + (a' + b').
    "shared-layer": case(shared_layer_model, reordered=STAGES),
    "constraint-regularizer": case(
        dense_with(kernel_constraint="max_norm", kernel_regularizer="l2"),
        reordered=STAGES,
    ),
    # Stage 1 adds up on each replica and reduces once; 2 and 3 add up reduced shards.
    "accumulation": case(
        optimizer=sgd(gradient_accumulation_steps=2), batch_size=12, reordered=(2, 3)
    ),
    "distributed-accumulation": case(
        optimizer=lambda: tfdp.DistributedOptimizer(sgd()(), accumulate_steps=2),
        batch_size=12,
        reordered=(2, 3),
    ),
    # Within the conditional of an update the constraint wants the updated weight.
    "distributed-constraint": case(
        dense_with(kernel_constraint=keras.constraints.MaxNorm(0.5)),
        lambda: tfdp.DistributedOptimizer(sgd()(), accumulate_steps=2),
        batch_size=12,
        reordered=STAGES,
    ),
    # Norms are sums over the shards, then over the replicas.
    "clipnorm": case(optimizer=sgd(clipnorm=0.1), reordered=STAGES),
    "global_clipnorm": case(optimizer=sgd(global_clipnorm=0.1), reordered=STAGES),
    "lars": case(optimizer=lambda: tfdp.optimizers.LARS(0.5), reordered=STAGES),
    "lamb": case(optimizer=lambda: tfdp.optimizers.LAMB(0.01), reordered=STAGES),
}


def trained(name, stage):
    chosen = CASES[name]
    keras.config.set_dtype_policy(chosen.policy)
    strategy = make_strategy(chosen.replicas, stage, engine=chosen.engine)
    return train(strategy, **chosen.options)


@functools.cache
def unsharded(name):
    model, history = trained(name, stage=0)
    return [v.numpy() for v in model.weights], history["loss"]


# Stage 2 differs from stage 1 by what is kept between micro-steps. What becomes of the
# weights in layers, and of the precision, stage 3 shows.
WITH_STAGE_2 = ("adam", "accumulation", "distributed-accumulation")
WITH_STAGE_1 = (
    *("adam-tensorflow", "embedding", "shared-layer", "clipnorm", "lamb"),
    *("ema-overwrite", *WITH_STAGE_2),
)


def is_covering(name, stage):
    return stage == 3 or name in (WITH_STAGE_1 if stage == 1 else WITH_STAGE_2)


ROWS = made(
    pytest.param(
        name,
        stage,
        id=f"{name}-{stage}",
        marks=() if is_covering(name, stage) else pytest.mark.slow,
    )
    for name in CASES
    for stage in STAGES
)


@pytest.mark.quick
@pytest.mark.worth_seconds(11)
@pytest.mark.parametrize("name, stage", ROWS)
def test_trains_to_the_weights_of_stage_0(name, stage):
    expected, expected_loss = unsharded(name)
    model, history = trained(name, stage)
    got = [v.numpy() for v in model.weights]
    difference = largest_distance(got, expected)
    if stage not in CASES[name].reordered:
        assert difference == 0.0
        assert history["loss"] == expected_loss
    else:
        # As in test_strategy.py: gradients stay below 3, momentum multiplies the rate
        # of 0.05 by 10. A norm is a sum of at most 33 * 12 squares, whose root is off
        # by 200 u of itself: of a clipped gradient below 0.1, or of an update of 0.01.
        bound = rounding_bound(
            model, steps=8, batch_size=24, gradient_bound=3.0, learning_rate=0.5
        )
        assert bound < 5e-4
        assert difference <= bound
        np.testing.assert_allclose(history["loss"], expected_loss, rtol=1e-5)
        start = CASES[name].options["build"]()
        assert largest_difference(start, model) > 10 * bound
    assert unequal_copies(model.weights) == []


@pytest.mark.worth_seconds(15)
def test_a_global_norm_is_that_of_all_shards():
    x, y = classification_data()
    with make_strategy(2, 3).scope():
        model = keras.Sequential([keras.Input((12,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1.0, global_clipnorm=1e-2), "mse")
    before = model.get_weights()
    model.train_on_batch(x[:8], y[:8])
    moved = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
    norm = np.sqrt(sum(np.square(part).sum() for part in moved))
    # 13 weights below 2, each rounded by 2**-24: sqrt(13) 2**-24 of 0.01.
    np.testing.assert_allclose(norm, 1e-2, rtol=2.4e-5)


@pytest.mark.parametrize("stage", (1, 3))
def test_averages_are_swapped_in_for_validation_and_out_again(stage):
    data = classification_data()

    def run(stage):
        with make_strategy(2, stage).scope():
            model = dense_model()
            model.compile(
                adam(use_ema=True, ema_momentum=0.5)(),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False,
            )
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        options = {"validation_data": data, "callbacks": [swap], "epochs": 2}
        history = model.fit(*data, batch_size=24, shuffle=False, verbose=0, **options)
        return model, history.history

    (model, history), (expected, expected_history) = run(stage), run(0)
    assert largest_difference(model, expected) == 0.0
    assert history == expected_history
    # The test could not fail if the averages were the weights themselves.
    plain, _ = train(make_strategy(2, stage), optimizer=adam())
    assert largest_difference(plain, model) > 1e-4


@pytest.mark.parametrize("stage", (1, 3))
def test_evaluate_and_predict_are_those_of_stage_0(stage):
    x, y = classification_data(samples=37)
    sharded, _ = train(make_strategy(3, stage), metrics=["accuracy"])
    plain, _ = train(make_strategy(3), metrics=["accuracy"])
    plain.set_weights(sharded.get_weights())
    options = {"batch_size": 16, "verbose": 0}
    assert sharded.evaluate(x, y, **options) == plain.evaluate(x, y, **options)
    np.testing.assert_array_equal(
        sharded.predict(x, **options), plain.predict(x, **options)
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_custom_loop_with_distributed_optimizer(stage):
    x, y = classification_data()

    def run(stage):
        strategy = make_strategy(2, stage)
        with strategy.scope():
            model = dense_model()
            optimizer = tfdp.DistributedOptimizer(adam(global_clipnorm=10.0)())
            optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def replica_step(rows):
            with tf.GradientTape() as tape:
                loss = loss_of(tf.gather(y, rows), model(tf.gather(x, rows)))
                share = tfdp.losses.local_mean(loss)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(share, variables), variables)

        @tf.function
        def step(rows):
            strategy.run(replica_step, args=(rows,))

        rows = tf.data.Dataset.range(96).batch(24)
        for batch in strategy.experimental_distribute_dataset(rows):
            step(batch)
        return model

    model, expected = run(stage), run(0)
    # No gradient is clipped, but adding the squares is the reduction that is tested.
    assert largest_difference(model, expected) == 0.0
    assert largest_difference(model, dense_model()) > 1e-3
