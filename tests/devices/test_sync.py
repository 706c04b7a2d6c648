"""Replicas that train apart: what they compute, and what everybody else sees of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

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
    "fragments": DILOCO(4, fragments=2, start_step=1, across="replicas"),
    "overlap": DILOCO(4, overlap_steps=2, across="replicas"),
    "overlap-of-fragments": DILOCO(
        4, fragments=2, overlap_steps=3, mixing=0.25, start_step=1, across="replicas"
    ),
    "mixed-at-once": DILOCO(every=3, mixing=0.5, across="replicas"),
    "overlap-hosts": DILOCO(every=3, overlap_steps=1, mixing=0, start_step=1),
    "local-hosts": LOCAL_SGD(3),
    "diloco-hosts": DILOCO(every=3, start_step=1),
}


@pytest.mark.worth_seconds(18)
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
        logs = model.fit(x, y, batch_size=24, shuffle=False, verbose=0).history
        for parts in parts_of(x, y, 24, 4, by_hand.groups):
            by_hand.update(parts)
        assert compare(model, by_hand, 4) < BOUND
        assert logs["loss"][0] == pytest.approx(by_hand.mean_loss(), rel=1e-4)
    assert by_hand.updates in (9, 12)
    is_in_round = (by_hand.updates - sync.start_step) % sync.every
    keeps_own = getattr(sync, "overlap_steps", 0) or getattr(sync, "mixing", None)
    # The bias, which is the last of two fragments: a round ends with it.
    apart = np.ptp(by_hand.local, axis=0)[-1]
    assert (apart > 100 * BOUND) == bool(is_in_round or keeps_own)


@pytest.mark.worth_seconds(6)
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


@pytest.mark.worth_seconds(10)
def test_everybody_but_a_training_step_sees_the_outer_weights(tmp_path):
    """After 4 updates of rounds of 3: the weights of the third."""
    sync = DILOCO(every=3, across="replicas")
    model = compiled(make_strategy(4), sync, metrics=["mae"])
    x, y = regression_data(96)
    by_hand = ByHand(sync, vector_of(model.get_weights()), 4)
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            vector_of(model.get_weights())
        )
    )
    logs = model.fit(
        x,
        y,
        validation_data=(x, y),
        callbacks=[note],
        batch_size=24,
        shuffle=False,
        verbose=0,
    ).history
    expected = []
    for parts in parts_of(x, y, 24, 4, 4):
        by_hand.update(parts)
        expected.append(by_hand.outer)
    assert compare(model, by_hand, 4) < BOUND
    np.testing.assert_allclose(seen, expected, rtol=0, atol=BOUND)
    np.testing.assert_array_equal(seen[0], seen[1])
    predicted = model.predict(x, batch_size=24, verbose=0)
    by_outer = x @ by_hand.outer[:-1, None] + by_hand.outer[-1]
    # A prediction adds up six terms below 20 of weights within BOUND.
    assert np.max(np.abs(predicted - by_outer)) < 120 * BOUND
    loss = np.mean((by_outer - y) ** 2)
    assert model.evaluate(x, y, verbose=0)[0] == pytest.approx(loss, rel=1e-3)
    assert logs["val_loss"][0] == pytest.approx(loss, rel=1e-3)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert loaded.optimizer.sync == sync
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(x[:3]), predicted[:3], rtol=1e-5)


@pytest.mark.worth_seconds(3)
@pytest.mark.parametrize("sync", [SYNCS["local"], SYNCS["diloco"]])
def test_a_fit_that_ends_within_a_round_says_what_is_not_averaged(sync, capsys):
    model = compiled(make_strategy(2), sync)
    x, y = regression_data(48)
    model.fit(x, y, batch_size=12, verbose=0)
    told = capsys.readouterr().err
    assert f"within a round of {type(sync).__name__}" in told
    assert "lack the last 1 updates" in told and "after 0 + k * 3 updates" in told
    model.fit(x[:24], y[:24], batch_size=12, verbose=0)
    assert "within a round" not in capsys.readouterr().err


def normalized_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )


def adam(**options):
    return keras.optimizers.Adam(0.01, **options)


@pytest.mark.worth_seconds(9)
@pytest.mark.parametrize("across", ["replicas", "hosts"])
def test_a_round_is_the_mean_of_models_that_were_trained_alone(across):
    """With Adam, clipping, rows that weigh unequally, and batch normalization, whose
    statistics are averaged, too.

    Each group is one more training, on its rows only, without `sync`.
    """
    groups = 2 if across == "hosts" else 4
    model = compiled(
        make_strategy(4, hierarchy=(2, 2)),
        LOCAL_SGD(2, across=across),
        normalized_model,
        lambda: adam(clipnorm=0.5),
        loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    )
    x, y = regression_data(48)
    weights = np.random.default_rng(5).uniform(0.1, 3.0, 48)
    options = {"shuffle": False, "verbose": 0}
    model.fit(x, y, sample_weight=weights, batch_size=24, **options)
    alone = []
    for group in range(groups):
        rows = np.arange(48).reshape(2, groups, -1)[:, group].ravel()
        one = compiled(
            make_strategy(4 // groups),
            None,
            normalized_model,
            lambda: adam(clipnorm=0.5),
            loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        )
        mine = x[rows], y[rows], 24 // groups
        one.fit(*mine, sample_weight=weights[rows], **options)
        alone.append(one.get_weights())
    for ours, theirs in zip(model.get_weights(), zip(*alone, strict=True), strict=True):
        # Two steps of Adam of 0.01, in which sums of 24 terms may differ by u each;
        # its quotient multiplies that by 1 / (1 - beta_2)^0.5 = 32: 5e-7. Groups are
        # more than 1e-3 apart.
        np.testing.assert_allclose(ours, np.mean(theirs, axis=0), rtol=0, atol=2e-6)
        assert np.ptp(theirs, axis=0).max() > 1e-3


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("across", ["replicas", "hosts"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_group_without_rows_keeps_what_its_layers_store(every, across, accumulated):
    """25 rows in batches of 12: the last one has a row for the first replica alone."""
    groups = 2 if across == "hosts" else 4
    layer = keras.layers.BatchNormalization
    model = compiled(
        make_strategy(4, hierarchy=(2, 2)),
        LOCAL_SGD(every, across=across),
        lambda: keras.Sequential(
            [keras.Input((5,)), layer(momentum=0.5), keras.layers.Dense(1)]
        ),
        wrap={"accumulate_steps": accumulated},
    )
    x, y = regression_data(25)
    model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    means, variances = np.zeros((groups, 5)), np.ones((groups, 5))
    for step, rows in enumerate(2 * np.split(x, [12, 24]), start=1):
        parts = [[] for _ in range(groups)]
        for rank in range(4):
            size = -(-len(rows) // 4)
            parts[rank * groups // 4].append(rows[size * rank : size * (rank + 1)])
        for group, part in enumerate(parts):
            found = [(len(one), one.mean(0), one.var(0)) for one in part if len(one)]
            total = sum(n for n, _, _ in found)
            if total:  # the statistics of each replica, weighed by its rows
                means[group] += sum(n * m for n, m, _ in found) / total
                variances[group] += sum(n * v for n, _, v in found) / total
                means[group] /= 2
                variances[group] /= 2
        if step % (every * accumulated) == 0:
            means[:], variances[:] = means.mean(0), variances.mean(0)
    for own, by_hand in zip(model.get_weights()[2:4], (means, variances), strict=True):
        # Six steps of numbers below 4, each rounded a few times: 1e-6. A row that was
        # borrowed, or zeros in the place of what was kept, are 0.05 off, and more.
        np.testing.assert_allclose(own, by_hand.mean(0), rtol=0, atol=3e-6)


@pytest.mark.worth_seconds(10)
def test_synchronous_updates_weigh_groups_by_their_weights():
    """Before `start_step`: rows that weigh unequally, a batch without some groups."""
    x, y = regression_data(53)
    weights = np.random.default_rng(5).uniform(0.1, 3.0, 53)

    def trained(sync):
        model = compiled(
            make_strategy(4),
            sync,
            normalized_model,
            loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        )
        options = {"batch_size": 24, "shuffle": False, "verbose": 0}
        model.fit(x, y, sample_weight=weights, **options)
        return model.get_weights()

    plain, first = trained(None), trained(LOCAL_SGD(9, 9, across="replicas"))
    for ours, theirs in zip(first, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=BOUND)


RESUMED = {
    "local": (LOCAL_SGD(3, across="replicas"), {}),
    "diloco": (DILOCO(3, start_step=2, across="replicas"), {}),
    "accumulated": (DILOCO(2, across="replicas"), {"accumulate_steps": 3}),
    "float16": (DILOCO(3, across="replicas"), {"dynamic_loss_scale": True}),
    "hosts": (DILOCO(4, fragments=4), {}),
    "on-the-way": (DILOCO(4, overlap_steps=3, across="replicas"), {}),
    "on-the-way-hosts": (DILOCO(4, fragments=4, overlap_steps=2, mixing=0.25), {}),
}


def everything(model):
    """All that a training holds, of every replica."""
    variables = [v.value for v in (*model.variables, *model.optimizer.variables)]
    mirrored = [v for v in variables if hasattr(v, "outer_copy")]
    values = [v.outer_copy(rank).numpy() for v in mirrored for rank in range(4)]
    apart = [v for v in mirrored if v.has_local]
    assert len(apart) == 8  # two layers of two, and four of the normalization
    return values + [v.local_copy(rank).numpy() for v in apart for rank in range(4)]


@pytest.mark.worth_seconds(15)
@pytest.mark.parametrize("sync, wrap", RESUMED.values(), ids=RESUMED)
def test_a_checkpoint_resumes_bit_for_bit(tmp_path, sync, wrap):
    """Taken after 5 micro-steps: within a round, and within an accumulation."""
    x, y = regression_data(24 * 12)
    first, rest = slice(0, 24 * 5), slice(24 * 5, 24 * 12)

    def made(strategy, seed):
        model = compiled(
            strategy,
            sync,
            normalized_model,
            lambda: adam(clipnorm=0.5),
            {"initial_scale": 2.0**4, "dynamic_growth_steps": 2, **wrap},
        )
        keras.utils.set_random_seed(seed)
        return model

    def fit(model, rows):
        model.fit(x[rows], y[rows], batch_size=24, shuffle=False, verbose=0)

    model = made(make_strategy(4, hierarchy=(2, 2)), 1)
    fit(model, first)
    path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    at_checkpoint = everything(model)
    fit(model, rest)
    expected = everything(model)
    other = made(make_strategy(4, hierarchy=(2, 2)), 2)
    fit(other, slice(0, 24))
    tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
    for one, two in zip(everything(other), at_checkpoint, strict=True):
        np.testing.assert_array_equal(one, two)
    fit(other, rest)
    for one, two in zip(everything(other), expected, strict=True):
        np.testing.assert_array_equal(one, two)


def test_other_weights_from_outside_start_the_replicas_again(tmp_path):
    """`set_weights`, and a checkpoint of the model alone, in the middle of a round."""
    sync = LOCAL_SGD(3, across="replicas")
    model = compiled(make_strategy(2), sync)
    x, y = regression_data(48)
    path = tf.train.Checkpoint(weights=model.layers[-1]).save(tmp_path / "weights")
    start = model.get_weights()

    def apart_after_a_step():
        model.fit(x[:24], y[:24], batch_size=24, shuffle=False, verbose=0)
        mine = [vector_of(local_weights(model, rank)) for rank in range(2)]
        return mine, vector_of(model.get_weights())

    def expected_from(weights):
        """One more step of each from `weights`, with the velocities that it has."""
        velocities = model.optimizer.inner_optimizer.momentums
        by_hand = ByHand(sync, vector_of(weights), 2)
        by_hand.velocity = [
            vector_of([v.value.outer_copy(rank).numpy() for v in velocities])
            for rank in range(2)
        ]
        for parts in parts_of(x[:24], y[:24], 24, 2, 2):
            by_hand.update(parts)
        return by_hand.local

    apart_after_a_step()
    others = [w + 1 for w in start]
    expected = expected_from(others)
    model.set_weights(others)
    mine, outer = apart_after_a_step()
    np.testing.assert_allclose(mine, expected, rtol=0, atol=BOUND)
    np.testing.assert_array_equal(outer, vector_of(others))

    model.fit(x[:24], y[:24], batch_size=24, shuffle=False, verbose=0)  # they meet
    expected = expected_from(start)
    tf.train.Checkpoint(weights=model.layers[-1]).restore(path)
    mine, outer = apart_after_a_step()
    np.testing.assert_allclose(mine, expected, rtol=0, atol=BOUND)
    np.testing.assert_array_equal(outer, vector_of(start))
