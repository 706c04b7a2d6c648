"""The packing engine's compiled step: as many collectives as buckets, each waiting for
its own gradients only."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy

LAYERS = 81  # kernel and bias each: 162 gradients
WIDTH = 24


def deep_model():
    keras.utils.set_random_seed(0)
    layers = [keras.Input((WIDTH,))]
    layers += [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS - 1)]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    return model


def compiled_step(strategy, model):
    """The graph of one training step, with nested calls flattened into a list."""
    x = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")
    y = np.arange(8) % 3
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    # Makes the metrics' and the optimizer's variables without compiling a step.
    model.evaluate(dataset, verbose=0)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    @tf.function
    def step(data):
        return strategy.run(model.train_step, args=(data,))

    return step.get_concrete_function(batch).graph


def is_update(op):
    return op.type.startswith("AssignSub")


def collectives(graph):
    return [op for op in graph.get_operations() if op.type.startswith("Collective")]


@pytest.mark.parametrize(
    "options, launches_per_bucket",
    [
        pytest.param({}, 1, id="flat"),
        pytest.param({"hierarchy": (2, 1)}, 1, id="two-hosts-of-one"),
    ],
)
def test_as_many_collectives_as_the_plan_has_buckets(options, launches_per_bucket):
    strategy = make_strategy(
        2, engine="tensorflow", bucket_bytes=20_000, first_bucket_bytes=5_000, **options
    )
    with strategy.scope():
        model = deep_model()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    graph = compiled_step(strategy, model)
    gradients = [tf.zeros(v.shape, v.dtype) for v in model.trainable_variables]
    assert len(gradients) >= 161
    buckets = len(strategy.plan(gradients))
    assert 1 < buckets < len(gradients)
    by_device = {}
    for op in collectives(graph):
        by_device[op.device] = by_device.get(op.device, 0) + 1
    assert list(by_device.values()) == [buckets * launches_per_bucket] * 2


def ancestors(op):
    """Every op that must run before `op`, by data or by control."""
    seen, todo = set(), [op]
    while todo:
        current = todo.pop()
        for before in [i.op for i in current.inputs] + list(current.control_inputs):
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return seen


def test_a_bucket_waits_for_its_own_gradients_only():
    """The exchange of the last layers must not wait for the first layers' backprop,
    nor for another exchange."""
    strategy = make_strategy(
        2, engine="tensorflow", bucket_bytes=20_000, first_bucket_bytes=5_000
    )
    with strategy.scope():
        model = deep_model()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    graph = compiled_step(strategy, model)
    ops = [op for op in collectives(graph) if "CPU:0" in op.device]
    exchanges = set(collectives(graph))
    backward_work = []
    for op in ops:
        before = ancestors(op)
        assert not before & exchanges, "an exchange waits for another one"
        backward_work.append(
            sum("gradient_tape" in o.name and o.type == "TanhGrad" for o in before)
        )
    # Each later bucket needs more layers' backprop than the one before; the first needs
    # less than a tenth of it.
    assert backward_work == sorted(backward_work)
    assert len(set(backward_work)) == len(ops)
    assert backward_work[0] < backward_work[-1] / 10


def test_two_levels_launch_three_per_bucket():
    strategy = make_strategy(
        4,
        engine="tensorflow",
        bucket_bytes=20_000,
        first_bucket_bytes=5_000,
        hierarchy=(2, 2),
    )
    with strategy.scope():
        model = deep_model()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    graph = compiled_step(strategy, model)
    gradients = [tf.zeros(v.shape, v.dtype) for v in model.trainable_variables]
    kinds = {}
    for op in collectives(graph):
        if "CPU:0" in op.device:
            kinds[op.type] = kinds.get(op.type, 0) + 1
    buckets = len(strategy.plan(gradients))
    assert kinds == {
        "CollectiveAllToAllV2": buckets,  # reduce-scatter's stand-in on CPUs
        "CollectiveReduceV2": buckets,
        "CollectiveGatherV2": buckets,
    }


def test_the_graph_holds_no_merge_call():
    """merge_call joins the replicas; here each replica's update hangs on its own
    reduced gradients only, so no op of replica 1 depends on an update of replica 0."""
    strategy = make_strategy(2, engine="in_process")
    with strategy.scope():
        model = deep_model()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    graph = compiled_step(strategy, model)
    updates = [op for op in graph.get_operations() if is_update(op)]
    assert len(updates) == 2 * len(model.trainable_variables)
    assert {"CPU:0", "CPU:1"} == {op.device[-5:] for op in updates}
    first = {op for op in updates if op.device.endswith("CPU:0")}
    for op in updates:
        if op.device.endswith("CPU:1"):
            assert not ancestors(op) & first
