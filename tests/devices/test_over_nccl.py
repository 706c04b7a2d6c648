"""What engines ask of TensorFlow for NCCL, by their graphs, which its ring runs.

Nothing of it was run on a GPU.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.over_nccl import (
    collectives_of,
    engine_of_hosts_over_nccl,
    engine_over_nccl,
    step_of,
)
from tfdp.plan.shards import ShardLayout

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
            tf.fill([3, 5], tf.cast(PARTS[rank], tf.bfloat16)), rank
        ),
    )
    for result in step():
        assert result.dtype == tf.bfloat16
        np.testing.assert_array_equal(
            tf.cast(result, tf.float32), np.full((3, 5), TOTAL)
        )
    assert types_of(collectives_of(step), SUMS) == {tf.float32}


@pytest.mark.parametrize("hierarchy", LEVELS)
def test_shards_of_bfloat16_are_added_as_float32_and_gathered_as_they_are(hierarchy):
    layout = ShardLayout((9, 3), parts=4)

    def replica(engine, rank):
        own = tf.fill([9, 3], tf.cast(PARTS[rank], tf.bfloat16))
        shards = engine.reduce_scatter_bucket([own], [layout], rank, "bucket")
        assert [shard.dtype for shard in shards] == [tf.bfloat16]
        return engine.all_gather_bucket(shards, [layout], rank, "bucket")[0]

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


@pytest.mark.parametrize("hierarchy", LEVELS)
def test_nccl_itself_is_asked_for_sums_of_float32(hierarchy):
    engine = engine_over_nccl(4, hierarchy)
    engine._hint, engine._has_reduce_scatter = "nccl", True
    for group in (engine._everyone, *engine._within, *engine._across):
        engine._orders[group.key] = tuple(range(len(group.ranks)))  # asked of nobody
    layout = ShardLayout((9, 3), parts=4)

    def replica(engine, rank):
        own = tf.zeros([9, 3], tf.bfloat16)
        total = engine.all_reduce(own, rank)
        return [total, *engine.reduce_scatter_bucket([own], [layout], rank, "bucket")]

    ops = collectives_of(step_of(engine, replica))
    assert {op.get_attr("communication_hint") for op in ops} == {b"nccl"}
    assert types_of(ops, SUMS) == {tf.float32}
    assert {"CollectiveReduceScatterV2"} <= {op.type for op in ops}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_other_types_are_added_as_they_are(dtype):
    step = step_of(
        engine_over_nccl(4),
        lambda engine, rank: engine.all_reduce(
            tf.fill([7], tf.cast(rank, dtype)), rank
        ),
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
        return engine.sum_everywhere([own], rank, "bucket", wire_dtype)[0]

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
        return engine.sum_everywhere([own[number]], rank, f"bucket {number}", None)[0]

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
