"""What the replicas send in one step: counted by the code, in the graph, by formula.

A reduction sends n bytes to a place and n back, a reduce-scatter and an all-gather go
one way each, and nobody sends to itself. So with P bytes of sharded weights and M bytes
of mirrored ones, N replicas send in one step, all together,

    stage 0        2 (P + M) (N - 1)    all-reduce
    stages 1, 2    2 (P + M) (N - 1)    reduce-scatter gradients, all-gather weights
    stage 3        2 (P + M) (N - 1)    all-gather weights, reduce-scatter gradients
                   + P (N - 1)          each time that weights are gathered once more

and each replica 1 / N of it. P counts the padding where it travels: TensorFlow's
collectives want shards of one length.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model
from tfdp.exchange.traffic import TrafficCount, ring_bytes
from tfdp.plan.shards import ShardLayout

# Of the weights (12 x 33, 33, 33 x 5, 5) all but the last are large enough.
MIN_BYTES = 100
MIRRORED_BYTES = 5 * 4


class GathersOnceMore(keras.Sequential):
    """Reads its weights once before the step, for nothing."""

    def train_step(self, data):
        for variable in self.trainable_variables:
            tf.convert_to_tensor(variable)
        return super().train_step(data)


def recomputed(model_layers):
    """Gathers the weights of each layer again for its backward pass."""
    return tfdp.remat(keras.Sequential(model_layers))


def make(
    replicas,
    stage,
    engine,
    hierarchy="flat",
    model_class=keras.Sequential,
    **optimizer_options,
):
    strategy = tfdp.DataParallelStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        communication=tfdp.Communication(engine=engine, hierarchy=hierarchy),
        shard=stage,
        shard_min_bytes=MIN_BYTES,
    )
    with strategy.scope():
        model = model_class([keras.Input((12,)), *dense_model().layers])
        model.compile(
            keras.optimizers.Adam(0.01, **optimizer_options),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        model.optimizer.build(model.trainable_variables)
    return strategy, model


def trace(strategy, replica_step):
    """The graph of one step on different rows for every replica."""
    x, y = classification_data(samples=24)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(24, drop_remainder=True)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    @tf.function(autograph=False)
    def step(batch):
        strategy.run(replica_step, args=(batch,))

    return step.get_concrete_function(batch).graph


def counted(strategy):
    transport = strategy.extended.reducer.transport
    return [transport.traffic.of(rank) for rank in range(transport.replicas)]


def sharded_bytes(model, replicas, padded):
    layouts = [
        ShardLayout(tuple(v.shape), replicas)
        for v in model.trainable_variables
        if np.prod(v.shape) * 4 >= MIN_BYTES
    ]
    if padded:
        return 4 * sum(replicas * layout.shard_elements for layout in layouts)
    return 4 * sum(layout.elements for layout in layouts)


ENGINES = [
    pytest.param(2, "in_process", "flat", id="2"),
    pytest.param(3, "in_process", "flat", id="3"),
    pytest.param(4, "in_process", (2, 2), id="2x2"),
    pytest.param(2, "tensorflow", "flat", id="2-tensorflow"),
    pytest.param(3, "tensorflow", "flat", id="3-tensorflow"),
]


@pytest.mark.quick
@pytest.mark.parametrize("replicas, engine, hierarchy", ENGINES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_sends_what_the_formula_says(replicas, engine, hierarchy, stage):
    strategy, model = make(replicas, stage, engine, hierarchy)
    trace(strategy, model.train_step)
    # Unsharded tensors are not padded, and in process shards travel without padding.
    padded = stage > 0 and engine == "tensorflow"
    weight_bytes = sharded_bytes(model, replicas, padded)
    expected = 2 * (weight_bytes + MIRRORED_BYTES) * (replicas - 1)
    assert sum(counted(strategy)) == expected
    if padded:
        # Three tensors, each lengthened by fewer elements than there are replicas.
        without = sharded_bytes(model, replicas, padded=False)
        assert without <= weight_bytes < without + 3 * replicas * 4


@pytest.mark.parametrize("model_class", [GathersOnceMore, recomputed])
@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_weights_that_are_gathered_once_more_cost_their_bytes_once_more(
    engine, model_class
):
    """3 P (N - 1) / N for each replica, as when activations are recomputed."""
    strategy, model = make(3, 3, engine, model_class=model_class)
    trace(strategy, model.train_step)
    weight_bytes = sharded_bytes(model, 3, padded=engine == "tensorflow")
    assert sum(counted(strategy)) == (3 * weight_bytes + 2 * MIRRORED_BYTES) * 2


def sent_in_graph(graph, replicas):
    """By replica, the bytes of the `Send` operations outside of conditionals."""
    sent = [0] * replicas
    for operation in graph.get_operations():
        if operation.type == "Send":
            (tensor,) = operation.inputs
            rank = tf.DeviceSpec.from_string(operation.device).device_index
            sent[rank] += tensor.shape.num_elements() * tensor.dtype.size
    return sent


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_graph_holds_what_was_counted(replicas, stage):
    """The second route: the `Send` operations of the graph and their inputs."""
    strategy, model = make(replicas, stage, "in_process")
    graph = trace(strategy, model.train_step)
    assert sent_in_graph(graph, replicas) == counted(strategy)


@pytest.mark.parametrize(
    "stage, in_every_micro_step, in_an_update",
    [(0, 0, 2), (1, 0, 2), (2, 1, 1), (3, 2, 0)],
)
def test_what_accumulation_sends_and_when(stage, in_every_micro_step, in_an_update):
    """In units of P (N - 1): so K steps send (K + 1) P at stage 2, 2 K P at 3."""
    strategy, model = make(3, stage, "in_process", gradient_accumulation_steps=2)
    always = sum(sent_in_graph(trace(strategy, model.train_step), 3))
    at_last = sum(counted(strategy)) - always
    weight_bytes = sharded_bytes(model, 3, padded=False)
    # The small rest is reduced with the others: at once, or in an update.
    rest = 2 * MIRRORED_BYTES * 2
    rests = (rest, 0) if stage > 1 else (0, rest)
    assert always == in_every_micro_step * weight_bytes * 2 + rests[0]
    assert at_last == in_an_update * weight_bytes * 2 + rests[1]


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_weights_are_gathered_in_the_type_that_a_layer_computes_in(engine):
    """Half the bytes of the gather; gradients are summed in float32 as ever."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        strategy, model = make(3, 3, engine)
    finally:
        keras.config.set_dtype_policy("float32")
    trace(strategy, model.train_step)
    weight_bytes = sharded_bytes(model, 3, padded=engine == "tensorflow")
    assert sum(counted(strategy)) == (1.5 * weight_bytes + 2 * MIRRORED_BYTES) * 2


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_every_use_of_a_weight_gathers_and_scatters_it(uses):
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], shard=3, shard_min_bytes=0)
    with strategy.scope():
        inputs = outputs = keras.Input((12,))
        layer = keras.layers.Dense(12, use_bias=False)
        for _ in range(uses):
            outputs = layer(outputs)
        model = keras.Model(inputs, outputs)
        model.compile(
            "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    trace(strategy, model.train_step)
    assert sum(counted(strategy)) == 2 * uses * 12 * 12 * 4


def test_the_count_starts_again_with_every_trace():
    strategy, model = make(2, 1, "in_process")
    trace(strategy, model.train_step)
    once = counted(strategy)
    trace(strategy, model.train_step)
    assert counted(strategy) == once != [0, 0]
    trace(strategy, model.test_step)
    assert counted(strategy) == [0, 0]  # the weights are mirrored


def test_evaluation_of_sharded_parameters_gathers_them_once():
    strategy, model = make(3, 3, "in_process")
    trace(strategy, model.test_step)
    assert sum(counted(strategy)) == 2 * sharded_bytes(model, 3, padded=False)


def test_what_has_no_size_before_the_step_is_not_known():
    count = TrafficCount(2)
    count.add(0, tf.zeros([3], tf.int64))
    count.add(1, tf.constant(["a string"]))
    assert (count.of(0), count.of(1)) == (24, None)
    count.add(1, tf.zeros([3]))
    assert count.of(1) is None
    count.begin()
    assert (count.of(0), count.of(1)) == (0, 0)


@pytest.mark.parametrize("elements", [0, 1, 2, 7, 12, 13])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_ring_sends_all_chunks_but_one_from_every_place(elements, parts):
    tensor = tf.zeros([elements])
    sent = [ring_bytes(tensor, place, parts) for place in range(parts)]
    assert sum(sent) == 4 * elements * (parts - 1)
    # The one that is kept is no longer than a chunk of ceil(elements / parts).
    assert min(sent) >= 4 * (elements - -(-elements // parts))
