"""`OneBitLAMB`: LAMB at first, then the equations, and what it is refused with."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.compression_table import IDENTITIES
from tests.support.one_bit import BLOCK, SHAPE, drawn, scaled_signs, stepping, updated
from tests.support.parity import classification_data, dense_model, make_strategy
from tfdp.compression import Int8, SignSGD
from tfdp.errors import ConfigurationError
from tfdp.optimizers import LAMB, OneBitLAMB

RATE, BETA_1, BETA_2, EPSILON, DECAY = 0.01, 0.9, 0.99, 1e-6, 0.1
WARMUP, RATIO_MOMENTUM, FACTOR_STEP = 3, 0.9, 0.1
# As of test_one_bit_adam.py, 5e-7 over 8 updates of 0.01 in each number. Ratios of
# norms scale an update by up to 2 here, and are off by less than the numbers.
BOUND = 4e-6


def by_hand(gradients, lossy=True, with_factor=True):
    """The weights after each update, and the factors: the equations of the docstring,
    in float64."""
    replicas = len(gradients[0])
    w, m, v, fresh = start().astype(float), *(np.zeros(SHAPE) for _ in range(3))
    left = [np.zeros(SHAPE) for _ in range(replicas)]
    average, r, found, factors = 0.0, 1.0, [], []
    for t, of_replicas in enumerate(gradients, start=1):
        is_warm = t <= WARMUP
        if is_warm:
            g = sum(of_replicas)
        else:
            parts = [
                BETA_1 * m / replicas + (1 - BETA_1) * g + e
                for g, e in zip(of_replicas, left, strict=True)
            ]
            sent = [scaled_signs(p) if lossy else p for p in parts]
            left = [p - c for p, c in zip(parts, sent, strict=True)]
            g = (sum(sent) - BETA_1 * m) / (1 - BETA_1)
        m = BETA_1 * m + (1 - BETA_1) * g
        fresh = BETA_2 * fresh + (1 - BETA_2) * g**2
        v = fresh if is_warm else v
        root = np.sqrt(v / (1 - BETA_2 ** min(t, WARMUP))) + EPSILON
        now = np.sqrt(fresh / (1 - BETA_2**t)) + EPSILON
        a = np.where(v > 0, m / (1 - BETA_1**t) / root, 0)
        u = a + DECAY * w
        if is_warm:
            c = np.clip(np.linalg.norm(w) / np.linalg.norm(u), 0.01, 10.0)
            average = RATIO_MOMENTUM * average + (1 - RATIO_MOMENTUM) * c
        else:
            k = min(1.0, np.linalg.norm(a) / np.linalg.norm(u))
            q = (root / now)[v > 0].max() * k + 1 - k
            q = np.clip(q, 0.5, 4.0)
            r = np.clip(q, r * (1 - FACTOR_STEP), r * (1 + FACTOR_STEP))
            c = average / (1 - RATIO_MOMENTUM**WARMUP) * (r if with_factor else 1.0)
        w = w - RATE * c * u
        found.append(w)
        factors.append(r)
    return found, factors


def start():
    return np.random.default_rng(5).normal(size=SHAPE).astype("float32")


def optimizer(compression=None, warmup_steps=WARMUP, across="replicas", **options):
    return OneBitLAMB(
        RATE,
        warmup_steps=warmup_steps,
        beta_1=BETA_1,
        beta_2=BETA_2,
        epsilon=EPSILON,
        compression=compression or SignSGD(BLOCK, min_bytes=0),
        across=across,
        **{"weight_decay": DECAY, **options},
    )


def scaled(make, scale):
    return lambda: keras.optimizers.LossScaleOptimizer(make(), initial_scale=scale)


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("scale", [None, 8.0], ids=["plain", "loss-scale"])
def test_updates_are_those_of_the_equations(scale):
    gradients = drawn(2)
    # The second half is a quarter of the size: the frozen variance is too large then.
    gradients[4:] /= 4
    made = optimizer if scale is None else scaled(optimizer, scale)
    found, used = updated(make_strategy(2), made, gradients * (scale or 1), start())
    expected, factors = by_hand(gradients)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=BOUND)
    inner = getattr(used, "inner_optimizer", used)
    np.testing.assert_allclose(inner._factors[0].numpy(), factors[-1], rtol=1e-5)
    # What is lost, and the factor, both show.
    for other in by_hand(gradients, lossy=False), by_hand(gradients, with_factor=False):
        assert np.abs(found[WARMUP - 1] - other[0][WARMUP - 1]).max() < BOUND
        assert np.abs(found[-1] - other[0][-1]).max() > 50 * BOUND
    # It moved by a tenth of itself at first, and by less when it had arrived.
    assert factors[WARMUP] != 1.0 and len(set(factors[WARMUP:])) > 2


def test_weights_without_a_gradient_only_decay():
    found, _ = updated(make_strategy(2), optimizer, drawn(2), start())
    before, after = start()[0, :2], found[-1][0, :2]
    assert (np.abs(after) < np.abs(before)).all()
    np.testing.assert_allclose(after / before, (after / before)[0], rtol=1e-5)


def test_a_step_that_overflows_changes_nothing():
    bad = np.insert(drawn(2), 5, np.inf, axis=0)
    bad[5, 1] = 0  # on one replica alone
    found, used = updated(make_strategy(2), scaled(optimizer, 1.0), bad, start())
    np.testing.assert_array_equal(found[4], found[5])
    assert all(np.isfinite(v.numpy()).all() for v in used.inner_optimizer.variables)
    assert np.isfinite(found[-1]).all() and not np.array_equal(found[5], found[6])


def trained(strategy, make, batch_size=23):
    x, y = classification_data()
    with strategy.scope():
        model = dense_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make(), loss, jit_compile=False)
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.worth_seconds(6)
@pytest.mark.parametrize("layout", ["2", "3", "2x2"])
@pytest.mark.parametrize(
    "method",
    [m for m in IDENTITIES.values() if not m.plain_steps],
    ids=[name for name, m in IDENTITIES.items() if not m.plain_steps],
)
def test_nothing_lost_is_one_device(method, layout):
    """By the identities of the table of compression, over uneven batches."""
    hosts = layout == "2x2"
    strategy = (
        make_strategy(4, hierarchy=(2, 2)) if hosts else make_strategy(int(layout))
    )
    across = "hosts" if hosts else "replicas"
    ours = trained(strategy, lambda: optimizer(method, 4, across))
    theirs = trained(tf.distribute.get_strategy(), lambda: optimizer(method, 4))
    for one, other in zip(ours, theirs, strict=True):
        # Ten updates; a product of full rank is a sum of up to 33 terms.
        np.testing.assert_allclose(one, other, rtol=0, atol=50 * BOUND)
    assert max(np.abs(w).max() for w in theirs) > 2000 * BOUND


def test_in_the_warm_up_it_is_lamb():
    alone = tf.distribute.get_strategy()
    bounds = {"least_ratio": 0.0, "most_ratio": 1e9}
    ours = trained(alone, lambda: optimizer(warmup_steps=20, **bounds))
    lamb = trained(
        alone, lambda: LAMB(RATE, BETA_1, BETA_2, epsilon=EPSILON, weight_decay=DECAY)
    )
    for one, other in zip(ours, lamb, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=BOUND)
    frozen = trained(alone, lambda: optimizer(warmup_steps=4, **bounds))
    narrow = trained(alone, lambda: optimizer(warmup_steps=20, most_ratio=0.1))
    assert np.abs(frozen[0] - ours[0]).max() > 50 * BOUND
    assert np.abs(narrow[0] - ours[0]).max() > 50 * BOUND


def test_accumulated_gradients_are_one_update():
    """Two micro-steps of a DistributedOptimizer are one step of the whole batch."""
    x, y = classification_data()

    def fitted(batch_size, wrap, rows):
        with make_strategy(2).scope():
            model = dense_model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(wrap(optimizer()), loss, jit_compile=False)
        options = {"batch_size": batch_size, "epochs": 2, "shuffle": False}
        model.fit(x[rows], y[rows], verbose=0, **options)
        return model.get_weights()

    whole = fitted(24, lambda o: o, np.arange(96))
    # Each replica has the same rows of an update.
    order = np.arange(96).reshape(4, 2, 2, 6).swapaxes(1, 2).ravel()
    parts = fitted(
        12, lambda o: tfdp.DistributedOptimizer(o, accumulate_steps=2), order
    )
    for one, two in zip(whole, parts, strict=True):
        # A momentum near 0 may get the other sign: seen through the count of such.
        assert np.mean(np.abs(one - two) > 10 * BOUND) < 0.02


def residuals(used):
    kept = used.compression_state.of_variables["variable_0"]
    return np.stack([copy.numpy() for copy in kept.residual.copies])


def test_a_checkpoint_resumes_bit_for_bit_and_deals_out_what_is_left(tmp_path):
    gradients = drawn(2)
    steps, weight, used = stepping(make_strategy(2), optimizer, start())
    steps(gradients[:5])
    left = residuals(used)
    file = tf.train.Checkpoint(w=weight, optimizer=used).save(tmp_path / "c")
    expected = steps(gradients[5:])
    again, weight, used = stepping(make_strategy(2), optimizer, start())
    tf.train.Checkpoint(w=weight, optimizer=used).restore(file)
    np.testing.assert_array_equal(again(gradients[5:]), expected)
    # Three go on from what two had left: nothing of it is lost.
    of_three, weight, used = stepping(make_strategy(3), optimizer, start())
    of_three(drawn(3)[:1])  # there is something to restore into
    tf.train.Checkpoint(w=weight, optimizer=used).restore(file)
    np.testing.assert_allclose(
        residuals(used).sum(axis=0), left.sum(axis=0), rtol=0, atol=1e-6
    )
    assert np.abs(left.sum(axis=0)).max() > 1e-2
    assert np.isfinite(of_three(drawn(3)[:3])).all()


def test_a_config_makes_the_same():
    used = optimizer(
        Int8(64, exclude=["embedding"]), most_ratio=0.3, exclude_from_weight_decay=["b"]
    )
    told = keras.saving.serialize_keras_object(used)
    again = keras.saving.deserialize_keras_object(told)
    assert again.momentum_compression == used.momentum_compression
    assert again.get_config() == used.get_config()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"warmup_steps": 0}, "OneBitLAMB.warmup_steps must be an integer"),
        ({"compression": "sign"}, "must be a value of tfdp.compression"),
        ({"global_clipnorm": 1.0}, "Leave it out"),
        ({"gradient_accumulation_steps": 2}, "accumulate_steps"),
        ({"least_ratio": 2.0, "most_ratio": 1.0}, "most_ratio must be at least"),
        ({"least_factor": 1.5}, "least_factor must be at most 1"),
        ({"most_factor": 0.9}, "most_factor=0.9"),
        ({"ratio_momentum": 1.0}, "below 1"),
        ({"factor_step": -0.1}, "factor_step"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        OneBitLAMB(0.1, **{"warmup_steps": 2, **options})


@pytest.mark.parametrize(
    "make, options, words",
    [
        (lambda: make_strategy(2), {"across": "hosts"}, "here is one"),
        (lambda: make_strategy(2, "optimizer"), {}, "cannot update shards"),
    ],
    ids=["one host", "shards"],
)
def test_places_that_cannot_be_are_refused(make, options, words):
    with pytest.raises(ConfigurationError, match=words):
        trained(make(), lambda: optimizer(**options))


def test_rounds_are_refused():
    apart = tfdp.sync.LocalSGD(2, across="replicas")
    with pytest.raises(ConfigurationError, match="with sync"):
        tfdp.DistributedOptimizer(optimizer(), sync=apart)
