"""`NaNGuard` and a step of a program's own, with two optimizers and an average.

As in test_nan_guard: everything is equal to the last bit to a training without the bad
batch. The second loss is bad when the first optimizer has updated.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.callbacks import NaNGuard
from tfdp.errors import NotFiniteError

pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.NotFiniteWarning")

RNG = np.random.default_rng(0)
ROWS, BATCH, BAD_ROW = 32, 8, 13
X = RNG.normal(size=(ROWS, 4)).astype("float32")
Y = RNG.normal(size=(ROWS, 2)).astype("float32")
GOOD_ROWS = np.arange(ROWS) // BATCH != BAD_ROW // BATCH


class Two(keras.Model):
    """Two networks, as a GAN has them, and the moving average of the first one."""

    def __init__(self):
        super().__init__()
        self.networks = [self.network() for _ in range(3)]
        self.networks[2].set_weights(self.networks[0].get_weights())

    def network(self):
        layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((4,)), *layers])

    def set_optimizers(self, make):
        self.own = [make(), make()]
        for optimizer, network in zip(self.own, self.networks, strict=False):
            optimizer.build(network.trainable_variables)

    def train_step(self, data):
        x, y = data
        losses = {}
        for place, optimizer in enumerate(self.own):
            weights = self.networks[place].trainable_variables
            with tf.GradientTape() as tape:
                rows = self.networks[place](x, training=True)
                targets = y[:, place : place + 1]
                loss = self.compute_loss(x=x, y=targets, y_pred=rows)
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, weights), weights)
            losses[f"loss {place}"] = loss
        pairs = zip(self.networks[2].weights, self.networks[0].weights, strict=True)
        for average, weight in pairs:
            average.assign(0.9 * average + 0.1 * weight)
        return losses


class Often(Two):
    """One optimizer for both losses, and weights that are stored around updates."""

    def set_optimizers(self, make):
        self.own = [make()] * 2
        weights = [w for n in self.networks[:2] for w in n.trainable_variables]
        self.own[0].build(weights)

    def train_step(self, data):
        kernel = self.networks[0].trainable_variables[0]
        kernel.assign(kernel * 0.9)
        logs = super().train_step(data)
        kernel.assign(kernel * 0.9)
        return logs


class InABranch(Two):
    """The first update is in a branch of the step, as every n-th one of a WGAN is."""

    def train_step(self, data):
        x, y = data

        def update(place):
            weights = self.networks[place].trainable_variables
            with tf.GradientTape() as tape:
                rows = self.networks[place](x, training=True)
                loss = self.compute_loss(x=x, y=y[:, :1], y_pred=rows)
            self.own[place].apply(tape.gradient(loss, weights), weights)
            return loss

        def first():
            update(0)
            return True

        tf.cond(self.own[0].iterations.value % 2 < 2, first, lambda: False)
        return {"loss 1": update(1)}


def adam():
    return keras.optimizers.Adam(0.05)


def distributed():
    return tfdp.DistributedOptimizer(adam())


def compressing():
    method = tfdp.compression.TopK(0.2, min_bytes=0)
    return make_strategy(2, compression=method, compression_across="replicas")


ROWS_OF_TABLE = {
    "one": (lambda: make_strategy(1), adam),
    "two": (lambda: make_strategy(2), adam),
    "three": (lambda: make_strategy(3), adam),
    "optimizer": (lambda: make_strategy(2, "optimizer"), adam),
    "parameters": (lambda: make_strategy(2, "parameters"), adam),
    "distributed": (lambda: make_strategy(2), distributed),
    "compressed": (compressing, lambda: keras.optimizers.SGD(0.05)),
}


class Trainer:
    """Holds optimizers where nobody looks for them."""


class TwoWithTrainer(Two):
    def set_optimizers(self, make):
        super().set_optimizers(make)
        self.trainer = Trainer()
        self.trainer.own = list(self.own)
        del self.own

    def train_step(self, data):
        self.own = self.trainer.own
        logs = super().train_step(data)
        del self.own
        return logs


def trained(row, targets, rows, on_nan="skip", make_model=Two):
    make, optimizer = ROWS_OF_TABLE[row]
    with make().scope():
        keras.utils.set_random_seed(1)
        model = make_model()
        model.compile(loss="mse", jit_compile=False)
        model.set_optimizers(optimizer)
    guard = NaNGuard(on_nan)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(X[rows], targets[rows], callbacks=[guard], **options)
    return model, guard


def values(model):
    owners = (*model.networks, *model.own)
    return [variable.numpy() for owner in owners for variable in owner.variables]


@pytest.mark.parametrize("bad_loss", [0, 1])
@pytest.mark.parametrize("row", ROWS_OF_TABLE)
@pytest.mark.worth_seconds(12)
def test_neither_optimizer_leaves_anything_behind(row, bad_loss):
    check_nothing_is_left(row, bad_loss, Two)


@pytest.mark.parametrize("bad_loss", [0, 1])
@pytest.mark.parametrize("row", ["two", "parameters", "compressed"])
@pytest.mark.worth_seconds(5)
def test_no_update_of_an_optimizer_stays_that_makes_several(row, bad_loss):
    check_nothing_is_left(row, bad_loss, Often)


def test_what_sums_leave_in_a_branch_is_left_to_it():
    model, guard = trained("compressed", Y, np.arange(ROWS), make_model=InABranch)
    assert guard.skipped_steps == 0
    assert int(model.own[0].iterations.numpy()) == ROWS // BATCH


def test_sums_in_an_update_of_an_accumulation_are_left_to_it():
    """Twice in a step; what is added up in a branch is nobody's outside of it."""
    strategy, _ = ROWS_OF_TABLE["compressed"]
    with strategy().scope():
        keras.utils.set_random_seed(1)
        model = Often()
        model.compile(loss="mse", jit_compile=False)
        model.set_optimizers(
            lambda: tfdp.DistributedOptimizer(
                keras.optimizers.SGD(0.05), accumulate_steps=2
            )
        )
    guard = NaNGuard("skip")
    model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[guard])
    assert guard.skipped_steps == 0


def check_nothing_is_left(row, bad_loss, make_model):
    targets = Y.copy()
    targets[BAD_ROW, bad_loss] = np.nan
    model, guard = trained(row, targets, np.arange(ROWS), make_model=make_model)
    assert guard.skipped_steps == 1
    expected, _ = trained(row, Y, GOOD_ROWS, make_model=make_model)
    for value, other in zip(values(model), values(expected), strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize("make_model", [Two, TwoWithTrainer])
def test_the_cause_is_told(make_model):
    targets = Y.copy()
    targets[BAD_ROW, 1] = np.nan
    with pytest.raises(NotFiniteError, match=r"input y.*row|the loss"):
        trained("two", targets, np.arange(ROWS), "raise", make_model)
