"""Compressed gradients under strategies: methods, engines, numbers of replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.compression_table import IDENTITIES, LOSSY, METHODS
from tests.support.parity import classification_data, dense_model, rounding_bound
from tfdp.compression import FP8, Cast, Int8, PowerSGD, RandomK, SignSGD, TopK
from tfdp.errors import ConfigurationError

#: Replicas, engine and hierarchy; of simulated hosts the sums within are exact.
LAYOUTS = {
    "2-in_process": (2, "in_process", "auto"),
    "3-in_process": (3, "in_process", "auto"),
    "2x2-in_process": (4, "in_process", (2, 2)),
    "2-tensorflow": (2, "tensorflow", "auto"),
    "3-tensorflow": (3, "tensorflow", "auto"),
    "2x2-tensorflow": (4, "tensorflow", (2, 2)),
}
SHAPES = [(24, 10), (3, 3, 4, 6)]
STEPS = 4


def strategy_for(method, layout="2-in_process", **buckets):
    replicas, engine, hierarchy = LAYOUTS[layout]
    across = "hosts" if hierarchy != "auto" else "replicas"
    communication = tfdp.Communication(
        **buckets,
        engine=engine,
        hierarchy=hierarchy,
        compression=method,
        compression_across=across if method is not None else "hosts",
    )
    devices = [f"CPU:{n}" for n in range(replicas)]
    return tfdp.DataParallelStrategy(devices, communication=communication)


class Linear:
    """sum(w * x), whose gradient is x whatever w is: what arrives can be counted.

    Args:
      strategy: of the replicas.
      optimizer: made under it; SGD of rate 1 by default.
    """

    def __init__(self, strategy, optimizer=None):
        self.strategy = strategy
        with strategy.scope():
            self.weights = [keras.Variable(tf.zeros(s), name="w") for s in SHAPES]
            make = optimizer or (lambda: keras.optimizers.SGD(1.0))
            self.optimizer = make()
            self.optimizer.build(self.weights)
        self._step = tf.function(self._run)

    def _run(self, inputs):
        def replica(parts):
            self.optimizer.apply(list(parts), self.weights)

        self.strategy.run(replica, (inputs,))

    def step(self, gradients):
        """One update by each replica's gradients, [replicas][variables]."""
        inputs = self.strategy.experimental_distribute_values_from_function(
            lambda context: [
                tf.constant(g) for g in gradients[context.replica_id_in_sync_group]
            ]
        )
        self._step(inputs)

    def values(self):
        """By variable; every replica's copy has the same bits."""
        found = []
        for weight in self.weights:
            copies = [copy.numpy() for copy in weight.value.values]
            for copy in copies[1:]:
                np.testing.assert_array_equal(copies[0], copy)
            found.append(copies[0])
        return found

    def residuals(self):
        """By variable, those of all who send, stacked."""
        return [
            np.stack([copy.numpy() for copy in kept.residual.copies])
            for kept in self.optimizer.compression_state.of_variables.values()
        ]


def draw(replicas, steps=STEPS, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [[rng.standard_normal(s).astype("float32") for s in SHAPES] for _ in range(n)]
        for n in [replicas] * steps
    ]


def bound(replicas, steps=STEPS):
    # In each step a number is added and taken away once or twice by each replica, and
    # once by the update; products of matrices are sums of up to 36. All are below
    # 8 * replicas * steps.
    return steps * (4 * replicas + 2 + 72) * 8 * replicas * steps * 2.0**-24


@pytest.mark.worth_seconds(14)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_what_arrives_and_what_is_left_are_the_gradients(method, layout):
    model = Linear(strategy_for(method, layout))
    replicas = LAYOUTS[layout][0]
    gradients = draw(replicas)
    for of_step in gradients:
        model.step(of_step)
    left = model.residuals()
    for place, value in enumerate(model.values()):
        total = sum(
            of_replica[place].astype(float)
            for of_step in gradients
            for of_replica in of_step
        )
        arrived = -value.astype(float)
        np.testing.assert_allclose(
            arrived + left[place].sum(axis=0), total, rtol=0, atol=bound(replicas)
        )
        if method in IDENTITIES.values():
            np.testing.assert_allclose(arrived, total, rtol=0, atol=bound(replicas))
        else:
            assert np.abs(left[place]).max() > 1e-4


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("layout", ["2-in_process", "2x2-in_process"])
@pytest.mark.parametrize(
    "method",
    [Int8(32, min_bytes=0), FP8(min_bytes=0), TopK(0.1, min_bytes=0)],
    ids=["int8", "fp8", "top-k"],
)
def test_each_variable_by_itself_is_the_same_to_the_bit(method, layout):
    """Buckets are made one after the other; no block or scale belongs to two of them.

    Of more than two who send, who rounds a sum again depends on the bucket.
    """
    found = []
    for options in {}, {"bucket_bytes": 1, "first_bucket_bytes": 1}:
        model = Linear(strategy_for(method, layout, **options))
        for of_step in draw(LAYOUTS[layout][0], steps=2):
            model.step(of_step)
        found.append([*model.values(), *model.residuals()])
    for together, alone in zip(*found, strict=True):
        np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("method", IDENTITIES.values(), ids=IDENTITIES)
def test_fit_with_nothing_lost_is_plain_training(method):
    """Uneven batches, momentum and clipping: all of it sees the whole sums."""

    def train(used):
        keras.utils.set_random_seed(1)
        strategy = strategy_for(used)
        with strategy.scope():
            model = dense_model()
            model.compile(
                keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                steps_per_execution=3,
            )
        x, y = classification_data(samples=53)
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
        return model

    plain, compressed = train(None), train(method)
    limit = rounding_bound(
        plain, steps=8, batch_size=16, gradient_bound=3.0, learning_rate=0.5
    )
    for one, other in zip(plain.weights, compressed.weights, strict=True):
        difference = np.abs(one.numpy() - other.numpy()).max()
        assert difference <= 10 * limit  # products of matrices in the place of sums


@pytest.mark.parametrize("layout", ["3-in_process", "2x2-in_process"])
def test_residuals_are_dealt_out_to_another_number_of_replicas(layout, tmp_path):
    """What two had left, three send; and what these have left, two hosts of two."""
    method = SignSGD(32, min_bytes=0)
    first = Linear(strategy_for(method, "2-in_process"))
    for of_step in draw(2):
        first.step(of_step)
    path = tf.train.Checkpoint(optimizer=first.optimizer).save(str(tmp_path / "c"))
    then = Linear(strategy_for(method, layout))
    # An optimizer's checkpoint has the weights, too.
    tf.train.Checkpoint(optimizer=then.optimizer).restore(path)
    then.step([[np.zeros(s, "float32") for s in SHAPES]] * LAYOUTS[layout][0])
    for place, before in enumerate(first.residuals()):
        arrived = first.values()[place] - then.values()[place]
        now = then.residuals()[place].sum(axis=0) + arrived
        np.testing.assert_allclose(now, before.sum(axis=0), rtol=0, atol=bound(4))
        assert np.abs(before.sum(axis=0)).max() > 1.0


def test_one_replica_sends_at_once_what_two_had_left(tmp_path):
    method = SignSGD(32, min_bytes=0)
    first = Linear(strategy_for(method))
    for of_step in draw(2):
        first.step(of_step)
    path = tf.train.Checkpoint(optimizer=first.optimizer).save(str(tmp_path / "c"))
    communication = tfdp.Communication(
        compression=method, compression_across="replicas"
    )
    then = Linear(tfdp.DataParallelStrategy(["CPU:0"], communication=communication))
    tf.train.Checkpoint(optimizer=then.optimizer).restore(path)
    before = first.values()
    (own,) = draw(1, steps=1)
    then.step(own)
    for place, weight in enumerate(then.weights):
        moved = before[place] - weight.numpy()
        expected = first.residuals()[place].sum(axis=0) + own[0][place]
        np.testing.assert_allclose(moved, expected, rtol=0, atol=bound(2))
        assert not then.residuals()[place].any()


@pytest.mark.parametrize(
    "method",
    [
        TopK(0.1, momentum_correction=0.5, min_bytes=0),
        PowerSGD(2, start_step=1, min_compression_rate=1, min_bytes=0),
        Int8(32, min_bytes=0),
    ],
    ids=["top-k", "power-sgd", "int8"],
)
def test_a_checkpoint_resumes_bit_for_bit(method, tmp_path):
    gradients = draw(2, steps=6)
    whole = Linear(strategy_for(method))
    for number, of_step in enumerate(gradients):
        if number == 3:
            checkpoint = tf.train.Checkpoint(o=whole.optimizer, w=whole.weights)
            path = checkpoint.save(str(tmp_path / "c"))
        whole.step(of_step)
    then = Linear(strategy_for(method))
    status = tf.train.Checkpoint(o=then.optimizer, w=then.weights).restore(path)
    for of_step in gradients[3:]:
        then.step(of_step)
    status.assert_consumed()
    for one, other in zip(whole.values(), then.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(whole.residuals(), then.residuals(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("method", LOSSY.values(), ids=LOSSY)
def test_an_infinity_is_seen_by_all_and_kept_by_none(method):
    """A loss scaler leaves the step out, and halves; what was left stays as it was."""
    model = Linear(
        strategy_for(method),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=4.0
        ),
    )
    good = draw(2)
    scale = [[[4 * g for g in of_replica] for of_replica in s] for s in good]
    model.step(scale[0])
    before, left = model.values(), model.residuals()
    scale[1][1][0][3, 4] = np.inf
    model.step(scale[1])
    for one, other in zip(before, model.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(left, model.residuals(), strict=True):
        np.testing.assert_array_equal(one, other)
    scales = [copy.numpy() for copy in model.optimizer.dynamic_scale.value.values]
    assert scales == [2.0, 2.0]
    # The scale is another one now; what was left is of the size it was.
    model.step([[2 * g for g in of_replica] for of_replica in good[2]])
    for place, value in enumerate(model.values()):
        total = sum(good[s][r][place].astype(float) for s in (0, 2) for r in (0, 1))
        arrived = -value + model.residuals()[place].sum(axis=0)
        np.testing.assert_allclose(arrived, total, rtol=0, atol=bound(2, 3))


def test_without_a_loss_scaler_an_infinity_spoils_all_replicas_alike():
    model = Linear(strategy_for(TopK(0.1, min_bytes=0)))
    (gradients,) = draw(2, steps=1)
    gradients[1][0][3, 4] = np.nan
    model.step(gradients)
    assert np.isnan(model.values()[0]).all()


def test_small_excluded_and_other_variables_are_sent_as_they_are():
    method = SignSGD(exclude=["embedding"])
    assert method.takes("dense/kernel", [100, 20], "float32")
    assert not method.takes("dense/kernel", [10, 20], "float32")  # small
    assert not method.takes("embedding/table", [100, 20], "float32")
    assert not method.takes("dense/bias", [2000], "float32")
    assert not method.takes("dense/kernel", [100, 20], "float64")
    assert not method.takes("dense/kernel", [None, 20], "float32")
    assert SignSGD(one_dimensional=True).takes("dense/bias", [2000], "float32")
    model = Linear(strategy_for(SignSGD()))  # 240 and 216 numbers
    (gradients,) = draw(2, steps=1)
    model.step(gradients)
    for place, value in enumerate(model.values()):
        np.testing.assert_array_equal(-value, gradients[0][place] + gradients[1][place])


def test_accumulation_sends_once_for_all_micro_steps():
    method = SignSGD(32, min_bytes=0)
    gradients = draw(2)
    parts = Linear(
        strategy_for(method),
        lambda: tfdp.DistributedOptimizer(
            keras.optimizers.SGD(1.0), accumulate_steps=2
        ),
    )
    for of_step in gradients:
        parts.step(of_step)
    assert int(parts.optimizer.compression_state.steps.copies[0]) == STEPS // 2
    for place, value in enumerate(parts.values()):
        total = sum(
            of_replica[place].astype(float)
            for of_step in gradients
            for of_replica in of_step
        )
        # What is accumulated is the mean of micro-steps of one weight.
        arrived = -value + parts.residuals()[place].sum(axis=0)
        np.testing.assert_allclose(arrived, total / 2, rtol=0, atol=bound(2))


def test_models_are_saved_without_what_is_left(tmp_path):
    strategy = strategy_for(Int8(32, min_bytes=0))
    with strategy.scope():
        model = dense_model()
        model.compile("adam", "mse")
    x, y = classification_data(samples=32)
    model.fit(x, np.eye(5)[y % 5][:, : model.output_shape[-1]], verbose=0)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert len(plain.optimizer.variables) == len(model.optimizer.variables)
    for one, other in zip(
        model.optimizer.variables, plain.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_eager_steps_are_refused():
    strategy = strategy_for(Int8())
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "mse", run_eagerly=True)
    x, _ = classification_data(samples=8)
    with pytest.raises(ConfigurationError, match="run_eagerly=False"):
        model.fit(x, np.zeros([8, model.output_shape[-1]]), verbose=0)


@pytest.mark.parametrize(
    "optimizer", [lambda: keras.optimizers.SGD(1.0, momentum=0.9), "adam"]
)
def test_momentum_twice_is_refused(optimizer):
    make = optimizer if callable(optimizer) else keras.optimizers.Adam
    method = TopK(0.1, momentum_correction=0.9, min_bytes=0)
    model = Linear(strategy_for(method), make)
    with pytest.raises(ConfigurationError, match="momentum_correction"):
        model.step(draw(2)[0])


def loss_scaled(scale=1.0):
    return lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=scale
    )


OVERFLOWS = {
    "value-and-residual": (FP8(scale=1.0, min_bytes=0), "2-in_process", 1000.0),
    "float16": (Cast("float16", error_feedback=True, min_bytes=0), "2-in_process", 1e5),
    "sum-of-a-host": (
        Cast("float16", error_feedback=True, min_bytes=0),
        "2x2-in_process",
        4e4,
    ),
    "sum": (Int8(32, min_bytes=0), "2-in_process", 2e38),
    "mean": (SignSGD(32, min_bytes=0), "2-in_process", 3e37),
}


@pytest.mark.parametrize("method, layout, much", OVERFLOWS.values(), ids=OVERFLOWS)
def test_an_overflow_on_the_way_is_seen_and_forgotten(method, layout, much):
    """No gradient is infinite, but what is made of them is: the step is left out."""
    replicas = LAYOUTS[layout][0]
    model = Linear(strategy_for(method, layout), loss_scaled())
    gradients = draw(replicas)
    model.step(gradients[0])
    before, left = model.values(), model.residuals()
    model.step([[np.full(s, much, "float32") for s in SHAPES]] * replicas)
    for one, other in zip(before, model.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(left, model.residuals(), strict=True):
        np.testing.assert_array_equal(one, other)
    model.step([[g / 2 for g in of_replica] for of_replica in gradients[1]])
    assert all(np.isfinite(value).all() for value in model.values())
    moved = [np.abs(v - b).max() for v, b in zip(model.values(), before, strict=True)]
    assert min(moved) > 0.1


@pytest.mark.parametrize("method", [TopK(0.1), Int8()], ids=["top-k", "int8"])
def test_an_infinity_beside_the_compressed_ones_is_seen(method):
    """The kernel is taken, the second variable is too small."""
    model = Linear(strategy_for(method), loss_scaled())
    with model.strategy.scope():
        model.weights = [
            keras.Variable(tf.zeros([64, 64])),
            keras.Variable(tf.zeros([8])),
        ]
        model.optimizer = loss_scaled()()
        model.optimizer.build(model.weights)
    rng = np.random.default_rng(0)

    def one_step(last):
        parts = [
            [rng.standard_normal((64, 64)).astype("float32"), np.ones(8, "float32")]
            for _ in range(2)
        ]
        parts[0][1][3] = last
        model.step(parts)

    one_step(1.0)
    left = model.residuals()
    one_step(np.inf)
    np.testing.assert_array_equal(left[0], model.residuals()[0])


@pytest.mark.parametrize("replicas", [3, 4])
def test_a_scale_that_all_agree_on_holds_the_sum(replicas):
    """Each rounds up before the sum is rounded again."""
    devices = [f"CPU:{n}" for n in range(replicas)]
    for form in ("e4m3", "e5m2"):
        communication = tfdp.Communication(
            compression=FP8(form, min_bytes=0), compression_across="replicas"
        )
        strategy = tfdp.DataParallelStrategy(devices, communication=communication)
        model = Linear(strategy)
        for size in (1.07, 1.14, 1.39, 1.9):
            same = [np.full(s, size, "float32") for s in SHAPES]
            model.step([same] * replicas)
        assert all(np.isfinite(value).all() for value in model.values())


def test_signs_of_an_odd_size_have_the_size_of_the_numbers():
    """10 x 33 numbers are no whole block: the rest is not taken for smaller."""
    model = Linear(strategy_for(SignSGD(min_bytes=0, error_feedback=False)))
    ones = [np.ones(shape, "float32") for shape in SHAPES]
    model.step([ones, ones])
    for value in model.values():
        np.testing.assert_allclose(value, -2.0, rtol=1024 * 2.0**-24)


def test_what_is_left_belongs_to_a_variable_and_not_to_an_order(tmp_path):
    """Only the second variable is trained at first."""
    method = SignSGD(32, min_bytes=0)

    def only_second(model):
        model._step = tf.function(
            lambda inputs: model.strategy.run(
                lambda parts: model.optimizer.apply([parts[1]], [model.weights[1]]),
                (inputs,),
            )
        )
        return model

    first = only_second(Linear(strategy_for(method)))
    first.step(draw(2)[0])
    path = tf.train.Checkpoint(o=first.optimizer).save(str(tmp_path / "c"))
    then = only_second(Linear(strategy_for(method)))
    tf.train.Checkpoint(o=then.optimizer).restore(path)
    both = Linear(strategy_for(method))
    tf.train.Checkpoint(o=both.optimizer).restore(path)
    nothing = [[np.zeros(s, "float32") for s in SHAPES]] * 2
    both.step(nothing)
    assert not both.residuals()[0].any()
    assert both.residuals()[1].any()


@pytest.mark.parametrize("wrap", [None, "loss-scale"])
def test_an_optimizer_that_its_first_step_builds(wrap):
    """A loop of one's own, as most are written: nobody calls `build`."""
    model = Linear(strategy_for(RandomK(1.0, min_bytes=0)))
    with model.strategy.scope():
        model.optimizer = keras.optimizers.SGD(1.0) if wrap is None else loss_scaled()()
    gradients = draw(2, steps=2)
    for of_step in gradients:
        model.step(of_step)
    for place, value in enumerate(model.values()):
        total = sum(of_replica[place] for s in gradients for of_replica in s)
        np.testing.assert_allclose(-value, total, rtol=0, atol=bound(2))


@pytest.mark.parametrize(
    "method, most_bytes",
    [
        # A block of 256 numbers is 260 bytes of 1024.
        (Int8(), (2 << 20) * 1024 / 260),
        # 2 MiB of signs would be of 62 MiB.
        (SignSGD(), 25 << 20),
    ],
)
def test_messages_are_as_long_as_pays_and_buckets_as_is_allowed(method, most_bytes):
    sums = strategy_for(method).extended.reducer.compressed
    assert abs(sums._bucket_bytes([(4096, 4096)]) - most_bytes) <= 1
    few = strategy_for(method, bucket_bytes=5 << 20).extended.reducer.compressed
    assert few._bucket_bytes([(4096, 4096)]) == 5 << 20
