"""Optimizers that the model does not show: in dictionaries, in loops, within others.

Each is exact wherever it is called: gradients are added over the replicas before they
are clipped, and before a loss scaler decides whether to leave out the step.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.kept_optimizers import Keeper, data, fit, loop, one_step, scaled
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
)
from tfdp.errors import ConfigurationError, ScopeError

# A hang must not last: each row takes seconds.
pytestmark = pytest.mark.timeout(250)

SGD = functools.partial(keras.optimizers.SGD, 0.05)
# What is asked -> the optimizer, whether a row is infinite, rows (K micro-batches of
# Keras' own accumulation weigh alike, so they are of one size).
ASKED = {
    "scaled": (scaled, True, 53),
    "scaled-clipped": (functools.partial(scaled, global_clipnorm=0.1), True, 53),
    "scaled-accumulated": (
        functools.partial(scaled, gradient_accumulation_steps=2, clipnorm=0.1),
        True,
        48,
    ),
    "clipped": (functools.partial(SGD, clipvalue=0.01), False, 53),
    "accumulated-clipped": (
        functools.partial(SGD, gradient_accumulation_steps=2, global_clipnorm=0.1),
        False,
        48,
    ),
}
# Six updates of at most 0.05 with gradients below 10, each two sums of about 60 terms
# apart: 6 * 0.05 * 10 * 2 * 60 u = 2e-5. Clipping before the sum: 1e-3 and more.
BOUND = 2e-5


def train(strategy, place, asked):
    optimizer, is_infinite, rows = ASKED[asked]
    x, y = data(is_infinite, rows)
    if place == "loop":
        return loop(strategy, optimizer, x, y)
    options = {"run_eagerly": True} if place == "eager" else {}
    place = "dictionary" if place == "eager" else place
    return fit(strategy, place, optimizer, x, y, **options)


@functools.cache
def on_one_device(asked):
    return train(tf.distribute.get_strategy(), "dictionary", asked)


ROWS = [
    (2, "dictionary", "scaled"),
    (3, "dictionary", "accumulated-clipped"),
    (3, "loop", "scaled"),
    (3, "loop", "clipped"),
]
SLOW = [
    (3, "dictionary", "scaled-accumulated"),
    (3, "list", "scaled-clipped"),
    (2, "nested", "scaled"),
    (2, "eager", "scaled-clipped"),
    (3, "loop", "scaled-accumulated"),
    (2, "loop", "accumulated-clipped"),
]
ROWS += [pytest.param(*row, marks=pytest.mark.slow) for row in SLOW]


@pytest.mark.parametrize("replicas, place, asked", ROWS)
def test_equals_one_device(replicas, place, asked):
    expected = on_one_device(asked)
    got = train(make_strategy(replicas), place, asked)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=0, atol=BOUND, err_msg=key)
    if asked.startswith("scaled"):
        assert got["scale"] == 2.0  # halved by the infinity, once in each epoch


def replica_losses(strategy, optimizer, net, x=None, y=None):
    """Trains on each batch of 8 rows once; how often the step was traced."""
    loss, traces = keras.losses.SparseCategoricalCrossentropy(True), []
    rows = data(False, 8) if x is None else (x, y)

    @tf.function
    def step(batch):
        traces.append(batch)
        return strategy.run(lambda x, y: one_step(net, optimizer, loss, x, y), batch)

    batches = tf.data.Dataset.from_tensor_slices(rows).batch(8)
    for batch in strategy.experimental_distribute_dataset(batches):
        step(batch)
    return len(traces)


def test_an_optimizer_within_another_may_be_called_by_itself():
    """A scaler's inner optimizer then reduces, as any other."""

    def weights(strategy):
        with strategy.scope():
            net, outer = dense_model(), scaled(clipnorm=0.1)
        replica_losses(strategy, outer.inner_optimizer, net)
        return net.get_weights()

    @tf.function
    def step(net, optimizer, x, y):
        one_step(net, optimizer, keras.losses.SparseCategoricalCrossentropy(True), x, y)

    net, outer = dense_model(), scaled(clipnorm=0.1)
    step(net, outer.inner_optimizer, *map(tf.constant, data(False, 8)))
    several = weights(make_strategy(2))
    for mine, theirs in zip(net.get_weights(), several, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=BOUND)


class Anchored(keras.optimizers.SGD):
    """Pulls each weight back to what it was when the optimizer was built."""

    def build(self, variables):
        super().build(variables)
        self.anchors = [
            self.add_variable_from_reference(v, name="anchor") for v in variables
        ]
        self.remember(variables)

    def remember(self, variables):
        for anchor, variable in zip(self.anchors, variables, strict=True):
            anchor.assign(variable)

    def update_step(self, gradient, variable, learning_rate):
        anchor = self.anchors[self._get_variable_index(variable)]
        pulled = gradient + 5.0 * (variable - anchor)
        super().update_step(pulled, variable, learning_rate)


@pytest.mark.parametrize("name", ["Anchored", "ScheduleFreeAdamW"])
def test_one_that_copies_the_weights_when_it_is_built_does_so_once(name):
    """For all replicas, whichever is first in the step that builds it."""
    make = globals().get(name) or getattr(keras.optimizers, name, None)
    if make is None:
        pytest.skip("a newer Keras has it")

    def trained(strategy, is_built):
        with strategy.scope():
            net = dense_model()
            optimizer = make(0.05)
        if is_built:  # one device would copy them within each step
            optimizer.build(net.trainable_variables)
        for _ in range(3):
            replica_losses(strategy, optimizer, net)
        return net

    net = trained(make_strategy(2), is_built=False)
    expected = trained(tf.distribute.get_strategy(), is_built=True)
    for mine, theirs in zip(
        net.trainable_variables, expected.get_weights(), strict=True
    ):
        for copy in mine.value.values:
            # Three updates of some 0.05; each is a quotient, which is as exact as the
            # sums of gradients are: 3 * 0.05 * 60 u = 5e-7. Not copied: 0.1 and more.
            np.testing.assert_allclose(copy.numpy(), theirs, rtol=0, atol=BOUND)


class NeedsItsState(keras.optimizers.SGD):
    def build(self, variables):
        super().build(variables)
        self.scale = self.add_variable((), "ones", name="scale")

    def scale_loss(self, loss):
        return loss * self.scale if self.built else loss


def growing():
    inner = keras.optimizers.SGD(0.05)
    return keras.optimizers.LossScaleOptimizer(inner, 8.0, dynamic_growth_steps=1)


def growing_distributed():
    return tfdp.DistributedOptimizer(
        keras.optimizers.SGD(0.05),
        dynamic_loss_scale=True,
        initial_scale=8.0,
        dynamic_growth_steps=1,
    )


@pytest.mark.parametrize("make", [growing, growing_distributed])
def test_a_scaler_that_is_not_built_scales_by_its_variable(make):
    """In a step that is traced once: a constant would be 8 where `apply` divides by
    16, 32, and so on, and the weights would be those of smaller steps."""

    def trained(strategy, optimizer, is_built):
        with strategy.scope():
            net, optimizer = dense_model(), optimizer()
        if is_built:
            optimizer.build(net.trainable_variables)
        traces = replica_losses(strategy, optimizer, net, *data(False, 40))
        return net.get_weights(), float(optimizer.dynamic_scale.numpy()), traces

    one, scale, _ = trained(tf.distribute.get_strategy(), growing, True)
    several, same, traces = trained(make_strategy(2), make, False)
    assert scale == same == 8.0 * 2**5
    assert traces == 1
    for mine, theirs in zip(several, one, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=BOUND)


def test_own_scaling_that_needs_what_build_creates_is_refused_before_it_is_built():
    strategy = make_strategy(2)
    with strategy.scope():
        net, optimizer = dense_model(), NeedsItsState(0.05)
    with pytest.raises(ConfigurationError, match="scale_loss of its own.*is not built"):
        replica_losses(strategy, optimizer, net)
    with strategy.scope():
        optimizer.build(net.trainable_variables)
    replica_losses(strategy, optimizer, net)


def test_one_that_was_made_elsewhere_is_refused_where_it_is_used():
    strategy = make_strategy(2)
    optimizer = scaled()
    with strategy.scope():
        net = dense_model()
    with pytest.raises(ScopeError, match=r"made|scope"):
        replica_losses(strategy, optimizer, net)


@pytest.mark.parametrize(
    "optimizer, words",
    [(scaled, "conditional"), (lambda: SGD(clipnorm=0.1), "has clipnorm set")],
)
def test_one_that_the_strategy_does_not_know_is_refused(optimizer, words):
    strategy = make_strategy(2)
    with strategy.scope():
        net, unknown = dense_model(), optimizer()
    # As if it were a copy, or made where no scope is open.
    strategy.extended.remember_made()
    unknown.build(net.trainable_variables)
    strategy.extended.remember_made()
    with pytest.raises(ConfigurationError, match=words):
        replica_losses(strategy, unknown, net)


def test_an_optimizer_in_a_list_is_checked_before_training():
    optimizer = scaled()
    with make_strategy(2).scope():
        model = Keeper("list", optimizer)
        model.compile(jit_compile=False)
    optimizer.build(model.net.trainable_variables[:0])
    with pytest.raises(ScopeError, match="was made under no strategy"):
        model.fit(*data(False), batch_size=24, verbose=0)


class ByMergeCall(keras.Sequential):
    """Adds its gradients up itself, and updates where there are no replicas."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = list(self.trainable_variables)
        gradients = tape.gradient(loss, variables)
        context = tf.distribute.get_replica_context()
        context.merge_call(
            lambda strategy, *sums: self.optimizer.apply(list(sums), variables),
            args=tuple(context.all_reduce("sum", gradients)),
        )
        return {"loss": loss}


@pytest.mark.parametrize("replicas", [2, 3])
def test_an_update_outside_of_replicas(replicas):
    def trained(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(2)
            model = ByMergeCall([keras.Input((12,)), keras.layers.Dense(5)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(SGD(), loss, jit_compile=False)
        x, y = classification_data(samples=48)
        model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
        return model

    several = trained(make_strategy(replicas))
    one = trained(tf.distribute.get_strategy())
    assert largest_difference(one, several) < BOUND
