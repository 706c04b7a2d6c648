"""Sharded variables: what a replica stores, reads and assigns; what is refused."""

import copy
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model, make_strategy, train
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.plan.shards import ShardLayout

STAGES = (1, 2, 3)
SHAPE = (5, 3)
VALUE = np.arange(15, dtype="float32").reshape(SHAPE)


def is_sharded(variable):
    return hasattr(variable.value, "shard")


def bytes_on_replica(variable, rank):
    value = variable.value
    own = value.shard(rank) if is_sharded(variable) else value.values[rank]
    return int(np.prod(own.shape)) * own.dtype.size


def cut_bytes(variable, parts):
    """A shard's bytes by the formula: the elements over the parts, rounded up."""
    return ShardLayout(tuple(variable.shape), parts).shard_elements * 4


@pytest.fixture(params=[2, 3])
def sharded(request):
    """A weight of 5 x 3 at stage 3: the last shard is padded."""
    strategy = make_strategy(request.param, shard=3)
    with strategy.scope():
        variable = keras.Variable(VALUE, name="weight")
    assert is_sharded(variable)
    return strategy, variable


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("replicas", [2, 4])
def test_each_replica_stores_its_part(replicas, stage):
    strategy = make_strategy(replicas, stage)
    model, _ = train(strategy, optimizer=lambda: keras.optimizers.Adam(0.01), epochs=1)
    weights = model.trainable_variables
    slots = [v for v in model.optimizer.variables if v.ndim]
    assert len(slots) == 2 * len(weights)
    for rank in range(replicas):
        for variable in [*slots, *(weights if stage == 3 else [])]:
            assert bytes_on_replica(variable, rank) == cut_bytes(variable, replicas)
        for variable in weights if stage < 3 else []:
            assert bytes_on_replica(variable, rank) == 4 * np.prod(variable.shape)
    # 12 x 33 + 33 + 33 x 5 + 5 = 599 weights; each variable rounds up on its own.
    together = sum(bytes_on_replica(v, 0) for v in slots)
    assert 2 * 4 * 599 / replicas <= together <= 2 * 4 * (599 / replicas + 4)


def test_the_shards_are_the_rows_of_the_whole():
    strategy = make_strategy(4, shard=3)
    with strategy.scope():
        variable = keras.Variable(VALUE)
    shards = [variable.value.shard(part).numpy() for part in range(4)]
    np.testing.assert_array_equal(np.concatenate(shards)[:15], VALUE.ravel())
    assert shards[3][-1] == 0.0  # the padding
    assert [variable.value.shard(p).device[-5:] for p in range(4)] == [
        f"CPU:{p}" for p in range(4)
    ]


def test_what_is_small_or_no_weight_stays_whole():
    strategy = tfdp.DataParallelStrategy(
        ["CPU:0", "CPU:1"], shard=3, shard_min_bytes=400
    )
    with strategy.scope():
        made = {
            "just large enough": keras.Variable(np.zeros(100, "float32")),
            "one element less": keras.Variable(np.zeros(99, "float32")),
            "integers": keras.Variable(np.zeros(999, "int32"), dtype="int32"),
            "not trainable": keras.Variable(np.zeros(999), trainable=False),
            "scalar": keras.Variable(0.0),
        }
        norm = keras.layers.BatchNormalization()
        norm.build((None, 999))
    found = {name: is_sharded(variable) for name, variable in made.items()}
    assert found == dict.fromkeys(made, False) | {"just large enough": True}
    assert [is_sharded(v) for v in norm.variables] == [True, True, False, False]


def test_the_default_keeps_what_is_below_32_kib_whole():
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], shard="parameters")
    with strategy.scope():
        below = keras.Variable(np.zeros(8191, "float32"))
        at = keras.Variable(np.zeros(8192, "float32"))
    assert [is_sharded(below), is_sharded(at)] == [False, True]


@pytest.mark.parametrize("bad", [-1, 1.5, True, None, "1"])
def test_another_shard_min_bytes_is_refused(bad):
    with pytest.raises(ConfigurationError, match=f"shard_min_bytes.*{bad!r}"):
        tfdp.DataParallelStrategy(shard=1, shard_min_bytes=bad)


def test_one_replica_has_nothing_to_shard():
    model, _ = train(make_strategy(1, shard=3), epochs=1)
    assert not any(is_sharded(v) for v in model.variables)


def test_it_looks_like_the_whole_from_outside(sharded):
    _, variable = sharded
    assert variable.shape == variable.value.shape == SHAPE
    assert len(variable.value) == 5
    assert variable.dtype == "float32"
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    np.testing.assert_array_equal(np.asarray(variable), VALUE)
    np.testing.assert_array_equal(tf.convert_to_tensor(variable.value), VALUE)
    np.testing.assert_array_equal(variable + 1.0, VALUE + 1)
    np.testing.assert_array_equal(variable[1:3], VALUE[1:3])
    assert "shape=(5, 3)" in repr(variable)
    assert "weight" in str(variable) and "ShardedVariable" in repr(variable.value)


def test_a_deep_copy_is_on_its_own(sharded):
    _, variable = sharded
    copied = copy.deepcopy(variable.value)
    variable.assign(-VALUE)
    np.testing.assert_array_equal(copied.numpy(), VALUE)
    assert [v.device for v in copied.values] == [
        v.device for v in variable.value.values
    ]


ASSIGNMENTS = {
    "assign": VALUE**2,
    "assign_add": VALUE + VALUE**2,
    "assign_sub": VALUE - VALUE**2,
}


@pytest.mark.parametrize("where", ["outside", "scope", "graph", "replica"])
@pytest.mark.parametrize("method", ASSIGNMENTS)
def test_assigning_the_whole_sets_every_shard(sharded, method, where):
    strategy, variable = sharded

    def assign():
        getattr(variable, method)(VALUE**2)

    if where == "outside":
        assign()
    elif where == "scope":
        with strategy.scope():
            assign()
    elif where == "graph":
        tf.function(assign)()
    else:
        tf.function(lambda: strategy.run(assign))()
    np.testing.assert_array_equal(variable.numpy(), ASSIGNMENTS[method])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_a_replica_reads_the_whole(sharded, compiled):
    strategy, variable = sharded

    def read():
        scale = tf.cast(
            tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32
        )
        return tf.convert_to_tensor(variable) * (scale + 1)

    def run():
        return strategy.run(read)

    results = strategy.experimental_local_results(
        (tf.function(run) if compiled else run)()
    )
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, VALUE * (rank + 1))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("shape", [(3, 5), (15,), (8,), (5, 4)])
def test_a_value_of_another_shape_is_refused(stage, shape):
    with make_strategy(2, stage).scope():
        variable = keras.Variable(VALUE)
    for target in (variable, variable.value):
        with pytest.raises(ValueError, match=r"(?s)shape.*" + re.escape("(5, 3)")):
            target.assign(np.zeros(shape, "float32"))
    np.testing.assert_array_equal(variable.numpy(), VALUE)


@pytest.mark.parametrize("stage", [1, 3])
def test_get_and_set_weights(stage):
    one = dense_model()
    with make_strategy(3, stage).scope():
        model = keras.models.clone_model(one)
    model.set_weights(one.get_weights())
    for got, expected in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)


def fit_once(strategy, optimizer, **options):
    return train(strategy, optimizer=optimizer, epochs=1, **options)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "name, advice",
    [
        ("Lamb", re.escape("tfdp.optimizers.LAMB(form='keras')")),
    ],
)
def test_an_optimizer_that_needs_whole_tensors_is_refused(stage, name, advice):
    if not hasattr(keras.optimizers, name):
        pytest.skip("newer than this Keras")
    message = rf"(?s)The optimizer {name} cannot update shards.*{advice}.*shard='none'"
    with pytest.raises(ConfigurationError, match=message):
        fit_once(make_strategy(2, stage), getattr(keras.optimizers, name))


class Halving(keras.optimizers.SGD):
    """Steps of half the length."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)


class SaysSo(Halving):
    """The same, and known to work on shards."""

    is_elementwise = True


@pytest.mark.parametrize("stage", [1, 3])
def test_an_unknown_optimizer_must_say_that_it_is_elementwise(stage):
    with pytest.raises(
        ConfigurationError, match="(?s)Halving cannot.*is_elementwise = True"
    ):
        fit_once(make_strategy(2, stage), lambda: Halving(0.1))
    said, _ = fit_once(make_strategy(2, stage), lambda: SaysSo(0.1))
    stock, _ = fit_once(make_strategy(2), lambda: keras.optimizers.SGD(0.05))
    for a, b in zip(said.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class ClippingByNorm(keras.optimizers.SGD):
    """Looks at whole gradients before Keras does."""

    def apply(self, grads, trainable_variables=None):
        grads = [g / keras.ops.maximum(keras.ops.norm(g), 1.0) for g in grads]
        return super().apply(grads, trainable_variables)


class ClippingAsKerasAsks(keras.optimizers.SGD):
    def _clip_gradients(self, grads):
        return [g / keras.ops.maximum(keras.ops.norm(g), 1.0) for g in grads]


@pytest.mark.parametrize(
    "optimizer, method",
    [(ClippingByNorm, "apply"), (ClippingAsKerasAsks, "_clip_gradients")],
)
@pytest.mark.parametrize("stage", STAGES)
def test_one_that_looks_at_gradients_itself_is_refused(stage, optimizer, method):
    with pytest.raises(ConfigurationError, match=f"its own {method} may need whole"):
        fit_once(make_strategy(2, stage), lambda: optimizer(0.1))


@pytest.mark.parametrize("stage", STAGES)
def test_an_unwrapped_optimizer_in_a_custom_loop_is_led(stage):
    x = tf.constant(classification_data()[0])

    def weights_after_three_steps(stage):
        strategy = make_strategy(2, stage)
        with strategy.scope():
            model = dense_model()
            optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(model.trainable_variables)

        def replica_step():
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            with tf.GradientTape() as tape:
                mean = tf.reduce_mean(model(x[rank::2]) ** 2)
                loss = tfdp.losses.local_mean(mean)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        step = tf.function(lambda: strategy.run(replica_step))
        for _ in range(3):
            step()
        return model.get_weights()

    sharded, whole = weights_after_three_steps(stage), weights_after_three_steps(0)
    # Of two replicas a sum has one order.
    for got, expected in zip(sharded, whole, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_xla_compiles_what_stays_whole(stage):
    x, y = classification_data()

    def run(stage):
        with make_strategy(2, stage).scope():
            model = dense_model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=True)
        model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
        return model.get_weights()

    for got, expected in zip(run(stage), run(0), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_xla_cannot_gather_parameters_and_says_what_to_do():
    x, _ = classification_data()
    with make_strategy(2, shard=3).scope():
        model = dense_model()
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(
        CollectiveError, match='(?s)shard="parameters".*jit_compile=False'
    ):
        model.fit(x, np.zeros((96, 5)), batch_size=24, verbose=0)
