"""Weights that a mesh cuts rest in blocks, and train as on one device."""

import keras
import numpy as np
import pytest

import tfdp
from tests.support.grids import (
    MLP_RULES,
    blocks_of,
    grid,
    layout_of,
    mlp,
    rows_of,
    trained,
)
from tests.support.parity import largest_distance, rounding_bound
from tfdp.errors import ConfigurationError, LayoutWarning

MESHES = [(2, 2), (1, 4), (4, 1)]
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
    "averages": lambda: keras.optimizers.AdamW(
        0.01, epsilon=1e-3, weight_decay=0.01, use_ema=True
    ),
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3, global_clipnorm=0.1, gradient_accumulation_steps=2
    ),
    "LAMB": lambda: tfdp.optimizers.LAMB(0.01),
    "LARS": lambda: tfdp.optimizers.LARS(0.1),
}
# `head` is cut along both axes, so each replica has a block of its own.
RULES = {**MLP_RULES, "head/kernel": ("data", "model")}


def bound_of(model, name):
    """Two orders of summation differ so much in the weights, by `rounding_bound`.

    Eight steps of 12 rows. A row's gradient of the mean loss is below 8 (inputs up to
    9, five logits, weights below 1). SGD takes it times 0.1 (momentum 0.9: times 1).
    Adam's step changes with the gradient by at most its rate / epsilon = 10, LAMB's and
    LARS' by the norm of a weight (below 4) over that of its gradient (above 0.05),
    times 0.1.
    """
    rate = {"momentum": 1.0, "clipnorm": 0.1, "LAMB": 8.0, "LARS": 8.0}.get(name, 10.0)
    return rounding_bound(model, 8, 12, 8.0, rate)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def on_one_device(request):
    return request.param, *trained(None, optimizer=OPTIMIZERS[request.param])


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
def test_weights_are_those_of_one_device(on_one_device, shape, shard):
    name, one, losses = on_one_device
    strategy = grid(shape, RULES, shard=shard, shard_min_bytes=0)
    model, own_losses = trained(strategy, optimizer=OPTIMIZERS[name])
    distance = largest_distance(one.get_weights(), model.get_weights())
    assert distance < bound_of(one, name)
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
    for variable in model.trainable_variables:
        check_copies(variable, shape)


def check_copies(variable, shape):
    """Replicas that hold the same part hold the same bits."""
    layout = getattr(variable.value, "layout", None)
    held = blocks_of(variable)
    if variable.path == "up/kernel" and shape[1] > 1:
        assert held[0].shape == (12, 16 // shape[1])
    for group in getattr(layout, "copies", None) or ():
        for rank in group:
            np.testing.assert_array_equal(held[rank], held[group[0]])


@pytest.mark.parametrize("shape", MESHES)
def test_initial_weights_are_the_same_on_each_mesh(shape):
    """They are drawn whole: an initializer sees the shape of the whole weight."""

    def build():
        keras.utils.set_random_seed(5)
        kinds = ["glorot_uniform", "orthogonal", "variance_scaling", "identity"]
        return keras.Sequential(
            [
                keras.Input((8,)),
                *(
                    keras.layers.Dense(8, kernel_initializer=kind, name=f"dense_{n}")
                    for n, kind in enumerate(kinds)
                ),
            ]
        )

    whole = build().get_weights()
    with grid(shape, {"dense_.*/kernel": (None, "model")}).scope():
        cut = build().get_weights()
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one, other)


def test_each_number_of_a_block_is_that_of_its_place():
    with grid((2, 2), {"dense/kernel": ("model", "data")}).scope():
        layer = keras.layers.Dense(6, name="dense")
        layer.build((None, 4))
        whole = np.arange(24.0, dtype="float32").reshape(4, 6)
        layer.kernel.assign(whole)
    np.testing.assert_array_equal(layer.kernel.numpy(), whole)
    held = blocks_of(layer.kernel)
    # Rank 2 is at place 1 of "data" and 0 of "model".
    np.testing.assert_array_equal(held[2], whole[:2, 3:])
    np.testing.assert_array_equal(held[1], whole[2:, :3])


def test_a_dimension_that_does_not_divide_stays_whole():
    rules = {"dense/kernel": ("model", None), "dense/bias": ("model",)}
    with grid((2, 2), rules).scope():
        layer = keras.layers.Dense(6, name="dense")
        layer.build((None, 5))
    assert [block.shape for block in blocks_of(layer.kernel)] == [(5, 6)] * 4
    assert [block.shape for block in blocks_of(layer.bias)] == [(3,)] * 4


def test_a_rule_with_fewer_axes_leaves_the_rest_whole():
    """As JAX reads a partition spec that is shorter than the shape."""
    with grid((2, 2), {"dense/kernel": ("model",)}).scope():
        layer = keras.layers.Dense(6, name="dense")
        layer.build((None, 4))
    assert blocks_of(layer.kernel)[0].shape == (2, 6)


@pytest.mark.parametrize(
    "rules, words",
    [
        ({".*kernel": ("model",), "dense/.*": ("model",)}, "Two rules of layout="),
        ({"dense/kernel": (None, None, "model")}, r"has 3 axes.*shape \(4, 6\)"),
        ({"dense/kernel": ("model", "model")}, "each axis once"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_with_the_weight(rules, words):
    with grid((2, 2), rules).scope():
        with pytest.raises(ConfigurationError, match=words) as refusal:
            keras.layers.Dense(6, name="dense").build((None, 4))
    assert "'dense/kernel'" in str(refusal.value)


def test_rules_that_meet_no_weight_are_named():
    with grid((2, 2), {**MLP_RULES, "no/kernel": ("model", None)}).scope():
        model = mlp()
        model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((4, 12), "float32")
    with pytest.warns(LayoutWarning, match=r"no weight: 'no/kernel'\..*'up/kernel'"):
        model.train_on_batch(x, np.ones((4, 5), "float32"))


def test_a_mesh_of_other_devices_is_refused():
    layout = layout_of((2, 2), MLP_RULES)
    with pytest.raises(ConfigurationError, match=r"has 4 devices.*strategy has 2"):
        tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], layout=layout)


def test_a_strategy_takes_the_devices_of_its_mesh():
    assert grid((1, 2), MLP_RULES).num_replicas_in_sync == 2
    turned = keras.distribution.DeviceMesh(
        (2, 2), ["model", "data"], [f"cpu:{rank}" for rank in range(4)]
    )
    layout = keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(turned), batch_dim_name="data"
    )
    devices = tfdp.DataParallelStrategy(layout=layout).extended.worker_devices
    assert [device[-1] for device in devices] == list("0213")


def test_auto_strategy_takes_what_keras_was_given():
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_of((2, 2), MLP_RULES))
    )
    try:
        strategy = tfdp.auto_strategy()
        assert "weights in parts" in repr(strategy)
        with strategy.scope():
            assert blocks_of(mlp().get_layer("up").kernel)[0].shape == (12, 8)
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.parametrize("rows", [1, 3, 14])
def test_batches_that_leave_replicas_without_rows(rows):
    data = rows_of(rows)
    one, losses = trained(None, data=data, batch=12)
    model, own_losses = trained(grid((2, 2), MLP_RULES), data=data, batch=12)
    distance = largest_distance(one.get_weights(), model.get_weights())
    assert distance < bound_of(one, "momentum")
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_an_optimizer_of_whole_matrices_is_refused_by_name(name):
    optimizer = getattr(keras.optimizers, name)
    with pytest.raises(ConfigurationError, match=rf"{name}.*'up/kernel'.*layout="):
        trained(grid((2, 2), MLP_RULES), optimizer=lambda: optimizer(0.01))
