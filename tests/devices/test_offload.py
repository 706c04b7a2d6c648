"""offload="optimizer": the host keeps the state and updates it; the numbers stay.

The replicas are CPU:1 and CPU:2, the host is CPU:0: what a graph sends from one to
another is what would cross between a GPU and the host's memory.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    train,
)
from tests.support.run_graphs import run_graphs
from tests.support.slow_rows import covering
from tfdp.errors import ConfigurationError

HOST, DEVICES = "CPU:0", ("CPU:1", "CPU:2")


def offloading(stage, devices=DEVICES, offload="optimizer"):
    return tfdp.DataParallelStrategy(
        list(devices), shard=stage, shard_min_bytes=0, offload=offload
    )


def short_name(device):
    return device.split("device:")[-1]


def places(variable):
    """Where each replica's part, or copy, of a variable is."""
    return [short_name(part.device) for part in variable.value.values]


adam = functools.partial(keras.optimizers.Adam, 0.01, epsilon=1e-3)
OPTIMIZERS = {
    "adam": adam,
    "adamw": functools.partial(
        keras.optimizers.AdamW,
        0.01,
        weight_decay=0.1,
        use_ema=True,
        ema_overwrite_frequency=3,
    ),
    "clipped": functools.partial(
        keras.optimizers.SGD, 0.05, momentum=0.9, global_clipnorm=0.1
    ),
    "accumulated": functools.partial(adam, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(adam(), 2.0**10),
    "lamb": functools.partial(tfdp.optimizers.LAMB, 0.01),
}


@pytest.fixture
def products_as_written():
    """TensorFlow reorders (a * b) * c, but not across devices: the last bit differs."""
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    yield
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


# Each optimizer once, each stage of Adam; the rest is slow.
COVERING = ("adam-1", "adam-2", "adam-3", "adamw-1", "accumulated-2") + (
    "clipped-3",
    "lamb-1",
    "scaled-3",
)
CASES = [f"{name}-{stage}" for name in OPTIMIZERS for stage in (1, 2, 3)]


@pytest.mark.worth_seconds(6)
@pytest.mark.parametrize("case", covering(CASES, COVERING))
def test_trains_as_without(case, request):
    name, stage = case.split("-")[0], int(case[-1])
    if name == "clipped":
        request.getfixturevalue("products_as_written")
    options = {"optimizer": OPTIMIZERS[name], "steps_per_execution": 2}
    model, history = train(offloading(stage), **options)
    expected, plain_history = train(offloading(stage, offload="none"), **options)
    # The same operations in the same order, elsewhere.
    assert largest_difference(model, expected) == 0.0
    assert history == plain_history
    assert largest_difference(model, dense_model()) > 1e-3
    for mine, other in zip(
        model.optimizer.variables, expected.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("devices", (DEVICES, DEVICES[:1]))
def test_the_state_is_on_the_host_and_the_rest_is_not(stage, devices):
    model, _ = train(
        offloading(stage, devices),
        optimizer=functools.partial(adam, gradient_accumulation_steps=2),
    )
    state = [*model.optimizer._momentums, *model.optimizer._velocities]
    for variable in state:
        assert places(variable) == [HOST] * len(devices)
    # Gradients are no state.
    for variable in (*model.weights, *model.optimizer._accumulated_gradients):
        assert places(variable) == list(devices)


def test_one_device_trains_as_an_ordinary_one():
    options = {"optimizer": adam}
    model, _ = train(offloading(1, DEVICES[:1]), **options)
    expected, _ = train(None, **options)
    assert largest_difference(model, expected) == 0.0


def is_number(node, nodes):
    """Whether a node reads a variable of one number: a rate, a counter."""
    if node.op != "ReadVariableOp":
        return False
    while node.op != "_Arg":  # through conditionals
        node = nodes[node.input[0].split(":")[0]]
    (shape,) = node.attr["_handle_shapes"].list.shape
    return not shape.dim


def transfers(fit):
    """By (from, to): the tensors that a step sends, but for single numbers it reads."""
    sent = {}
    for graph in run_graphs(fit):
        nodes = {node.name: node for node in graph.node}
        sends = [node for node in graph.node if node.op == "_Send"]
        for send in sends:
            source = nodes[send.input[0].split(":")[0].removeprefix("^")]
            is_of_step = "StatefulPartitionedCall/" in send.input[0]
            # Constants signal that something has ended; numbers are rates, counters.
            is_small = source.op == "Const" or is_number(source, nodes)
            if is_of_step and not is_small:
                ends = [
                    short_name(send.attr[end].s.decode())
                    for end in ("send_device", "recv_device")
                ]
                sent.setdefault(tuple(ends), []).append(source.name)
    return sent


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"gradient_accumulation_steps": 2}], ids=str
)
def test_gradients_go_to_the_host_and_changes_come_back(stage, options):
    x, y = classification_data(samples=24)
    with offloading(stage).scope():
        model = dense_model()
        model.compile(
            adam(**options),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        model.optimizer.build(model.trainable_variables)
    sent = transfers(lambda: model.fit(x, y, batch_size=24, verbose=0))
    for device in DEVICES:
        # The host reads the loss, and whether this micro-step is the one that updates.
        others = ("div_no_nan", "Equal")
        down = [name for name in sent[device, HOST] if not name.endswith(others)]
        up = sent[HOST, device]
        # One of each for every weight: no weight goes down, no state comes up. With
        # accumulation that is so in the branch that updates, and the other sends none.
        assert len(down) == len(up) == len(model.weights), (down, up)
        assert not any("/else/" in name for name in (*down, *up))


def test_what_it_saves_anybody_loads(tmp_path):
    data = classification_data()
    model, _ = train(offloading(3), optimizer=adam, data=data)
    path = str(tmp_path / "model.keras")
    model.save(path)
    models = [model]
    for strategy in (offloading(1), tf.distribute.get_strategy()):
        with strategy.scope():
            models.append(keras.models.load_model(path))
    for loaded in models[1:]:
        for mine, other in zip(
            loaded.optimizer.variables, model.optimizer.variables, strict=True
        ):
            np.testing.assert_array_equal(mine.numpy(), other.numpy())
    for each in models[:2]:
        each.fit(*data, batch_size=24, shuffle=False, verbose=0)
    assert largest_difference(models[0], models[1]) == 0.0


def test_eager_updates_leave_the_state_where_it_is():
    options = {"optimizer": OPTIMIZERS["adamw"]}
    strategy = offloading(1)
    eager, _ = train(strategy, run_eagerly=True, **options)
    # What comes after them in the same strategy, too.
    after, _ = train(strategy, **options)
    for model in (eager, after):
        for variable in model.optimizer._momentums:
            assert places(variable) == [HOST] * len(DEVICES)
    # TensorFlow reorders products in graphs only. Eight updates of at most 0.01, each
    # with some twenty roundings: 8 * 0.01 * 20 u = 1e-7; ten times that for gradients
    # that are themselves off by roundings.
    assert largest_difference(eager, after) < 1e-6


def test_jit_compiles_what_the_devices_compute():
    def run(offload):
        x, y = classification_data()
        with offloading(1, offload=offload).scope():
            model = dense_model()
            model.compile(adam(), "mse", jit_compile=True)
        model.fit(x, keras.ops.one_hot(y, 5), batch_size=24, shuffle=False, verbose=0)
        return model

    model = run("optimizer")
    for variable in model.optimizer._momentums:
        assert places(variable) == [HOST] * len(DEVICES)
    assert largest_difference(model, run("none")) == 0.0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"offload": "optimizer"}, "there are no shards"),
        ({"shard": 1, "offload": "weights"}, "must be 'none' or 'optimizer'.*weights"),
        ({"shard": 1, "offload": True}, "must be 'none' or 'optimizer'.*True"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        tfdp.DataParallelStrategy(list(DEVICES), **options)
    assert offloading(1).offload == "optimizer"
    assert offloading(1, offload="none").offload == "none"
