"""Muon and Adafactor on shards: each matrix has an owner; the answer is one device's.

`tests/support/matrix_training.py` derives the bounds; `tests/processes/` has the same
table on several hosts.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support import matrix_training
from tests.support.matrix_training import (
    ACCUMULATE,
    BOUND_OF_ONE_STEP,
    CLIP,
    MODELS,
    OPTIMIZERS,
    RATE,
    ROWS,
    adafactor,
    compiled,
    data,
    muon,
    narrow_model,
    one_device,
    weights_after,
)
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    largest_distance,
    loss_and_gradients,
    make_strategy,
    train,
)
from tests.support.slow_rows import made
from tfdp._private.step_ops import operations_within
from tfdp.errors import ConfigurationError, NotFiniteWarning

pytestmark = pytest.mark.skipif(
    not hasattr(keras.optimizers, "Muon"), reason="newer than this Keras"
)


@pytest.fixture(autouse=True)
def _float32_again():
    yield
    matrix_training.of_float64(False)


def is_covering(name, stage, accumulate, clip, replicas, build):
    plain = (accumulate, clip, build) == ("each", "unclipped", "narrow")
    rich = (accumulate, clip, build) == ("of-4", "clipped", "narrow")
    return (plain, stage, replicas) == (True, 1, 3) or (
        (rich, stage, replicas) == (True, 3, 4) and name != "adafactor"
    )


CELLS = made(
    pytest.param(*cell, marks=() if is_covering(*cell) else pytest.mark.slow)
    for cell in itertools.product(
        OPTIMIZERS, range(4), ACCUMULATE, CLIP, (2, 3, 4), MODELS
    )
    if cell[-1] == "narrow" or cell[-2] == 4
)


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize("name, stage, accumulate, clip, replicas, build", CELLS)
def test_equals_one_device(name, stage, accumulate, clip, replicas, build):
    expected, start, bound = one_device(name, accumulate, clip, build)
    strategy = make_strategy(replicas, stage)
    model = compiled(name, accumulate, clip, build, strategy)
    assert {v.dtype for v in model.weights} == {"float64"}
    got = weights_after(model, data()[0], accumulate)
    assert largest_distance(got, expected) <= bound < 1e-12
    assert largest_distance(expected, start) > 1e-2
    if stage:
        held = held_by_each(model, replicas)
        owners = {v.value.owner for v in model.weights} - {None}
        assert owners and min(held) < max(held)
        # An owner that is idle has no state of a matrix.
        if (name, build, replicas) == ("muon", "two", 4):
            assert len(owners) == 2


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_step_is_within_the_derived_bound(stage):
    x, y = (array[:ROWS] for array in data())
    models = [
        compiled("muon", "each", "unclipped", "two", strategy)
        for strategy in (None, make_strategy(3, stage))
    ]
    for model in models:
        model.fit(x, y, batch_size=ROWS, verbose=0)
    kernels = [[w for w in m.get_weights() if w.ndim == 2] for m in models]
    assert BOUND_OF_ONE_STEP < 1e-12
    assert largest_distance(*kernels) <= BOUND_OF_ONE_STEP


def held_by_each(model, replicas):
    """The bytes of matrix state on each replica."""
    held = [0] * replicas
    for variable in model.optimizer.variables:
        if hasattr(variable.value, "shard"):
            for rank in range(replicas):
                shard = variable.value.shard(rank)
                held[rank] += int(tf.size(shard)) * shard.dtype.size
    return held


def traced(strategy, model):
    """The graph of one step."""
    x, y = classification_data(samples=ROWS)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    @tf.function(autograph=False)
    def step(batch):
        strategy.run(model.train_step, args=(batch,))

    return step.get_concrete_function(batch).graph


class Marked(keras.optimizers.Muon if hasattr(keras.optimizers, "Muon") else object):
    """Names its orthogonalized matrices in the graph."""

    def zeropower_via_newtonschulz5(self, x, steps):
        result = super().zeropower_via_newtonschulz5(x, steps)
        return tf.identity(result, name="newton_schulz_result")


def made_by_marked(replicas, stage, **options):
    """A strategy and a narrow model that `Marked` trains."""
    communication = {"engine": options.pop("engine")} if "engine" in options else {}
    strategy = make_strategy(replicas, stage, **communication)
    with strategy.scope():
        model = narrow_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(Marked(RATE, **options), loss, jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    return strategy, model


def bytes_of_kernels(model, replicas):
    """Of all, of all other weights, and of those that each replica owns."""
    kernels = [v for v in model.weights if v.path.endswith("kernel")]
    whole = 4 * sum(np.prod(v.shape) for v in kernels)
    owned = [0] * replicas
    for kernel in kernels:
        owner = getattr(kernel.value, "owner", None)
        if owner is not None:
            owned[owner] += 4 * np.prod(kernel.shape)
    return whole, 4 * model.count_params() - whole, owned


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_costs_are_those_of_the_formulas(stage):
    """Newton-Schulz once per matrix; by replica, bytes sent and state at rest."""
    replicas, matrices = 4, 5
    strategy, model = made_by_marked(replicas, stage)
    operations = traced(strategy, model).get_operations()
    calls = [op for op in operations if "newton_schulz_result" in op.name]
    assert len(calls) == (matrices if stage else matrices * replicas)
    traffic = strategy.extended.reducer.transport.traffic
    sent = [traffic.of(rank) for rank in range(replicas)]
    whole, rest, owned = bytes_of_kernels(model, replicas)
    total = 2 * (whole + rest) * (replicas - 1)
    if stage == 3:  # to the owners and back
        total += 2 * whole * (replicas - 1) / replicas
    assert total <= sum(sent) <= 1.03 * total
    if not stage:
        return
    for own, bytes_sent in zip(owned, sent, strict=True):
        of_kernels = whole + (replicas - 2) * own
        if stage == 3:
            of_kernels = 2 * whole - 2 * own / replicas
        of_rest = 2 * rest * (replicas - 1) / replicas
        assert bytes_sent <= 1.03 * (of_kernels + of_rest)
    # A momentum per matrix, at its owner; two slots per bias, in shards.
    biases = [v.value.layout for v in model.weights if "bias" in v.path]
    slots = 2 * 4 * sum(layout.shard_elements for layout in biases)
    for own, held in zip(owned, held_by_each(model, replicas), strict=True):
        assert held <= 1.03 * (own + slots)


@pytest.mark.parametrize("stage, most", [(1, 4), (2, 4), (3, 6)])
def test_collectives_send_no_more_than_the_docs_say(stage, most):
    """Their parts have one length, and here one replica owns more than half."""
    strategy, model = made_by_marked(4, stage, engine="tensorflow")
    traced(strategy, model)
    traffic = strategy.extended.reducer.transport.traffic
    whole, rest, _ = bytes_of_kernels(model, 4)
    sent = sum(traffic.of(rank) for rank in range(4))
    assert 2 * 3 * (whole + rest) < sent <= 1.03 * most * 3 * (whole + rest)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_orthogonalizes_once_for_all_batches(stage):
    """Not each batch's gradient by itself, as in deepspeedai/DeepSpeed#8443: weights
    were off by 1e-1 there, and `test_equals_one_device` has the numbers."""
    strategy, model = made_by_marked(3, stage, gradient_accumulation_steps=4)
    in_every_step = traced(strategy, model).get_operations()
    for operations, calls in (
        (in_every_step, 0),
        (operations_within(in_every_step), 5),  # in the conditional of the update
    ):
        names = [op.name for op in operations if "newton_schulz_result" in op.name]
        assert len(names) == calls


@pytest.mark.parametrize("stage", [1, 3])
def test_the_owner_orthogonalizes_and_no_replica_runs_adamw_instead(stage):
    """Newton-Schulz leaves singular values near 1: AdamW's update has others. In
    deepspeedai/DeepSpeed#8438 each matrix counted as a vector, and AdamW trained it."""
    start = dense_model()
    model, _ = train(
        make_strategy(3, stage),
        optimizer=lambda: muon(weight_decay=None),
        batch_size=96,
        epochs=1,
    )
    for before, after in zip(start.weights, model.weights, strict=True):
        if len(before.shape) == 2:
            change = (after.numpy() - before.numpy()) / RATE
            change /= 0.2 * np.sqrt(max(before.shape))
            values = np.linalg.svd(change, compute_uv=False)
            # The last layer's gradients add up to zero over the classes.
            least = values[-2] if before.shape[1] == 5 else values[-1]
            assert 0.6 < least and values[0] < 1.3


class Whitening(keras.optimizers.Optimizer):
    """Multiplies a matrix' gradient by a sum over its rows, kept by its own shape."""

    needs_whole_matrix = True

    def build(self, variables):
        super().build(variables)
        self.rows = [
            self.add_variable((v.shape[0],) * 2, name="rows")
            if len(v.shape) == 2
            else 0
            for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        rows = self.rows[self._get_variable_index(variable)]
        if len(variable.shape) == 2:
            assert rows.shape == (variable.shape[0],) * 2
            self.assign_add(rows, gradient @ tf.transpose(gradient))
            gradient = tf.convert_to_tensor(rows) @ gradient
        self.assign_sub(variable, learning_rate * gradient / tf.norm(gradient))

    def get_config(self):
        return super().get_config()


class Counting(Whitening):
    """Keeps state that no weight has to itself."""

    def build(self, variables):
        super().build(variables)
        self.largest = self.add_variable((), name="largest")

    def update_step(self, gradient, variable, learning_rate):
        self.assign(self.largest, tf.reduce_max(tf.abs(gradient)))
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_class_of_ones_own_says_that_it_needs_whole_matrices(stage):
    def make():
        return Whitening(RATE, use_ema=True, ema_momentum=0.5)

    plain, _ = train(make_strategy(3), optimizer=make)
    model, _ = train(make_strategy(3, stage), optimizer=make)
    assert largest_difference(model, plain) == 0.0
    pairs = zip(model.optimizer.variables, plain.optimizer.variables, strict=True)
    for got, expected in pairs:
        np.testing.assert_array_equal(got.numpy(), expected.numpy())
    rows = model.optimizer.rows[0].value
    assert [shard.shape.rank for shard in rows.values].count(2) == 1


def convolution_model():
    keras.utils.set_random_seed(3)
    image = [keras.layers.Reshape((4, 3, 1)), keras.layers.Conv2D(6, 2)]
    rest = [keras.layers.Flatten(), keras.layers.Dense(5)]
    return keras.Sequential([keras.Input((12,)), *image, *rest])


@pytest.mark.parametrize("stage", [1, 3])
def test_state_of_a_convolution_has_its_axes_at_its_owner(stage):
    """Adafactor's rows of a kernel with four axes have three."""
    plain, model = (
        train(make_strategy(3, s), convolution_model, adafactor)[0] for s in (0, stage)
    )
    assert largest_difference(model, plain) == 0.0
    assert largest_difference(model, convolution_model()) > 1e-2


class Scheduled(keras.optimizers.SGD):
    """Another optimizer that Keras' own does not tell from an elementwise one."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)


class OwnOptimizer(keras.Sequential):
    """Has an optimizer that Keras does not build."""

    def train_step(self, batch):
        loss, gradients = loss_and_gradients(self, batch)
        self.own.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def with_own_optimizer(stage, is_built):
    strategy = make_strategy(3, stage)
    with strategy.scope():
        model = OwnOptimizer([keras.Input((12,)), *dense_model().layers])
        model.own = muon()
        if is_built:
            model.own.build(model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
    model.fit(*classification_data(), batch_size=ROWS, shuffle=False, verbose=0)
    return model


def test_owners_are_known_before_gradients_are_reduced():
    plain = with_own_optimizer(0, is_built=False)
    for stage, is_built in ((1, False), (3, True)):
        model = with_own_optimizer(stage, is_built)
        assert largest_difference(model, plain) == 0.0
    with pytest.raises(ConfigurationError, match=r"(?s)not built.*build\(variables\)"):
        with_own_optimizer(3, is_built=False)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigurationError, match=r"(?s)largest.*add_variable_from_ref"):
        train(make_strategy(2, 1), optimizer=lambda: Counting(RATE))
    with pytest.raises(ConfigurationError, match="run_eagerly=False"):
        train(make_strategy(2, 3), optimizer=muon, run_eagerly=True)
    with pytest.raises(ConfigurationError, match="needs_whole_matrix = True"):
        train(make_strategy(2, 1), optimizer=lambda: Scheduled(RATE))


def remat_model():
    keras.utils.set_random_seed(3)
    normalize = tfdp.layers.SyncBatchNormalization()
    dense = [keras.layers.Dense(n, "tanh") for n in (33, 9)]
    hidden = [dense[0], normalize, dense[1], keras.layers.Dense(5)]
    return tfdp.remat(keras.Sequential([keras.Input((12,)), *hidden]))


def fit_with_everything(stage, offload):
    x, y = classification_data(samples=90)  # the last batch is short
    x = x.copy()
    x[30] = np.inf
    options = {"offload": offload, "shard_min_bytes": 0} if stage else {}
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], shard=stage, **options)
    with strategy.scope():
        model = remat_model()
        inner = muon(use_ema=True, ema_momentum=0.5, weight_decay=0.5, clipvalue=0.05)
        inner.exclude_from_weight_decay(var_names=["bias"])
        optimizer = tfdp.DistributedOptimizer(
            inner, accumulate_steps=2, dynamic_loss_scale=True
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
    guard = tfdp.callbacks.NaNGuard(on_nan="skip")
    options = {"batch_size": 24, "shuffle": False, "verbose": 0, "callbacks": [guard]}
    with pytest.warns(NotFiniteWarning, match="skipped"):
        model.fit(x, y, epochs=2, **options)
    return model


@functools.cache
def stage_0_with_everything():
    matrix_training.of_float64(True)
    return [v.numpy() for v in fit_with_everything(0, "none").weights]


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_with_everything_at_once_it_is_stage_0(stage, offload):
    """Offload, remat, SyncBatchNormalization, short batches, decay with exclusions, a
    moving average, NaNGuard with an infinity, accumulation and a loss scale."""
    expected = stage_0_with_everything()
    matrix_training.of_float64(True)
    model = fit_with_everything(stage, offload)
    got = [v.numpy() for v in model.weights]
    # At stage 3 batches are reduced one by one, and then added: other orders, in four
    # updates. What their roundings grow to later is less: `one_device` measures 6e-13
    # at most of eight steps.
    bound = 0.0 if stage == 1 else 4 * BOUND_OF_ONE_STEP
    assert largest_distance(got, expected) <= bound < 2e-12
    assert largest_difference(model, remat_model()) > 1e-2
    if offload == "optimizer":
        momentum = model.optimizer.inner_optimizer.momentums[0].value
        assert all("CPU:0" in shard.device for shard in momentum.values)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_optimizer_that_is_compiled_last_decides_who_owns(stage):
    x, y = classification_data()
    options = {"batch_size": ROWS, "shuffle": False, "verbose": 0}

    def fit(stage):
        strategy, made = make_strategy(2, stage), []
        with strategy.scope():
            model = dense_model()
        for make in (keras.optimizers.Adam, muon, keras.optimizers.Adam):
            with strategy.scope():
                made.append(make())
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(made[-1], loss, jit_compile=False)
            model.fit(x, y, **options)
        return model, made

    (model, made), (expected, _) = fit(stage), fit(0)
    assert largest_difference(model, expected) == 0.0
    assert {v.value.owner for v in model.weights} == {None}
    model.compile(made[1], model.loss, jit_compile=False)
    with pytest.raises(ConfigurationError, match="was built last"):
        model.fit(x, y, **options)


def state(model):
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


def resumed(strategy, path):
    with strategy.scope():
        model = keras.models.load_model(path)
        # As compiled before; XLA has no exchanges.
        model.jit_compile = False
    return model


def test_files_pass_between_stages_replicas_and_plain_keras(tmp_path):
    """Saved at stage 3 on 4 replicas, resumed at stage 1 on 3, then by plain Keras."""
    matrix_training.of_float64(True)
    model, _ = train(make_strategy(4, 3), optimizer=muon, batch_size=ROWS)
    path, saved = str(tmp_path / "model.keras"), state(model)
    options = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    model.save(path)
    rows = classification_data(seed=8)
    three, of_stage_0 = (resumed(make_strategy(3, stage), path) for stage in (1, 0))
    plain = tf.distribute.get_strategy()
    one = resumed(plain, path)
    for each in (three, of_stage_0, one):
        assert largest_distance(state(each), saved) == 0.0
        each.fit(*rows, **options)
    # The same order of sums; on one device another one, in three updates.
    assert largest_distance(state(three), state(of_stage_0)) == 0.0
    assert largest_distance(state(three), state(one)) <= 3 * BOUND_OF_ONE_STEP < 2e-12
    three.save(path)
    one = resumed(plain, path)
    # Keras' own, which never saw a file of tfdp's.
    by_hand, _ = train(None, optimizer=muon, batch_size=ROWS, epochs=1)
    variables = [*by_hand.weights, *by_hand.optimizer.variables]
    for variable, value in zip(variables, state(three), strict=True):
        variable.assign(value)
    for each in (one, by_hand):
        assert largest_distance(state(each), state(three)) == 0.0
        each.fit(*rows, **options)
    assert largest_distance(state(one), state(by_hand)) == 0.0
    assert largest_difference(one, three) > 1e-3


def test_diloco_with_muon_inside_is_the_rounds_of_its_equations():
    """MuLoCo (arXiv 2505.23725) on two simulated hosts of two replicas: each trains as
    one device on its rows, and NumPy makes the outer step of `DiLoCo`'s docstring."""
    matrix_training.of_float64(True)
    sync = tfdp.sync.DiLoCo(every=3)
    strategy = make_strategy(4, hierarchy=(2, 2))
    with strategy.scope():
        model = dense_model()
        optimizer = tfdp.DistributedOptimizer(muon(), sync=sync)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
    x, y = data()
    start, updates = model.get_weights(), 6
    model.fit(x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    hosts = [dense_model() for _ in range(2)]
    for host in hosts:
        host.compile(muon(), loss, jit_compile=False)
    outer, momentum = start, [np.zeros_like(w) for w in start]
    for update in range(updates):
        begin = update * ROWS % len(x)
        for place, host in enumerate(hosts):
            own = slice(begin + place * ROWS // 2, begin + (place + 1) * ROWS // 2)
            host.train_on_batch(x[own], y[own])
        if (update + 1) % sync.every:
            continue
        local = zip(*(host.get_weights() for host in hosts), strict=True)
        mean = [w - (a + b) / 2 for w, (a, b) in zip(outer, local, strict=True)]
        mu, rate = sync.outer_momentum, sync.outer_learning_rate
        momentum = [mu * b + d for b, d in zip(momentum, mean, strict=True)]
        outer = [
            w - rate * (d + mu * b)
            for w, d, b in zip(outer, mean, momentum, strict=True)
        ]
        for host in hosts:
            host.set_weights(outer)
    # An outer step multiplies a change by at most 0.7 * 1.9 / (1 - 0.9) = 14.
    bound = 14 * updates * BOUND_OF_ONE_STEP
    assert largest_distance(model.get_weights(), outer) <= bound < 1e-10
    assert largest_distance(outer, start) > 1e-2


def test_diloco_with_muon_inside_is_refused_with_shards():
    def make():
        sync = tfdp.sync.DiLoCo(every=4, across="replicas")
        return tfdp.DistributedOptimizer(muon(), sync=sync)

    with pytest.raises(ConfigurationError, match="shard"):
        train(make_strategy(2, 1), optimizer=make)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("make", [adafactor, muon])
def test_a_new_scaler_around_a_built_optimizer(make, shard):
    """As Keras makes one when a program compiles twice under mixed_float16. In float32,
    where rounding cannot skip a step on one side only: four steps, each with 2^29 times
    the rounding of the float64 that the bound is for."""

    def trained(strategy):
        with strategy.scope():
            model = dense_model()
            optimizer = make()
            for _ in range(2):
                scaler = keras.optimizers.LossScaleOptimizer(optimizer)
                model.compile(scaler, CROSS_ENTROPY, jit_compile=False)
                model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert int(optimizer.iterations) == 4
        return model

    x, y = classification_data(samples=16)
    one = trained(tf.distribute.get_strategy())
    other = trained(sharding(shard))
    assert largest_difference(one, other) <= 4 * 2**29 * BOUND_OF_ONE_STEP


def sharding(shard):
    devices = ["CPU:0", "CPU:1"]
    return tfdp.DataParallelStrategy(devices, shard=shard, shard_min_bytes=0)


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
