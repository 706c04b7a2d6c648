"""`TPUDataParallelStrategy(shard="optimizer")` over the stand-in for the TPU.

Each replica updates its shard of every weight, with slots of which it holds that shard.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.devices.test_sharding import CASES
from tests.support import tpu_stand_in
from tests.support.parity import (
    UNIT_ROUND_OFF,
    classification_data,
    dense_model,
    largest_difference,
    largest_distance,
    make_strategy,
    rounding_bound,
    train,
)
from tests.support.slow_rows import covering
from tests.support.tpu_stand_in import StandInStrategy
from tfdp.errors import ConfigurationError
from tfdp.exchange.tpu import CrossReplica
from tfdp.strategies.tpu import TPUDataParallelExtended

STAGE_1 = {"shard": "optimizer", "shard_min_bytes": 0}
# A run without a graph is none of a TPU's, the next asks another engine, and matrices
# that one replica updates whole are refused.
# What goes through code of its own; the rest is slow.
COVERING = (
    *("accumulation", "distributed-accumulation", "ema-overwrite", "global_clipnorm"),
    *("lamb", "loss-scaling", "three-replicas"),
)
ELSEWHERE = ("run_eagerly", "adam-tensorflow", "adafactor")


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def trained(name, **options):
    chosen = CASES[name]
    keras.config.set_dtype_policy(chosen.policy)
    strategy = StandInStrategy(chosen.replicas, **options)
    return train(strategy, **chosen.options)


@functools.cache
def unsharded(name):
    model, history = trained(name)
    return [v.numpy() for v in model.weights], history["loss"]


@pytest.mark.quick
@pytest.mark.worth_seconds(4)
# "conditional": all rows of a replica decide on its branch, which is told.
@pytest.mark.filterwarnings("ignore:.*a number of all rows.*:UserWarning")
@pytest.mark.parametrize(
    "name", covering([name for name in CASES if name not in ELSEWHERE], COVERING)
)
def test_trains_to_the_weights_of_stage_0(name):
    expected, expected_loss = unsharded(name)
    model, history = trained(name, **STAGE_1)
    got = [v.numpy() for v in model.weights]
    difference = largest_distance(got, expected)
    if 1 not in CASES[name].reordered or name == "three-replicas":
        # The sums are the same: every replica adds in the order of the ranks.
        assert difference == 0.0
        assert history["loss"] == expected_loss
    else:
        # As in test_sharding.py.
        bound = rounding_bound(
            model, steps=8, batch_size=24, gradient_bound=3.0, learning_rate=0.5
        )
        assert bound < 5e-4
        assert difference <= bound
        np.testing.assert_allclose(history["loss"], expected_loss, rtol=1e-5)
    for variable in model.weights:
        assert len({copy.numpy().tobytes() for copy in variable.value.values}) == 1


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("samples", [96, 53, 25], ids=lambda n: f"{n} samples")
def test_training_equals_one_device(replicas, samples):
    data = classification_data(samples=samples)

    def optimizer():
        return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)

    one, _ = train(None, optimizer=optimizer, data=data)
    several, _ = train(
        StandInStrategy(replicas, **STAGE_1), optimizer=optimizer, data=data
    )
    # As in test_tpu_strategy.py: a momentum of 0.9 adds up to ten clipped gradients.
    steps = 2 * -(-samples // 24)
    bound = rounding_bound(one, steps, 24, gradient_bound=0.5, learning_rate=0.5)
    assert largest_difference(one, several) <= bound < 1e-3


def test_each_replica_holds_its_part_of_the_state_only():
    model, _ = train(StandInStrategy(4, **STAGE_1), optimizer=adam, epochs=1)
    one, _ = train(None, optimizer=adam, epochs=1)
    kernel = model.layers[0].kernel  # 12 x 33
    slots = [v.value for v in model.optimizer.variables if "dense" in v.path]
    assert len(slots) == 8
    for slot in slots:
        shards = [slot.shard(part).numpy() for part in range(4)]
        assert all(shard.shape == (slot.layout.shard_elements,) for shard in shards)
        whole = np.concatenate(shards)[: slot.layout.elements]
        np.testing.assert_array_equal(whole.reshape(slot.shape), slot.numpy())
    assert slots[0].layout.shard_elements == 99
    assert len({slots[0].shard(part).numpy().tobytes() for part in range(4)}) == 4
    assert kernel.value.values[0].shape == (12, 33)
    for mine, whole in zip(
        model.optimizer.variables, one.optimizer.variables, strict=True
    ):
        # Means of 96 rows in another order: gradients below 3, of 24 + 66 terms.
        np.testing.assert_allclose(
            mine.numpy(), whole.numpy(), atol=3 * 180 * UNIT_ROUND_OFF
        )


def test_small_variables_stay_whole():
    strategy = StandInStrategy(2, shard="optimizer", shard_min_bytes=12 * 33 * 4)
    model, _ = train(strategy, optimizer=adam, epochs=1)
    kinds = [hasattr(v.value, "shard") for v in model.optimizer.variables]
    # Of iteration, rate, and four weights with two slots each: the first kernel's.
    assert kinds == [False] * 2 + [True] * 2 + [False] * 6


def test_gradients_travel_in_bfloat16_on_request():
    exact, _ = train(StandInStrategy(2, **STAGE_1), epochs=1)
    rounded, _ = train(StandInStrategy(2, wire_dtype="bfloat16", **STAGE_1), epochs=1)
    # As in test_tpu_strategy.py.
    bound = 0.05 * 9.05 * 3 * 2 * 2.0**-8
    assert 1e-6 < largest_difference(exact, rounded) <= bound


# Saved by, and read by: (replicas, stage) of the stand-in, "mirrored" or None for one
# device.
WAYS = [
    ((2, 1), (4, 1)),
    ((4, 1), (2, 0)),
    ((2, 0), (4, 1)),
    ((4, 1), None),
    (None, (2, 1)),
    ((2, 1), "mirrored"),
    ("mirrored", (4, 1)),
]


def strategy_of(place):
    if place is None:
        return tf.distribute.get_strategy()
    if place == "mirrored":
        return make_strategy(3, "parameters")
    return StandInStrategy(place[0], shard=place[1], shard_min_bytes=0)


@pytest.mark.parametrize("writer, reader", WAYS, ids=str)
def test_files_are_read_by_any_other(writer, reader, tmp_path):
    model, _ = train(strategy_of(writer), optimizer=adam, epochs=1)
    path = tmp_path / "model.keras"
    model.save(path)
    with strategy_of(reader).scope():
        loaded = keras.models.load_model(path)
    for a, b in zip(
        [*model.weights, *model.optimizer.variables],
        [*loaded.weights, *loaded.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    # Other batches than before: a slot that was not restored would show.
    x, y = classification_data(seed=8)
    for going_on in (model, loaded):
        going_on.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    # Four updates of 0.01 whose relative rounding is that of sums of 24 + 66 terms,
    # taken twice, and ten times that where a gradient is a tenth of its terms.
    assert largest_difference(model, loaded) <= 4 * 0.01 * 1800 * UNIT_ROUND_OFF


def test_checkpoints_hold_whole_variables(tmp_path):
    model, _ = train(StandInStrategy(4, **STAGE_1), optimizer=adam, epochs=1)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(
        tmp_path / "checkpoint"
    )
    with StandInStrategy(2, **STAGE_1).scope():
        other = dense_model()
        other.compile(adam(), "sparse_categorical_crossentropy")
        other.optimizer.build(other.trainable_variables)
    for variable in other.weights:
        variable.assign(variable + 1.0)
    read = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    read.assert_existing_objects_matched()
    for a, b in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert largest_difference(model, other) == 0.0


class TensorFlowsOwn(StandInStrategy):
    """Nothing stands in but the CPUs: `tpu.replicate` itself makes the graph."""

    def _make_extended(self, tpu):
        extended = TPUDataParallelExtended(
            self,
            tpu_stand_in.Resolver(2),
            CrossReplica,
            device_assignment=tpu_stand_in.Assignment(2),
        )
        extended._device_assignment = None
        return extended

    def _run(self, *given):
        return tfdp.TPUDataParallelStrategy._run(self, *given)


@pytest.mark.parametrize("packed", [False, True])
def test_tensorflow_builds_the_program_for_all_cores(packed):
    """It cannot run here, but everything that a TPU would be handed is built."""
    strategy = TensorFlowsOwn(2, **STAGE_1)
    strategy._enable_packed_variable_in_eager_mode = packed
    with strategy.scope():
        model = dense_model()
        model.compile(
            keras.optimizers.Adam(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices(classification_data(samples=11))
    batch = next(iter(strategy.experimental_distribute_dataset(dataset.batch(8))))

    @tf.function(autograph=False)
    def step(data):
        return strategy.run(model.train_step, args=(data,))

    operations = step.get_concrete_function(batch).graph.get_operations()
    scattered = [op for op in operations if op.type == "XlaReduceScatter"]
    # One for each of four gradients: rows of half of a variable.
    halves = sorted(-(-np.prod(w.shape) // 2) for w in model.trainable_weights)
    assert sorted(op.inputs[0].shape.as_list() for op in scattered) == [
        [2, half] for half in halves
    ]
    [gathered] = [op for op in operations if op.type == "AllToAll"]
    assert gathered.inputs[0].shape == (2, sum(halves))
    assert not [op for op in operations if op.type == "CrossReplicaSum"]


@pytest.mark.parametrize("stage", ["gradients", "parameters", 2, 3])
def test_other_stages_are_refused(stage):
    with pytest.raises(ConfigurationError, match="on a TPU: .*'none', 'optimizer'"):
        StandInStrategy(2, shard=stage)


def test_what_needs_whole_tensors_is_refused():
    with pytest.raises(ConfigurationError, match="cannot update shards on a TPU"):
        train(
            StandInStrategy(2, **STAGE_1),
            optimizer=lambda: keras.optimizers.Adafactor(0.01),
        )
