"""What engines ask of TensorFlow for NCCL, by their graphs, which its ring runs.

Nothing of it was run on a GPU.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.over_nccl import (
    collectives_of,
    engine_of_hosts_over_nccl,
    engine_over_nccl,
    step_of,
)
from tfdp.exchange import collectives
from tfdp.exchange.collectives import KNOWN_SIZE, ROUND_SIZES, round_size
from tfdp.plan.shards import ShardLayout
from tfdp.plan.topology import Topology

pytestmark = pytest.mark.timeout(250)

LEVELS = [(1, 4), (2, 2)]
# Added one by one in bfloat16, whose numbers from 256 on are 2 apart, they stay 256.
# In float32 they are 259, which lies between 258 and 260: even is rounded to, 260.
PARTS = [256.0, 1.0, 1.0, 1.0]
TOTAL = 260.0


def types_of(ops, kinds):
    return {op.get_attr("T") for op in ops if op.type in kinds}


SUMS = ("CollectiveReduceV2", "CollectiveReduceScatterV2", "CollectiveAllToAllV2")


@pytest.mark.parametrize("hierarchy", LEVELS)
def test_bfloat16_is_added_as_float32(hierarchy):
    engine = engine_over_nccl(4, hierarchy)
    step = step_of(
        engine,
        lambda engine, rank: engine.all_reduce(
            [tf.fill([3, 5], tf.cast(PARTS[rank], tf.bfloat16))], rank, "sum"
        )[0],
    )
    for result in step():
        assert result.dtype == tf.bfloat16
        np.testing.assert_array_equal(
            tf.cast(result, tf.float32), np.full((3, 5), TOTAL)
        )
    assert types_of(collectives_of(step), SUMS) == {tf.float32}


def test_the_ring_adds_on_gpus_in_types_that_their_kernel_adds():
    # Halves of one GPU, which NCCL refuses. Only traced: there is no GPU here.
    devices = ["/device:GPU:0", "/device:GPU:1"]
    engine = collectives.Collectives(devices, Topology(1, 2), hint="ring")
    given = [tf.int32, tf.bfloat16, tf.float16, tf.float32, tf.int64, tf.uint8]
    added = [tf.int64, tf.float32, tf.float16, tf.float32, tf.int64, tf.int64]
    for dtype, other in zip(given, added, strict=True):
        step = step_of(
            engine,
            lambda engine, rank, dtype=dtype: engine.all_reduce(
                [tf.zeros([3, 5], dtype)], rank, "sum"
            )[0],
        )
        results = step.get_concrete_function().structured_outputs
        assert {result.dtype for result in results} == {dtype}
        assert types_of(collectives_of(step), SUMS) == {other}


@pytest.mark.parametrize("hierarchy", LEVELS)
def test_shards_of_bfloat16_are_added_as_float32_and_gathered_as_they_are(hierarchy):
    layout = ShardLayout((9, 3), parts=4)

    def replica(engine, rank):
        own = tf.fill([9, 3], tf.cast(PARTS[rank], tf.bfloat16))
        shards = engine.reduce_scatter([own], [layout], rank, "bucket")
        assert [shard.dtype for shard in shards] == [tf.bfloat16]
        return engine.all_gather(shards, [layout], rank, "bucket")[0]

    step = step_of(engine_over_nccl(4, hierarchy), replica)
    for result in step():
        assert result.dtype == tf.bfloat16
        np.testing.assert_array_equal(
            tf.cast(result, tf.float32), np.full((9, 3), TOTAL)
        )
    ops = collectives_of(step)
    assert types_of(ops, SUMS) == {tf.float32}
    # As many bits, which nobody adds.
    assert types_of(ops, ["CollectiveGatherV2"]) == {tf.float16}


def groups_of_levels(engine):
    """The groups of all replicas, within hosts and across hosts."""
    levels = engine.topology.within_hosts, engine.topology.across_hosts
    ranks = range(len(engine.devices))
    return [engine._group(*one) for one in itertools.product(ranks, (None, *levels))]


@pytest.mark.parametrize("hierarchy", LEVELS)
def test_nccl_itself_is_asked_for_sums_of_float32(hierarchy):
    engine = engine_over_nccl(4, hierarchy)
    engine.hint, engine._has_reduce_scatter = "nccl", True
    for group in groups_of_levels(engine):
        engine._orders[group.key] = tuple(range(len(group.ranks)))  # asked of nobody
    layout = ShardLayout((9, 3), parts=4)

    def replica(engine, rank):
        own = tf.zeros([9, 3], tf.bfloat16)
        [total] = engine.all_reduce([own], rank, "sum")
        return [total, *engine.reduce_scatter([own], [layout], rank, "bucket")]

    ops = collectives_of(step_of(engine, replica))
    assert {op.get_attr("communication_hint") for op in ops} == {b"nccl"}
    assert types_of(ops, SUMS) == {tf.float32}
    assert {"CollectiveReduceScatterV2"} <= {op.type for op in ops}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_other_types_are_added_as_they_are(dtype):
    step = step_of(
        engine_over_nccl(4),
        lambda engine, rank: engine.all_reduce(
            [tf.fill([7], tf.cast(rank, dtype))], rank, "sum"
        )[0],
    )
    for result in step():
        np.testing.assert_array_equal(result, np.full(7, 6))
    assert types_of(collectives_of(step), SUMS) == {tf.as_dtype(dtype)}


LARGE = 20_000  # numbers: more bytes than go by the link


@pytest.mark.parametrize(
    "dtype, wire_dtype, sent",
    [
        ("bfloat16", None, "float32"),
        ("float32", "bfloat16", "float32"),
        ("float32", "float16", "float16"),
        ("float32", None, "float32"),
    ],
)
def test_between_hosts_bfloat16_is_added_as_float32(dtype, wire_dtype, sent):
    def replica(engine, rank):
        own = tf.fill([2 * LARGE], tf.cast(PARTS[rank], dtype))
        return engine.all_reduce([own], rank, "bucket", wire_dtype)[0]

    with engine_of_hosts_over_nccl(4) as engine:
        step = step_of(engine, replica)
        results, ops = step(), collectives_of(step)
    # 259 has nine bits: float32 and float16 hold it.
    expected = np.full(2 * LARGE, TOTAL if dtype == "bfloat16" else 259.0)
    for result in results:
        assert result.dtype == tf.as_dtype(dtype)
        np.testing.assert_array_equal(tf.cast(result, tf.float32), expected)
    assert types_of(ops, SUMS) == {tf.as_dtype(sent)}


def ancestors(op, wanted):
    """The ops of `wanted` that `op` waits for, by data or control."""
    seen, found, ways = set(), set(), [op]
    while ways:
        here = ways.pop()
        for before in [*(one.op for one in here.inputs), *here.control_inputs]:
            if before not in seen:
                seen.add(before)
                ways.append(before)
                found |= {before} & wanted
    return found


def buckets(engine, rank, flag):
    """Five sums, of which one is in a branch; what is late is summed first."""
    own = [tf.fill([LARGE + number], float(rank + number)) for number in range(5)]

    def total(number):
        return engine.all_reduce([own[number]], rank, f"bucket {number}")[0]

    first = [total(4), total(3)]
    branch = tf.cond(flag, lambda: total(2), lambda: own[2])
    return [total(0), total(1), branch, *reversed(first)]


def test_launches_between_hosts_are_in_one_order_on_each_replica():
    with engine_of_hosts_over_nccl(3) as engine:
        step = step_of(engine, buckets)
        flag = tf.constant(True)
        results, graph = step(flag), step.get_concrete_function(flag).graph
    for result in results:
        for number, total in enumerate(result):
            # 0 + 1 + 2 and three times the number: whole, so that nothing rounds.
            np.testing.assert_array_equal(
                total, np.full(LARGE + number, 3.0 + 3 * number)
            )
    kinds = ("CollectiveReduceV2", "If")
    launches = [op for op in graph.get_operations() if op.type in kinds]
    assert len(launches) == 3 * 5
    for place, op in enumerate(launches):
        rank, number = divmod(place, 5)
        # Those of its own replica that were traced before it, and no other replica's.
        assert ancestors(op, set(launches)) == set(launches[rank * 5 : place]), number


def test_round_sizes_hold_what_is_asked_for_and_little_more():
    assert len(ROUND_SIZES) < KNOWN_SIZE
    largest = np.iinfo(np.int32).max
    wanted = [*range(3000), *(2**20 + np.arange(-3, 4)), 2**30 + 1, largest]
    for elements in wanted:
        number, size = (int(x) for x in round_size(tf.constant(elements, tf.int32)))
        assert size == ROUND_SIZES[number] >= max(elements, 1)
        assert elements <= 1 or size <= 1.25 * elements
        assert number == 0 or ROUND_SIZES[number - 1] < max(elements, 1)


def groups_of(ops):
    return {int(tf.get_static_value(op.inputs[2])) for op in ops}


SIZES = [5, 3, 0, 8, 9, 200, 1, 0, 6, 4]
WIDTHS = {4: 3, 6: 2}


@pytest.mark.parametrize("hierarchy", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_sums_of_unknown_size_stay_in_their_groups(hierarchy, dtype):
    engine = engine_over_nccl(4, hierarchy)

    def replica(engine, rank, rows):
        own = tf.cast(rows, dtype) * tf.cast(rank + 1, dtype)
        # Two of them, the second one always smaller than the first.
        return [engine.all_reduce([part], rank, "sum")[0] for part in (own, own[1:])]

    step = step_of(engine, replica)
    spec = tf.TensorSpec([None, 3], tf.float32)
    concrete = step.get_concrete_function(spec)
    for size in SIZES:
        # Whole numbers up to 20, ten times: no type rounds them.
        rows = np.arange(size * 3, dtype="float32").reshape(size, 3) % 3
        for full, rest in concrete(tf.constant(rows)):
            np.testing.assert_array_equal(tf.cast(full, tf.float32), rows * 10)
            np.testing.assert_array_equal(tf.cast(rest, tf.float32), rows[1:] * 10)
    known = groups_of_levels(engine)
    assert groups_of(collectives_of(step, spec)) <= {group.key for group in known}


@pytest.mark.parametrize("over_nccl", [True, False])
@pytest.mark.parametrize("devices", [None, ["CPU:2", "CPU:0", "CPU:1"]], ids=str)
@pytest.mark.parametrize("shape", [[None, 2], [None, None], [None]], ids=str)
def test_gathers_of_unknown_size_stay_in_their_group(shape, devices, over_nccl):
    engine = engine_over_nccl(3, devices=devices)
    engine._over_nccl = over_nccl

    def replica(engine, rank, rows):
        return engine.gather(rows[: tf.shape(rows)[0] * rank // 2] + rank, rank)

    step = step_of(engine, replica)
    spec = tf.TensorSpec(shape, tf.int32)
    concrete = step.get_concrete_function(spec)
    for size in SIZES:
        # None at times, and 3 rows of 2 after 2 of 3.
        width = WIDTHS.get(size, size % 3) if shape == [None, None] else 2
        rows = np.arange(size * width, dtype="int32").reshape(size, width)
        rows = rows[:, 0] if shape == [None] else rows
        parts = [rows[: size * rank // 2] + rank for rank in range(3)]
        for result in concrete(tf.constant(rows)):
            np.testing.assert_array_equal(result, np.concatenate(parts))
    # On CPUs a group costs nothing, and each size has one.
    assert over_nccl == (
        groups_of(collectives_of(step, spec)) == {engine._group(0).key}
    )


def test_keys_of_launches_and_sizes_never_meet():
    engine = engine_over_nccl(2)
    keys = []
    for _ in range(5):
        for number in (0, 1, len(ROUND_SIZES) - 1, None):
            group = engine._group(0).of_size(number)
            with engine.run():
                launch = engine._launch(tf.zeros([4]), group, rank=0)
            assert launch["group_key"] == group.key
            keys.append(int(launch["instance_key"]))
    # A launch for all sizes of a step would do; here each has one of its own.
    assert len(set(keys)) == len(keys)
    # Of one launch: all sizes, and the place of what is known.
    span = {KNOWN_SIZE, *range(len(ROUND_SIZES))}
    assert len(span) == len(ROUND_SIZES) + 1 and max(span) < collectives.KEYS_OF_LAUNCH


def fitted(strategy=None):
    """The weights of a model with two tables after eight steps, some of them short."""
    random = np.random.default_rng(5)
    words = random.integers(0, 2000, size=(26, 4))
    targets = random.normal(size=(26, 1)).astype("float32")
    keras.utils.set_random_seed(2)
    with (strategy or tf.distribute.get_strategy()).scope():
        given = keras.Input((4,), dtype="int32")
        tables = [keras.layers.Embedding(2000, width)(given) for width in (6, 3)]
        merged = keras.layers.Flatten()(keras.layers.Concatenate()(tables))
        model = keras.Model(given, keras.layers.Dense(1)(merged))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(words, targets, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def test_tables_train_as_on_one_device_in_one_group(monkeypatch):
    engines = []

    def make(devices, topology, hint):
        engines.append(engine_over_nccl(len(devices), devices=devices))
        return engines[-1]

    monkeypatch.setattr(collectives, "Collectives", make)
    strategy = tfdp.DataParallelStrategy(
        devices=["CPU:0", "CPU:1", "CPU:2"],
        communication=tfdp.Communication(engine="tensorflow"),
    )
    for own, expected in zip(fitted(strategy), fitted(), strict=True):
        # Weights are below 1 and move by less than that in eight steps, whose gradients
        # are each off by some roundings of 6e-8 of their terms: below 1e-5. A row that
        # is lost moves a weight by 1e-3 and more.
        np.testing.assert_allclose(own, expected, atol=1e-5)
    [engine] = engines
    assert engine._groups_by_launch == {}
