"""Replicas whose parts of a batch have other static numbers of rows.

Three replicas get 2, 2 and 1 of 5 rows. Two branches are alike in all shapes, so that
an exchange that met the one of the other branch would go unnoticed.
"""

import numpy as np
import pytest

import tfdp
from tests.support.branches import branching_model
from tests.support.parity import classification_data

ROWS = (5, 4)


def trained(strategy, kinds, eagerly, rows):
    x, y = classification_data(samples=sum(rows))
    model = branching_model(strategy, kinds, run_eagerly=eagerly)
    start = model.get_weights()
    for stop, count in zip(np.cumsum(rows), rows, strict=True):
        model.train_on_batch(x[stop - count : stop], y[stop - count : stop])
    return start, model.get_weights()


BRANCHES = {
    "shards": (("plain", "plain"), "parameters"),
    "shards-of-an-image": (("image", "plain"), "parameters"),
    "sync-batch-norm": (("sync", "sync"), None),
    "all-reduce": (("centred", "centred"), None),
}


def three_replicas(engine, shard):
    options = {} if shard is None else {"shard": shard, "shard_min_bytes": 0}
    return tfdp.DataParallelStrategy(
        [f"CPU:{i}" for i in range(3)],
        communication=tfdp.Communication(engine=engine),
        **options,
    )


@pytest.mark.parametrize(
    "name, engine",
    [
        ("shards", "in_process"),
        ("shards", "tensorflow"),
        pytest.param("shards-of-an-image", "in_process", marks=pytest.mark.slow),
        ("sync-batch-norm", "tensorflow"),
        ("all-reduce", "in_process"),
    ],
)
def test_gradients_of_branches_meet_their_own(name, engine):
    kinds, shard = BRANCHES[name]
    start, one = trained(None, kinds, False, ROWS)
    _, several = trained(three_replicas(engine, shard), kinds, False, ROWS)
    assert_trained_alike(start, one, several)


@pytest.mark.parametrize("name", ["sync-batch-norm", "all-reduce"])
def test_gradients_of_branches_meet_their_own_eagerly(name):
    kinds, shard = BRANCHES[name]
    start, one = trained(None, kinds, False, ROWS)
    _, several = trained(three_replicas("in_process", shard), kinds, True, ROWS)
    assert_trained_alike(start, one, several)


def assert_trained_alike(start, one, several):
    for a, b in zip(one, several, strict=True):
        # Two updates of 0.1 times gradients below 1, of sums of 8 rows.
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-6)
    assert max(np.abs(a - b).max() for a, b in zip(one, start, strict=True)) > 1e-2
