"""Conditionals with an exchange in a branch: by what a replica may take them."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    classification_data,
    loss_and_gradients,
    make_strategy,
)
from tfdp.errors import CollectiveError


def over_replicas(value):
    return tf.distribute.get_replica_context().all_reduce("SUM", value)


class Deciding(keras.Model):
    """Updates in a conditional, whose condition `decide` makes in each step."""

    def __init__(self, decide, conditional=tf.cond):
        super().__init__()
        self.decide, self.conditional = decide, conditional
        self.dense = keras.layers.Dense(5)
        self.draws = keras.random.SeedGenerator(3)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        loss, gradients = loss_and_gradients(self, data)

        def apply():
            self.optimizer.apply(gradients, self.trainable_variables)
            return 1

        # Not attributes: a gather lets replicas take turns in the middle of the step.
        now = types.SimpleNamespace(
            model=self, x=data[0], loss=loss, gradients=gradients
        )
        self.conditional(self.decide(now), apply, lambda: 0)
        return {"loss": loss}


def rank_of_replica():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def result_of_metric(now):
    metric = now.model.metrics[0]
    metric.update_state(now.loss)
    return metric.result()


def gathered_loss(now):
    context = tf.distribute.get_replica_context()
    return context.all_gather(tf.reshape(now.loss, [1]), 0)


# Of data that one device has as well, and what replicas know of each other.
ALIKE = {
    "summed loss": lambda now: tf.math.is_finite(over_replicas(now.loss)),
    "summed gradients": lambda now: tf.reduce_all(
        tf.math.is_finite(over_replicas(now.gradients)[0])
    ),
    "gathered": lambda now: tf.reduce_all(tf.math.is_finite(gathered_loss(now))),
    "counter": lambda now: now.model.optimizer.iterations < 1000,
    "weights": lambda now: tf.reduce_sum(now.model.dense.kernel) > -1e9,
    "number of rows": lambda now: tf.shape(now.x)[0] > 1,
    "seeded alike": lambda now: tf.random.stateless_uniform([], [1, 2]) < 2.0,
}
OWN = {
    "loss": (lambda now: tf.math.is_finite(now.loss), "by its own rows"),
    "gradients": (lambda now: tf.norm(now.gradients[0]) < 1e9, "by its own rows"),
    "rows": (lambda now: tf.reduce_max(now.x) < 1e9, "by its own rows"),
    "rank": (lambda now: rank_of_replica() < 1, "by its rank"),
    "draw": (lambda now: tf.random.uniform([]) < 0.5, "by a number that it draws"),
    "Keras' draw": (
        lambda now: keras.random.uniform([], seed=now.model.draws) < 0.5,
        "by a number that it draws",
    ),
    "metric": (lambda now: result_of_metric(now) > -1.0, "by its own part of a metric"),
}


def fitted(strategy, decide, conditional=tf.cond):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = Deciding(decide, conditional)
        model.compile(
            "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    model.fit(*classification_data(24), batch_size=12, verbose=0)
    return model


@pytest.mark.parametrize("name", OWN)
def test_what_replicas_decide_apart_is_refused(name):
    decide, reason = OWN[name]
    with pytest.raises(CollectiveError, match=reason):
        fitted(make_strategy(3), decide)


@pytest.mark.parametrize("shard", ["none", "parameters"])
@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_a_loss_of_its_own_is_refused_with_all_engines(engine, shard):
    with pytest.raises(CollectiveError, match="by its own rows"):
        fitted(make_strategy(2, shard=shard, engine=engine), OWN["loss"][0])


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
@pytest.mark.parametrize("name", ALIKE)
def test_what_all_decide_alike_runs(name, engine):
    """And trains as one device does, which takes the branch in each step."""
    model = fitted(make_strategy(3, engine=engine), ALIKE[name])
    assert model.optimizer.iterations == 2
    one = fitted(tf.distribute.get_strategy(), lambda now: tf.constant(True))
    for mine, theirs in zip(model.get_weights(), one.get_weights(), strict=True):
        # Two updates of 0.01 times gradients below 10, each a sum of 12 terms.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_one_replica_takes_any_branch():
    assert fitted(make_strategy(1), OWN["loss"][0]).optimizer.iterations == 2


def test_a_choice_among_several_is_refused():
    def choice(condition, apply, skip):
        return tf.switch_case(tf.cast(condition, tf.int32), [skip, apply])

    with pytest.raises(CollectiveError, match="by its own rows"):
        fitted(make_strategy(2), OWN["loss"][0], choice)


def test_a_conditional_within_another_is_looked_at():
    def twice(condition, apply, skip):
        always = ALIKE["seeded alike"](None)
        return tf.cond(always, lambda: tf.cond(condition, apply, skip), skip)

    with pytest.raises(CollectiveError, match="by its own rows"):
        fitted(make_strategy(2), OWN["loss"][0], twice)


def test_a_python_if_is_a_conditional():
    strategy = make_strategy(2)

    def replica_step(rows):
        total = tf.zeros([])
        if tf.reduce_max(rows) > 0.5:
            total = over_replicas(tf.reduce_sum(rows))
        return total

    @tf.function
    def step(rows):
        return strategy.run(replica_step, args=(rows,))

    dataset = tf.data.Dataset.range(4).map(lambda n: tf.cast(n, tf.float32)).batch(4)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    with pytest.raises(CollectiveError, match="by its own rows"):
        step(batch)


def test_a_python_if_on_a_sum_runs():
    """AutoGraph converts what `strategy.run` is given, as under stock strategies."""
    strategy = make_strategy(2)

    def replica_step(rows):
        total = over_replicas(tf.reduce_sum(rows))
        if total > 5.0:
            total = over_replicas(total)
        return total

    @tf.function
    def step(rows):
        return strategy.run(replica_step, args=(rows,))

    dataset = tf.data.Dataset.from_tensor_slices([1.0, 1.0, 2.0, 4.0]).batch(2)
    batches = strategy.experimental_distribute_dataset(dataset)
    found = [strategy.experimental_local_results(step(batch)) for batch in batches]
    assert np.array(found).tolist() == [[2.0, 2.0], [12.0, 12.0]]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_branch_in_a_function_that_the_step_calls(is_own):
    def within(condition, apply, skip):
        return tf.function(lambda told: tf.cond(told, apply, skip))(condition)

    strategy = make_strategy(2)
    if not is_own:
        assert fitted(strategy, ALIKE["summed loss"], within).optimizer.iterations == 2
        return
    with pytest.raises(CollectiveError, match="by its own rows"):
        fitted(strategy, OWN["loss"][0], within)
