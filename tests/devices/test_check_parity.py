"""The parity check: holds where it should, and names the cause where it should not.

TensorFlow's own strategy is the proof that the check can fail: it is known to be wrong
in the ways of `tests.support.parity_faults`.
"""

import dataclasses
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    loss_and_gradients,
    make_strategy,
    stock_strategy,
)
from tests.support.parity_faults import (
    CLASSES,
    EVEN,
    FAULTS,
    UNEVEN,
    Case,
    LocalMean,
    PlainMean,
    cross_entropy,
    far_rows,
    mlp,
    normalised_first,
    rows,
    sgd,
)
from tfdp.errors import LocalMeanWarning, ParityError
from tfdp.testing import check_parity
from tfdp.tools.testing import comparison, stages
from tfdp.tools.testing.causes import COMBINATIONS, SEPARABLE
from tfdp.tools.testing.model_parts import compute_round_off


def check(case, strategy, **options):
    options = {"steps": 2, "batch_size": EVEN, **case.options, **options}
    return check_parity(case.build, case.data, strategy, **options)


@pytest.mark.worth_seconds(4)
@pytest.mark.filterwarnings("ignore::tfdp.errors.LocalMeanWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_known_fault_is_found_and_named(fault):
    case = FAULTS[fault]
    report = check(case, stock_strategy())
    assert not report.ok
    assert [(found.cause, found.where) for found in report.causes] == list(case.causes)
    assert all(found.why and found.instead for found in report.causes)
    # What is by design is told as such, and is no failure of `tfdp check`.
    by_design = {"batch-norm": "HOLDS, but for", "dropout": "INCONCLUSIVE"}
    verdict = by_design.get(fault, "FAILS")
    assert f"\n{verdict}" in str(report)
    assert case.causes[0][0] in str(report)


@pytest.mark.parametrize(
    "fault", [name for name, case in FAULTS.items() if case.exact_with_tfdp]
)
def test_the_same_model_holds_under_tfdp(fault):
    report = check(FAULTS[fault], make_strategy(2), diagnose=False)
    assert report.ok, str(report)


def test_every_cause_with_an_experiment_has_its_fault():
    named = {name for case in FAULTS.values() for name, _ in case.causes}
    causes = {cause.name for cause in SEPARABLE}
    causes |= {cause.name for combination in COMBINATIONS for cause in combination}
    assert causes <= named


class Subclassed(keras.Model):
    """Without weights until it is called; two inputs in a dict."""

    def __init__(self):
        super().__init__()
        self.blocks = [keras.layers.Dense(5), keras.layers.Dropout(0.4, name="noisy")]
        self.last = keras.layers.Dense(CLASSES)

    def call(self, inputs, training=False):
        x = self.blocks[0](inputs["a"]) * inputs["b"]
        return self.last(self.blocks[1](x, training=training))


def subclassed():
    model = Subclassed()
    model.compile(keras.optimizers.Adam(0.01), cross_entropy())
    return model


def dict_rows(count):
    x, y = rows(count)
    return {"a": x, "b": x[:, :1]}, y


# What holds, beside the models of FAULTS: (build, data, options).
SOUND = {
    "stock-on-even-batches": (mlp(), rows(2 * EVEN), {"strategy": stock_strategy}),
    "steps-per-execution": (
        mlp(steps_per_execution=2),
        rows(EVEN + UNEVEN),
        {"steps": 3},
    ),
    "accumulation": (
        mlp(optimizer=sgd(gradient_accumulation_steps=2)),
        rows(2 * EVEN),
        {"steps": 4},
    ),
    "xla": (mlp(jit_compile=True), rows(2 * EVEN), {}),
    "eagerly": (mlp(run_eagerly=True), rows(2 * EVEN), {}),
    "adam": (
        mlp(optimizer=lambda: keras.optimizers.Adam(0.01)),
        rows(2 * EVEN),
        {"steps": 6},
    ),
    "synchronized-batch-norm": (
        mlp(tfdp.layers.SyncBatchNormalization),
        rows(EVEN + UNEVEN),
        {},
    ),
    "synchronized-batch-norm-far-from-zero": (
        normalised_first(tfdp.layers.SyncBatchNormalization),
        far_rows(EVEN + UNEVEN),
        {},
    ),
    "local-mean-in-a-train-step": (
        mlp(model_class=LocalMean),
        rows(EVEN + UNEVEN),
        {},
    ),
    "subclassed-dict-and-dropout": (subclassed, dict_rows(EVEN + UNEVEN), {}),
    "frozen-layer": (
        mlp(lambda: keras.layers.Dense(7, trainable=False)),
        rows(2 * EVEN),
        {},
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_holds(name):
    build, data, options = SOUND[name]
    strategy = options.pop("strategy", lambda: make_strategy(2))()
    report = check_parity(
        build, data, strategy, **{"steps": 2, "batch_size": EVEN, **options}
    )
    assert report.ok, str(report)
    assert "HOLDS" in str(report)
    assert not report.causes
    # Far inside the bound, so that it does not fail by chance on another machine.
    assert max(row.ratio for row in report.rows) < 0.5


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_gets_a_wider_bound(policy):
    keras.config.set_dtype_policy(policy)
    report = check(Case(mlp(), rows(EVEN + UNEVEN)), make_strategy(2))
    assert report.ok, str(report)
    if not report.notes:
        # The kernel alone differs by more than float32 could explain.
        assert 1e-6 < report.rows[0].largest_difference < report.rows[0].bound < 0.02


class TwiceTooLarge(PlainMean):
    """A local mean in half precision: each replica counts as a whole batch."""


@pytest.mark.parametrize("model_class", [keras.Sequential, TwiceTooLarge])
def test_where_half_precision_hides_a_wrong_step_float32_decides(
    model_class, monkeypatch
):
    # As on processors whose bfloat16 kernels round more: no bound is narrow enough.
    monkeypatch.setattr(comparison, "compute_round_off", coarser_in_half_precision)
    keras.config.set_dtype_policy("mixed_bfloat16")
    case = Case(mlp(model_class=model_class), rows(2 * EVEN))
    report = check(case, stock_strategy(), diagnose=False)
    assert "computed in float32" in report.notes[0] and "note: computed" in str(report)
    assert report.ok is (model_class is keras.Sequential), str(report)
    # Of float32: (2 + rows) roundings of 6e-8 of numbers near 1, times SAFETY.
    assert all(row.bound < 1e-4 for row in report.rows)


def coarser_in_half_precision(model):
    unit = compute_round_off(model)
    return unit if unit < 1e-6 else 16 * unit


def test_variables_in_half_precision_never_fail_a_right_model():
    # A kernel near 0.5 is stored in steps of 0.002 and moves by 0.04: how many
    # variables tell depends on the processor.
    keras.config.set_dtype_policy("bfloat16")
    report = check(Case(mlp(), rows(2 * EVEN)), make_strategy(2), diagnose=False)
    assert report.ok or report.inconclusive, str(report)


@pytest.mark.parametrize("rows_of_batch, is_lost", [(2048, True), (64, False)])
def test_sums_that_a_kernel_loses_in_half_precision(rows_of_batch, is_lost):
    """Of 2,048 equal terms bfloat16 adds up 256. One device and two replicas, with 256
    of 2,048 and 512 of 2,048, differ by less than a wide bound; float32 tells."""
    keras.config.set_dtype_policy("mixed_bfloat16")

    def build():
        start = {"kernel_initializer": "ones"}
        layers = [
            keras.layers.Dense(4, "relu", **start),
            keras.layers.Dense(1, **start),
        ]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(keras.optimizers.SGD(1.0), "mae", jit_compile=False)
        return model

    x = np.ones((rows_of_batch, 2), "float32")
    data = x, np.full((rows_of_batch, 1), 100.0, "float32")
    report = tfdp.testing.check_parity(
        build, data, make_strategy(2), steps=1, batch_size=rows_of_batch
    )
    causes = [finding.cause for finding in report.causes]
    assert report.ok is not is_lost, str(report)
    assert ("HOLDS" in str(report)) is not is_lost
    assert causes == (["a kernel that adds in half precision"] if is_lost else [])
    assert ("BiasAddGrad" in str(report)) is is_lost


class SlightlyTooLarge(PlainMean):
    """Updates that are one part in a thousand too large on replicas."""

    def share_of(self, loss):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        return loss * 1.001 / replicas if replicas > 1 else loss


def test_an_error_of_a_thousandth_is_seen_and_not_explained():
    case = Case(mlp(model_class=SlightlyTooLarge))
    report = check(case, stock_strategy())
    # Each update is 1e-3 of itself off; rounding explains some 1e-6 of it.
    assert len(report.exceeding) == len(report.rows) == 4
    assert all(10 < row.ratio < 1e5 for row in report.rows)
    assert report.rows[0].update_ratio == pytest.approx(1.001, abs=1e-5)
    assert {row.first_step_over for row in report.rows} == {1}
    assert [found.cause for found in report.causes] == ["unknown"]


def clipping_step(most, *, by_all=False):
    """A model class with a step of its own that clips to a norm of `most`."""

    class Clipping(keras.Sequential):
        def train_step(self, data):
            loss, gradients = loss_and_gradients(self, data)
            if by_all:
                norm = tf.linalg.global_norm(tfdp.losses.all_sum(gradients))
                gradients = [g * most / tf.maximum(norm, most) for g in gradients]
            else:
                gradients, _ = tf.clip_by_global_norm(gradients, most)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    return Clipping


# What a step does to gradients, and the layers; then the causes.
CHANGES_OF_STEPS = {
    "clips": (clipping_step(0.01), [], ["gradients changed in the step"]),
    "clips by the norm of all": (clipping_step(0.01, by_all=True), [], []),
    # The analysis tells of it, but it changes nothing.
    "never clips": (
        clipping_step(1e9),
        [keras.layers.BatchNormalization],
        ["batch normalization per replica"],
    ),
}


@pytest.mark.worth_seconds(4)
@pytest.mark.filterwarnings("ignore:In a step of model .* gradients were changed")
@pytest.mark.parametrize("row", CHANGES_OF_STEPS)
def test_a_change_of_gradients_in_a_step_is_named(row):
    """Not "sum of local means", which the same rows and plain SGD would confirm."""
    model_class, layers, causes = CHANGES_OF_STEPS[row]
    case = Case(mlp(*layers, model_class=model_class))
    report = check(case, make_strategy(2))
    assert [found.cause for found in report.causes] == causes
    if row == "clips":
        [found] = report.causes
        assert found.where == ("Clipping.train_step",)
        assert found.why.startswith("Gradients were changed before apply")
        assert found.instead.startswith("Let the optimizer do it")
        assert "all_sum(gradients)" in found.instead


def test_dropout_is_switched_off_and_noted():
    case = dataclasses.replace(FAULTS["dropout"], options={})
    report = check(case, make_strategy(2))
    assert report.ok, str(report)
    assert "dropped" in report.notes[0] and "dropped" in str(report)


def augmented():
    layers = [
        keras.Input((4, 4, 1)),
        keras.layers.RandomFlip(name="flips"),
        keras.layers.RandomRotation(0.2),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=False)
    return model


def test_augmentation_is_switched_off_and_noted():
    x = np.random.default_rng(0).normal(size=(8, 4, 4, 1)).astype("float32")
    report = check_parity(augmented, (x, x[:, 0, 0]), make_strategy(2), steps=1)
    assert report.ok, str(report)
    assert "flips, random_rotation" in report.notes[0]


class DrawsOutsideKeras(keras.layers.Layer):
    def call(self, x):
        drawn = tf.raw_ops.RandomUniform(shape=tf.shape(x), dtype=tf.float32)
        return x * drawn


def test_training_that_is_not_repeatable_tells_nothing():
    report = check(Case(mlp(DrawsOutsideKeras)), make_strategy(2))
    assert not report.ok
    assert report.inconclusive
    assert [found.cause for found in report.causes] == ["nothing to tell by"]
    assert {row.verdict for row in report.rows} == {"too small to tell"}


def test_training_that_diverges_on_one_device_is_said():
    report = check(
        Case(mlp(optimizer=lambda: keras.optimizers.SGD(np.inf))), stock_strategy()
    )
    assert [found.cause for found in report.causes] == ["training diverges"]


class InfiniteOnReplica1(PlainMean):
    """Under the strategy the loss of the second half of the batch overflows."""

    def share_of(self, loss):
        context = tf.distribute.get_replica_context()
        last = context.replica_id_in_sync_group > 0
        return loss * tf.where(last, tf.constant(np.inf, loss.dtype), 1.0)


def test_an_overflow_on_one_replica_only_is_named():
    keras.config.set_dtype_policy("mixed_float16")
    build = mlp(model_class=InfiniteOnReplica1, optimizer=sgd())
    report = check(Case(build), stock_strategy())
    assert [found.cause for found in report.causes] == ["overflow on one replica"]
    assert json.dumps(report.to_json(), allow_nan=False)


def test_an_error_under_the_strategy_is_explained_and_chained():
    # Keras' accumulation reduces in a conditional, which stock strategies cannot.
    case = Case(mlp(optimizer=sgd(gradient_accumulation_steps=2)))
    with pytest.raises(ParityError, match="reduction inside a conditional") as raised:
        check(case, stock_strategy(), raise_on_failure=True)
    assert isinstance(raised.value.__cause__, RuntimeError)
    report = raised.value.report
    assert not report.ok and report.rows == ()
    assert report.error.startswith("RuntimeError: ") and "\x1b" not in report.error


def test_the_first_batch_of_unlike_parts_is_explained():
    report = check(Case(mlp(), rows(UNEVEN)), stock_strategy())
    assert [f.cause for f in report.causes] == ["mean of a batch with unlike parts"]
    assert check(Case(mlp(), rows(UNEVEN)), make_strategy(3)).ok


def test_an_error_on_one_device_is_the_models_own():
    with pytest.raises(ValueError, match="incompatible"):
        check(Case(mlp(), (np.zeros((4, 5)), np.zeros(4))), stock_strategy())


def test_the_report_goes_through_json():
    report = check(Case(mlp(), rows(2 * EVEN)), 2)
    plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert plain["ok"] is True
    assert plain["replicas"] == 2 and plain["strategy"] == "DataParallelStrategy"
    assert plain["batch_rows"] == [EVEN, EVEN]
    assert plain["rows"][0]["shape"] == [6, 7]
    assert plain["loss_one_device"] == pytest.approx(plain["loss_replicas"], rel=1e-5)


class Late(keras.layers.Layer):
    """Builds its attention, with dropout, at its first call."""

    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.3)

    def call(self, x, training=None):
        rows = x[:, None, :]
        return x + self.attention(rows, rows, training=training)[:, 0]


class Drawn(keras.layers.Layer):
    """Draws numbers of its own: the noise of a VAE, times, and a mask."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(5)

    def call(self, x, training=None):
        shape = keras.ops.shape(x)
        noise = keras.random.normal(shape, seed=self.seed)
        times = keras.random.randint((shape[0], 1), 0, 5, seed=self.seed)
        scale = keras.random.uniform((), seed=self.seed)
        kind = keras.random.categorical(keras.ops.ones_like(x), 1, seed=self.seed)
        masked = keras.random.dropout(x, 0.5, seed=self.seed)
        noise += tf.random.normal(shape) + tf.random.uniform(tf.shape(x), 0, 1)
        drawn = keras.ops.cast(times + keras.ops.cast(kind, "int32"), x.dtype)
        return masked + 0.1 * (noise + scale * drawn)


@pytest.mark.parametrize("layer", [Late, Drawn, lambda: keras.layers.GRU(64)])
def test_what_draws_by_keras_random_has_a_verdict(layer):
    def build():
        first = keras.layers.Dense(64)
        middle = layer()
        parts = [first, middle]
        if isinstance(middle, keras.layers.GRU):
            middle = keras.layers.GRU(64, dropout=0.2, recurrent_dropout=0.2)
            parts = [first, keras.layers.Reshape((4, 16)), middle]
        model = keras.Sequential([*parts, keras.layers.Dense(5)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    report = tfdp.testing.check_parity(build, classification_data(samples=48), 2)
    assert report.ok and not report.inconclusive, str(report)


def test_a_wrong_step_still_shows_where_rows_draw_alike():
    """The second replica's rows would get another noise."""

    class PerReplica(keras.layers.Layer):
        def call(self, x):
            context = tf.distribute.get_replica_context()
            rank = context.replica_id_in_sync_group if context is not None else 0
            return x * (1.0 + 0.01 * tf.cast(rank, x.dtype))

    def build():
        model = keras.Sequential([Drawn(), PerReplica(), keras.layers.Dense(5)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    data = classification_data(samples=48)
    report = tfdp.testing.check_parity(build, data, 2, diagnose=False)
    assert report.exceeding and not report.inconclusive


def test_batch_normalization_counts_the_rows_of_these_batches():
    def build():
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(5)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    data = classification_data(samples=40)
    report = tfdp.testing.check_parity(build, data, 2, batch_size=16)
    assert "A replica has 4 to 8 rows of these batches" in " ".join(str(report).split())


def test_a_check_prints_what_it_does(monkeypatch, capfd):
    monkeypatch.setattr(stages, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(stages, "EACH_SECONDS", 0.01)

    def build():
        model = keras.Sequential([keras.layers.Dense(5)])
        model.compile("sgd", "mse")
        return model

    data = np.ones((8, 3), "float32"), np.ones((8, 5), "float32")
    with stages.printed_stages("tfdp check"):
        tfdp.testing.check_parity(build, data, 2, steps=1, batch_size=8)
    lines = capfd.readouterr().err.splitlines()
    assert any(
        re.fullmatch(r"tfdp check: \d+ s: trains on one device", x) for x in lines
    )
    assert any("measures rounding on one device (3 of 3)" in line for line in lines)


def test_accumulated_gradients_are_trained_until_they_update():
    def build():
        model = keras.Sequential([keras.layers.Dense(5)])
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
        model.compile(optimizer, "mse")
        return model

    data = np.ones((8, 3), "float32"), np.ones((8, 5), "float32")
    report = check_parity(build, data, 2, steps=2, batch_size=8)
    assert report.ok and report.steps == 6, str(report)
    assert "3 steps for an update" in report.notes[0]


def smooth_dice(y, p):
    return 1 - (2 * tf.reduce_sum(y * p) + 1) / (tf.reduce_sum(y + p) + 1)


class OwnDice(keras.Model):
    """Its constant makes the Dice of equal halves another than that of the whole."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = smooth_dice(y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return {"loss": loss}


@pytest.mark.parametrize("is_own_step", [False, True])
def test_a_loss_that_equal_rows_do_not_show_is_named(is_own_step):
    def build():
        inputs = keras.Input((3,))
        outputs = keras.layers.Dense(2, "sigmoid")(inputs)
        model = (OwnDice if is_own_step else keras.Model)(inputs, outputs)
        loss = None if is_own_step else smooth_dice
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3)).astype("float32")
    y = (rng.uniform(size=(8, 2)) > 0.5).astype("float32")
    with pytest.warns(LocalMeanWarning) as told:
        report = check_parity(build, (x, y), 2, steps=2, batch_size=8)
    assert len(told) == 1  # experiments do not repeat it
    [found] = report.causes
    if is_own_step:
        assert found.cause == "told by a warning" and "tfdp.losses" in found.instead
        assert "LocalMeanWarning says: In a step of model" in found.why
    else:
        assert found.cause == "rows of a batch depend on each other"
        assert "on_all_rows(model)" in found.evidence


def test_drawn_rows_differ_and_a_batch_normalization_of_them_tells():
    """Of equal rows it would be nothing but rounding."""

    class OfNoise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm = keras.layers.BatchNormalization()
            self.dense = keras.layers.Dense(5)
            self.seed = keras.random.SeedGenerator(3)

        def call(self, x, training=None):
            shape = (keras.ops.shape(x)[0], 4)
            noise = self.dense(keras.random.normal(shape, seed=self.seed))
            return x + self.norm(noise, training=training)

    def build():
        model = keras.Sequential([keras.layers.Dense(5), OfNoise()])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 3)).astype("float32")
    report = check_parity(build, (x, rng.normal(size=(16, 5))), 2, batch_size=16)
    assert report.ok, str(report)
    assert all(row.tells for row in report.rows if row.path.endswith("kernel"))
