"""Blocks that are computed twice train as those that are computed once."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, make_strategy
from tests.support.slow_rows import made
from tfdp.errors import ConfigurationError


def network():
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(33, "gelu"),
            layers.Dropout(0.3, seed=4),
            layers.BatchNormalization(),
            keras.Sequential([layers.Dense(21, "tanh"), layers.Dropout(0.2, seed=5)]),
            layers.Dense(5),
        ]
    )


def trained(change, replicas=1, shard="none", **options):
    strategy = None if replicas == 1 else make_strategy(replicas, shard)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = network()
        change(model)
        model.compile(
            keras.optimizers.SGD(0.05, 0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **{"jit_compile": False, **options},
        )
    x, y = classification_data(53)
    model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
    return model, model.evaluate(x, y, verbose=0)


WHOLE, NO_PREFETCH = {"policy": "whole"}, {"prefetch": 0}
SEGMENTS = {"policy": "segments"}


@pytest.mark.parametrize(
    "replicas, shard, options, arguments",
    [
        (1, "none", {}, {}),
        (1, "none", {"run_eagerly": True}, WHOLE),
        (2, "none", {"jit_compile": True}, {}),
        (2, "none", {}, WHOLE),
        (3, "parameters", {}, {}),
        (3, "parameters", {}, NO_PREFETCH),
        (2, "none", {}, SEGMENTS),
        *made(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (1, "none", {}, NO_PREFETCH),
                (2, "optimizer", {}, {}),
                (3, "parameters", {}, WHOLE),
                (3, "parameters", {}, SEGMENTS),
            )
        ),
    ],
)
def test_trains_to_the_same_weights(replicas, shard, options, arguments):
    once, loss_once = trained(lambda model: None, replicas, shard, **options)
    twice, loss_twice = trained(
        lambda model: tfdp.remat(model, **arguments), replicas, shard, **options
    )
    for variable, other in zip(once.weights, twice.weights, strict=True):
        # The same sums; the graph optimizer may fuse one pass otherwise than the other.
        # Six updates of at most 0.05 / (1 - 0.9), gradients below 10 after about 60
        # terms: 6 * 0.5 * 10 * 60 u = 1e-4. Another dropout mask moves weights by 1e-1.
        np.testing.assert_allclose(
            variable.numpy(), other.numpy(), rtol=0, atol=1e-4, err_msg=variable.path
        )
    assert abs(loss_once - loss_twice) < 1e-4


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("shard", ["none", "parameters"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_backward_pass_computes_in_the_layers_type(policy, shard):
    types = []

    class Noting(keras.layers.Dense):
        def call(self, inputs):
            types.append(keras.ops.convert_to_tensor(self.kernel).dtype)
            return super().call(inputs)

    def weights_after_training(change):
        types.clear()
        keras.utils.set_random_seed(3)
        with make_strategy(2, shard).scope():
            model = keras.Sequential(
                [keras.Input((12,)), Noting(9, "tanh"), Noting(5, dtype="float32")]
            )
            change(model)
            model.compile(
                keras.optimizers.SGD(0.1),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False,
            )
        model.fit(*classification_data(48), batch_size=24, shuffle=False, verbose=0)
        return model.get_weights(), [
            keras.backend.standardize_dtype(kind) for kind in types
        ]

    keras.config.set_dtype_policy(policy)
    try:
        once, types_once = weights_after_training(lambda model: None)
        twice, types_twice = weights_after_training(tfdp.remat)
    finally:
        keras.config.set_dtype_policy("float32")
    half = policy.removeprefix("mixed_")
    # Each layer once forward on each replica; and once more, the last one first.
    assert set(types_once) == {half, "float32"}
    assert types_twice.count(half) == types_twice.count("float32")
    assert types_twice.count(half) >= types_once.count(half) + 2
    for one, other in zip(once, twice, strict=True):
        # Two steps of 0.1 with gradients below 2, of which each number was rounded to
        # 2^-8 of itself at most, now and then to the other side.
        np.testing.assert_allclose(one, other, rtol=0, atol=2 * 0.1 * 2 * 2**-8)


def test_the_backward_pass_computes_again():
    calls = []

    class Counted(keras.layers.Dense):
        def call(self, inputs):
            calls.append(1)
            return super().call(inputs)

    layer = tfdp.remat(Counted(3))
    x = tf.ones((2, 4))
    layer(x)
    calls.clear()
    with tf.GradientTape() as tape:
        result = layer(x)
    assert len(calls) == 1
    tape.gradient(result, layer.trainable_variables[0].value)
    assert len(calls) == 2


class Recomputed(keras.layers.Layer):
    """What TensorFlow offers in the place of `tfdp.remat`."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs):
        return tf.recompute_grad(self.inner)(inputs)


def test_recompute_grad_of_weights_in_shards_is_refused():
    with make_strategy(2, "parameters").scope():
        model = keras.Sequential(
            [
                keras.Input((12,)),
                Recomputed(keras.layers.Dense(16)),
                keras.layers.Dense(5),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
    with pytest.raises(ConfigurationError, match=r"tfdp\.remat\(layer\)"):
        model.fit(*classification_data(14), verbose=0)


def test_moving_statistics_are_updated_once():
    layer = tfdp.remat(keras.layers.BatchNormalization(momentum=0.5))
    x = tf.constant([[1.0], [3.0]])
    layer.build((2, 1))
    with tf.GradientTape() as tape:
        result = layer(x, training=True)
    tape.gradient(result, layer.gamma.value)
    # Once: 0.5 * 0 + 0.5 * 2; twice would be 1.5.
    np.testing.assert_array_equal(layer.moving_mean.numpy(), [1.0])


def test_several_inputs_and_a_mask():
    def build():
        keras.utils.set_random_seed(3)
        return keras.layers.MultiHeadAttention(2, 3)

    query = tf.random.stateless_normal((2, 4, 6), [1, 2])
    value = tf.random.stateless_normal((2, 5, 6), [3, 4])
    mask = tf.constant([[True] * 5, [True, True, False, False, True]])[:, None, :]
    gradients = []
    for change in (lambda layer: layer, tfdp.remat):
        layer = change(build())
        layer(query, value)
        with tf.GradientTape() as tape:
            tape.watch([query, value])
            result = layer(query, value, attention_mask=mask)
        variables = [v.value for v in layer.trainable_variables]
        gradients.append(tape.gradient(result, [query, value, *variables]))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_function_chooses():
    model = tfdp.remat(network(), lambda layer: isinstance(layer, keras.Sequential))
    chosen = [hasattr(layer.call, "is_rematerialized") for layer in model.layers]
    assert chosen == [False, False, False, True, False]


def test_a_loss_within_a_block_is_refused():
    layer = tfdp.remat(
        keras.Sequential([keras.layers.Dense(3, activity_regularizer="l2")]), "whole"
    )
    with pytest.raises(ConfigurationError, match="add_loss"):
        layer(tf.ones((2, 4)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("a layer",), "takes a Keras layer"),
        ((keras.layers.Dense,), r"the class Dense; call it: Dense\(\)"),
        (
            (keras.Sequential([keras.layers.Dense(1)]), lambda layer: False),
            "policy is False for every layer",
        ),
        ((keras.layers.Dense(1), "all"), "policy must be one of 'each', 'whole'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        tfdp.remat(*arguments)
    with pytest.raises(ConfigurationError, match="prefetch must be"):
        tfdp.remat(keras.layers.Dense(1), prefetch=-1)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_weights_are_gathered_so_many_blocks_ahead(prefetch):
    """In the graph: what a block's weights wait for before they are gathered."""
    strategy = make_strategy(2, "parameters")
    with strategy.scope():
        blocks = [keras.layers.Dense(12, name=f"block{i}") for i in range(5)]
        model = keras.Sequential([keras.Input((12,)), *blocks])
        tfdp.remat(model, prefetch=prefetch)

    @tf.function(autograph=False)
    def step(x):
        return strategy.run(model, args=(x,))

    graph = step.get_concrete_function(tf.ones((4, 12))).graph
    waits = {}
    for operation in graph.get_operations():
        if operation.type == "ReadVariableOp" and "replica_1" not in operation.name:
            block = int(operation.name.split("/block")[1][0])
            for earlier in operation.control_inputs:
                if earlier.name.endswith("batch_is_there"):
                    continue  # as all of a step does
                made_by = earlier.name.split("/block")
                found = int(made_by[1][0]) if len(made_by) > 1 else -1
                waits.setdefault(block, set()).add(found)
    # A block begins when its input is there: the output of the one before it.
    assert waits == {
        block: {max(block - 1 - prefetch, -1)} for block in range(len(blocks))
    }


def test_masks_that_attention_takes_away_are_there_again():
    """`MultiHeadAttention` removes those of its inputs while it is called."""
    layers, found = keras.layers, []
    words = np.random.default_rng(0).integers(1, 11, (4, 6))
    words[:, 4:] = 0  # padding, which the convolution reads
    for change in (lambda model: model, tfdp.remat):
        keras.utils.set_random_seed(5)
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Embedding(11, 8, mask_zero=True)(inputs)
        x = x + layers.MultiHeadAttention(2, 4)(x, x)
        x = layers.GlobalAveragePooling1D()(layers.Conv1D(8, 3, padding="same")(x))
        model = change(keras.Model(inputs, x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(words, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        found.append([tf.convert_to_tensor(gradient) for gradient in gradients])
    for one, other in zip(*found, strict=True):
        # The same operations; without the mask the differences are a fifth and more.
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


def test_who_wants_a_shape_alone_does_not_keep_the_input():
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    inner = layers.ZeroPadding2D(name="padded")(layers.Conv2D(4, 3)(image))
    inner = layers.Flatten()(layers.Conv2D(4, 3)(inner))
    model = tfdp.remat(keras.Model(image, layers.Dense(2)(inner)))

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    # A batch of any length: else all shapes are known, and nobody asks.
    traced = gradients.get_concrete_function(tf.TensorSpec((None, 8, 8, 3)))
    asked = [op for op in traced.graph.get_operations() if op.type == "Shape"]
    late = [op for op in asked if op.inputs[0].op.control_inputs]
    assert asked and not late
    x = np.random.default_rng(1).normal(size=(5, 8, 8, 3)).astype("float32")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x, training=True) ** 2)
    for found, expected in zip(
        traced(tf.constant(x)),
        tape.gradient(loss, model.trainable_variables),
        strict=True,
    ):
        # The same sums of at most 180 terms in another order: 180 u = 1e-5 of them.
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
