"""Owned and flat tensors in one exchange: NumPy's sums and the same elements back."""

import numpy as np
import pytest
import tensorflow as tf

from tests.devices.test_engines import SETTINGS, replicate
from tests.support.parity import make_strategy
from tfdp.exchange.shards import ShardReducer
from tfdp.plan.shards import OwnedLayout, ShardLayout

# Sizes that do not divide, and one smaller than a group.
SHAPES = [(5, 3), (2, 1), (7,), (4, 6), (3, 3), (3, 3)]


def layouts_of(parts, owners):
    return [
        ShardLayout(shape, parts)
        if owner is None
        else OwnedLayout(shape, parts, owner % parts)
        for shape, owner in zip(SHAPES, owners, strict=True)
    ]


# Who owns each; None: flat shards. With one owner, rows would be mostly padding.
OWNERS = {
    "mixed": [1, None, 0, None, 2, 3],
    "one-owner": [1, 1, 1, 1, 1, 1],
    "one-of-six": [0, None, None, None, None, None],
}


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("replicas, options", SETTINGS)
@pytest.mark.parametrize("owners", OWNERS)
def test_sums_reach_owners_and_come_back_to_all(replicas, options, owners):
    rng = np.random.default_rng(3)
    # Small integers: every order of additions gives the same floats.
    given = [
        [rng.integers(-9, 9, size=shape).astype("float32") for shape in SHAPES]
        for _ in range(replicas)
    ]
    expected = [sum(parts) for parts in zip(*given, strict=True)]
    layouts = layouts_of(replicas, OWNERS[owners])
    flat = [ShardLayout(shape, replicas) for shape in SHAPES]
    strategy = make_strategy(replicas, **options)
    reducer = ShardReducer(strategy.extended.reducer)
    arguments = [replicate(strategy, [g[i] for g in given]) for i in range(len(SHAPES))]

    @tf.function
    def step(arguments):
        def replica(*values):
            context = tf.distribute.get_replica_context()
            rank = context.replica_id_in_sync_group
            rank = int(tf.get_static_value(rank)) if tf.is_tensor(rank) else rank
            shards = reducer.reduce_scatter(list(values), layouts, rank)
            wholes = reducer.all_gather(shards, layouts, rank)
            cut = reducer.reshard(shards, layouts, flat, rank)
            again = reducer.reshard(cut, flat, layouts, rank)
            return shards, wholes, cut, again

        outcome = strategy.run(replica, args=tuple(arguments))
        return tf.nest.map_structure(strategy.experimental_local_results, outcome)

    shards, wholes, cut, again = step(arguments)
    for place, (layout, whole) in enumerate(zip(layouts, expected, strict=True)):
        elements = whole.reshape(-1)
        for rank in range(replicas):
            start, stop = layout.bounds(rank)
            for shard in (shards[place][rank], again[place][rank]):
                assert shard.shape == layout.shard_shape(rank)
                own = shard.numpy().reshape(-1)
                np.testing.assert_array_equal(own[: stop - start], elements[start:stop])
                assert not own[stop - start :].any()
            np.testing.assert_array_equal(wholes[place][rank], whole)
            start, stop = flat[place].bounds(rank)
            own = cut[place][rank].numpy()
            np.testing.assert_array_equal(own[: stop - start], elements[start:stop])
