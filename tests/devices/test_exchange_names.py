"""Exchanges of a backward pass, which tapes of two replicas build in another order."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.errors import CollectiveError
from tfdp.exchange.ordering import CallNumbers, exchanges_of

RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(27, 12)).astype("float32")
NOISE = RNG.normal(size=(27, 6)).astype("float32")


class Gan(keras.Model):
    """Two networks; the first tape sees both, as in many a published loop."""

    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.maker = keras.Sequential([keras.Input((6,)), dense(12, use_bias=False)])
        layers = [
            dense(16, use_bias=False),
            tfdp.layers.SyncBatchNormalization(),
            dense(1, use_bias=False),
        ]
        self.judge = keras.Sequential([keras.Input((12,)), *layers])
        self.built = True
        self.square = keras.losses.MeanSquaredError()
        self.of_maker, self.of_judge = (keras.optimizers.SGD(0.01) for _ in range(2))
        self.of_maker.build(self.maker.trainable_variables)
        self.of_judge.build(self.judge.trainable_variables)

    def call(self, noise):
        return self.maker(noise)

    def train_step(self, data):
        real, noise = data
        with tf.GradientTape() as tape:
            made = self.maker(noise)
            judged = [self.judge(x, training=True) for x in (real, made)]
            loss = self.square(tf.ones_like(judged[0]), judged[0])
            loss += self.square(tf.zeros_like(judged[1]), judged[1])
        weights = self.judge.trainable_variables
        self.of_judge.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            judged = self.judge(self.maker(noise, training=True), training=True)
            fooled = self.square(tf.ones_like(judged), judged)
        weights = self.maker.trainable_variables
        self.of_maker.apply(tape.gradient(fooled, weights), weights)
        return {"loss": loss}


def trained(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(7)
        model = Gan()
        model.compile(jit_compile=False)
    model.fit(REAL, NOISE, batch_size=9, epochs=2, shuffle=False, verbose=0)
    return [weight.numpy() for weight in model.weights]


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_shards_of_two_networks_in_one_tape_are_one_devices(replicas, engine):
    """The gradient of the maker's weights comes before, or behind, the judge's."""
    strategy = make_strategy(replicas, shard="parameters", engine=engine)
    found, one = trained(strategy), trained(tf.distribute.get_strategy())
    for mine, theirs in zip(found, one, strict=True):
        # Six updates of 0.01 times gradients below 10; 0.03 and more by wrong sums.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)


def test_what_has_a_name_meets_in_any_order():
    numbers = CallNumbers(2)
    first = {}
    for name in ("a", "b", "a"):
        with exchanges_of(name):
            first.setdefault(name, []).append(numbers.next(0))
    for name in ("b", "a", "a"):
        with exchanges_of(name):
            assert numbers.next(1) == first[name].pop(0)
    assert numbers.next(0) == numbers.next(1) == 0
    numbers.begin_run()
    with exchanges_of("a"):
        # Another run of the same graph does not meet this one.
        assert numbers.next(0) not in (-1, -2, -3)


def test_what_is_alike_by_order_only_is_compared():
    numbers = CallNumbers(2)
    for shape in ([3], [4]):
        numbers.next(0, "sum", [tf.zeros(shape)])
    numbers.next(1)  # which says nothing
    with pytest.raises(CollectiveError, match=r"float32 \(4,\).*float32 \(3,\)"):
        numbers.next(1, "sum", [tf.zeros([3])])
