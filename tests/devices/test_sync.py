"""Replicas that train apart: what they compute, and what everybody else sees of it."""

import keras
import numpy as np
import pytest

import tfdp
from tests.support.apart import (
    ByHand,
    linear_model,
    parts_of,
    regression_data,
    sgd,
    vector_of,
)
from tests.support.parity import make_strategy

DILOCO, LOCAL_SGD = tfdp.sync.DiLoCo, tfdp.sync.LocalSGD
# 12 updates on sums of at most 24 terms below 20, each rounded to u = 6e-8 of itself,
# at rate 0.05 / (1 - 0.5), and an outer step of at most 0.7 * 1.9 / (1 - 0.9) of it:
# 12 * 0.1 * 24 * 20 * 6e-8 = 4e-5. Replicas that would not meet are 1e-2 off, and more.
BOUND = 4e-5


def compiled(strategy, sync, build=linear_model, inner=sgd, wrap=None, **options):
    with strategy.scope():
        model = build()
        optimizer = tfdp.DistributedOptimizer(inner(), sync=sync, **(wrap or {}))
        loss = options.pop("loss", None) or "mse"
        model.compile(optimizer, loss, jit_compile=False, **options)
    return model


def local_weights(model, rank):
    return [v.value.local_copy(rank).numpy() for v in model.trainable_variables]


def compare(model, by_hand, replicas):
    distances = [vector_of(model.get_weights()) - by_hand.outer]
    for rank in range(replicas):
        group = rank * by_hand.groups // replicas
        mine = vector_of(local_weights(model, rank))
        distances.append(mine - by_hand.local[group])
    return np.max(np.abs(distances))


SYNCS = {
    "local": LOCAL_SGD(3, across="replicas"),
    "local-in-every-step": LOCAL_SGD(1, across="replicas"),
    "post-local": LOCAL_SGD(3, start_step=2, across="replicas"),
    "diloco": DILOCO(every=3, across="replicas"),
    "diloco-later": DILOCO(4, start_step=3, outer_momentum=0.5, across="replicas"),
    "local-hosts": LOCAL_SGD(3),
    "diloco-hosts": DILOCO(every=3, start_step=1),
}


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("rows", [96, 53], ids=["even", "short"])
@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
def test_rounds_are_those_of_the_equations(sync, rows):
    """53 rows in batches of 24: 24, 24 and 5, which leaves a replica without one."""
    hosts = sync.across == "hosts"
    strategy = make_strategy(4, **({"hierarchy": (2, 2)} if hosts else {}))
    model = compiled(strategy, sync)
    x, y = regression_data(rows)
    by_hand = ByHand(sync, vector_of(model.get_weights()), 2 if hosts else 4)
    for _ in range(3):
        model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
        for parts in parts_of(x, y, 24, 4, by_hand.groups):
            by_hand.update(parts)
        assert compare(model, by_hand, 4) < BOUND
    assert by_hand.updates in (9, 12)
    is_in_round = (by_hand.updates - sync.start_step) % sync.every
    apart = np.ptp(by_hand.local, axis=0).max()
    assert (apart > 100 * BOUND) == bool(is_in_round)


@pytest.mark.parametrize("across", ["replicas", "hosts"])
def test_meeting_in_every_step_is_plain_training(across):
    """For SGD without momentum the mean of the weights is the step of the mean
    gradient, where all groups have as many rows."""
    strategy = make_strategy(4, hierarchy=(2, 2))
    x, y = regression_data(96)

    def trained(sync):
        model = compiled(strategy, sync, inner=lambda: keras.optimizers.SGD(0.05))
        model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
        return vector_of(model.get_weights())

    apart = trained(LOCAL_SGD(1, across=across))
    assert np.max(np.abs(apart - trained(None))) < BOUND


def test_short_batches_count_groups_and_not_rows():
    """The papers' mean is over workers: each brings its mean, whatever its rows."""
    sync = LOCAL_SGD(1, across="replicas")
    x, y = regression_data(5)
    model = compiled(make_strategy(2), sync, inner=lambda: keras.optimizers.SGD(0.05))
    plain = compiled(make_strategy(2), None, inner=lambda: keras.optimizers.SGD(0.05))
    for each in (model, plain):
        each.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    difference = vector_of(model.get_weights()) - vector_of(plain.get_weights())
    assert np.max(np.abs(difference)) > 100 * BOUND
