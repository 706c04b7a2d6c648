"""Weights are updated in packs: the same bits as weight by weight.

Equal bits, without a tolerance: the update of a number does not depend on where it is
stored, so a flat variable gives what each weight gave.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.step import packed_updates
from tfdp.step.packed_updates import packs_of

layers, optimizers = keras.layers, keras.optimizers


def adam(**options):
    return optimizers.Adam(0.01, **options)


def without_biases(**options):
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1, **options)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "adam": adam,
    "amsgrad": lambda: adam(amsgrad=True),
    "decay": without_biases,
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "lion": lambda: optimizers.Lion(0.001),
    "clipvalue": lambda: adam(clipvalue=0.01),
    "clipnorm": lambda: adam(clipnorm=0.1),
    "global_clipnorm": lambda: without_biases(global_clipnorm=0.1),
    "averages": lambda: adam(use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: adam(gradient_accumulation_steps=2),
    "scaling": lambda: optimizers.LossScaleOptimizer(adam()),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.1, 5)),
}


def network(constraint=None):
    """Twelve weights, of 175 numbers at most; two of them are not trained."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(25, "relu", name="wide"),
            layers.BatchNormalization(),
            layers.Dense(7, "tanh", kernel_constraint=constraint),
            layers.LayerNormalization(),
            layers.Dense(2),
        ]
    )


def drawn(rows=15):
    rng = np.random.default_rng(1)
    return rng.normal(size=(rows, 6)).astype("f"), rng.normal(size=(rows, 2)).astype(
        "f"
    )


def fitted(monkeypatch, optimizer, packed, strategy=None, build=network, **options):
    """A model after four steps, the last one of three rows."""
    largest = packed_updates.LARGEST_BYTES if packed else 0
    with monkeypatch.context() as changed:
        changed.setattr(packed_updates, "LARGEST_BYTES", largest)
        keras.utils.set_random_seed(0)
        with (strategy or make_strategy(2)).scope():
            model = build()
            model.compile(optimizer(), "mse", **options)
        x, y = drawn()
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert bool(packs_of(leaf_of(model.optimizer)).packs) == packed
    return model


def leaf_of(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def values(model):
    state = [*model.weights, *model.optimizer.variables]
    return {f"{place} {one.path}": one.numpy() for place, one in enumerate(state)}


def check_same_bits(model, reference):
    of_reference = list(values(reference).values())
    for (name, value), expected in zip(
        values(model).items(), of_reference, strict=True
    ):
        np.testing.assert_array_equal(value, expected, err_msg=name)
    for one in (*model.weights, *model.optimizer.variables):
        first, *others = [each.numpy() for each in one.value.values]
        for other in others:
            np.testing.assert_array_equal(first, other, err_msg=one.path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_as_weight_by_weight(name, monkeypatch):
    make = OPTIMIZERS[name]
    reference = fitted(monkeypatch, make, packed=False)
    check_same_bits(fitted(monkeypatch, make, packed=True), reference)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_with_shards_of_the_large_weights(shard, monkeypatch):
    def trained(packed):
        strategy = tfdp.DataParallelStrategy(
            ["CPU:0", "CPU:1"], shard=shard, shard_min_bytes=650
        )
        return fitted(monkeypatch, without_biases, packed, strategy)

    model, reference = trained(True), trained(False)
    (pack,) = packs_of(model.optimizer).packs
    assert len(pack.weights) == len(model.trainable_weights) - 1
    for own, other in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())


def test_with_float16_and_constraints(monkeypatch):
    def build():
        policy = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        try:
            return network(constraint=keras.constraints.UnitNorm())
        finally:
            keras.mixed_precision.set_dtype_policy(policy)

    reference = fitted(monkeypatch, adam, packed=False, build=build)
    model = fitted(monkeypatch, adam, packed=True, build=build)
    check_same_bits(model, reference)


def test_in_eager_steps_after_others(monkeypatch):
    def trained(packed):
        model = fitted(monkeypatch, adam, packed)
        model.compile(model.optimizer, "mse", run_eagerly=True)
        model.fit(*drawn(), batch_size=4, shuffle=False, verbose=0)
        return model

    check_same_bits(trained(True), trained(False))


def test_a_weight_that_is_no_longer_trained(monkeypatch):
    """Then the others are updated weight by weight, in the packed state."""

    def trained(packed):
        model = fitted(monkeypatch, adam, packed)
        model.get_layer("wide").trainable = False
        model.compile(model.optimizer, "mse")
        model.fit(*drawn(), batch_size=4, shuffle=False, verbose=0)
        return model

    check_same_bits(trained(True), trained(False))


def test_rows_of_a_table_that_had_dense_gradients(monkeypatch):
    def trained(packed):
        def build():
            words = keras.Input((3,), dtype="int32")
            rows = layers.Embedding(9, 4)(words)
            rows = layers.Dense(5)(layers.Flatten()(rows))
            return keras.Model(
                words, layers.Dense(2)(layers.LayerNormalization()(rows))
            )

        largest = packed_updates.LARGEST_BYTES if packed else 0
        monkeypatch.setattr(packed_updates, "LARGEST_BYTES", largest)
        keras.utils.set_random_seed(0)
        strategy = make_strategy(2)
        with strategy.scope():
            model, optimizer = build(), adam()
            optimizer.build(model.trainable_variables)

        @tf.function
        def step(words, is_dense):
            def own_step(words):
                with tf.GradientTape() as tape:
                    loss = tfdp.losses.local_mean(model(words) ** 2)
                own = tape.gradient(loss, model.trainable_variables)
                if is_dense:
                    own = [tf.convert_to_tensor(one) * 1.0 for one in own]
                optimizer.apply(own, model.trainable_variables)

            strategy.run(own_step, args=(words,))

        words = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                [[1, 1, 4 + context.replica_id_in_sync_group], [0, 7, 8]]
            )
        )
        for is_dense in (True, False, True):
            step(words, is_dense)
        assert bool(packs_of(optimizer).packs) == packed
        return [one.numpy() for one in (*model.weights, *optimizer.variables)]

    for own, other in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.filterwarnings("ignore::tfdp.errors.NotFiniteWarning")
def test_skipped_steps_restore_the_state(monkeypatch):
    """A step whose gradients are not finite changes nothing, in each accumulation."""
    x, y = drawn(12)
    broken = x.copy()
    broken[5] = np.nan

    def trained(packed, x, y, **options):
        largest = packed_updates.LARGEST_BYTES if packed else 0
        monkeypatch.setattr(packed_updates, "LARGEST_BYTES", largest)
        keras.utils.set_random_seed(0)
        with make_strategy(2).scope():
            model = network()
            model.compile(adam(**options), "mse")
        guard = tfdp.callbacks.NaNGuard(on_nan="skip")
        model.fit(x, y, 4, shuffle=False, verbose=0, callbacks=[guard])
        return model

    without = np.r_[0:4, 8:12]
    reference = trained(False, x[without], y[without])
    model = trained(True, broken, y)
    for own, other in zip(
        (*model.trainable_weights, *leaf_of(model.optimizer).variables[2:]),
        (*reference.trainable_weights, *leaf_of(reference.optimizer).variables[2:]),
        strict=True,
    ):
        np.testing.assert_array_equal(own.numpy(), other.numpy(), err_msg=own.path)


def test_files_and_names_are_those_of_keras(monkeypatch, tmp_path):
    model = fitted(monkeypatch, adam, packed=True)
    reference = fitted(monkeypatch, adam, packed=False)
    weights, state = model.trainable_weights, model.optimizer.variables[2:]
    for place, own in enumerate(state):
        kind, weight = ("momentum", "velocity")[place % 2], weights[place // 2]
        assert own.path.endswith(f"/{weight.path.replace('/', '_')}_{kind}")
        assert (own.shape, own.dtype) == (weight.shape, weight.dtype)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    for own, other in zip(
        model.optimizer.variables, plain.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(own.numpy(), other.numpy())
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    expected = values(model)
    for one in (*model.weights, *model.optimizer.variables):
        one.assign(np.zeros(one.shape, one.dtype))
    tf.train.Checkpoint(model=model).restore(path).assert_consumed()
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    model.fit(*drawn(), batch_size=4, shuffle=False, verbose=0)
    reference.fit(*drawn(), batch_size=4, shuffle=False, verbose=0)
    check_same_bits(model, reference)
    monkeypatch.setattr(packed_updates, "LARGEST_BYTES", 0)
    with make_strategy(2).scope():
        other = keras.models.load_model(tmp_path / "model.keras")
    tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
    for own, value in zip(values(other).values(), expected.values(), strict=True):
        np.testing.assert_array_equal(own, value)


def test_state_in_functions(monkeypatch):
    model = fitted(monkeypatch, adam, packed=True)
    strategy, slot = model.distribute_strategy, model.optimizer.variables[2]

    @tf.function
    def outside():
        slot.assign(slot * 0 + 7)
        return slot.value + 1

    @tf.function
    def inside():
        def double():
            slot.assign_add(slot)
            return 2 * slot.value[0]

        return strategy.run(double)

    np.testing.assert_array_equal(outside(), np.full(slot.shape, 8))
    for of_replica in strategy.experimental_local_results(inside()):
        np.testing.assert_array_equal(of_replica, np.full(slot.shape[1:], 28))
    for own in slot.value.values:
        np.testing.assert_array_equal(np.asarray(own), np.full(slot.shape, 14))


def test_saved_models_have_the_state(monkeypatch, tmp_path):
    model = fitted(monkeypatch, adam, packed=True)
    tf.saved_model.save(model, tmp_path / "saved")
    loaded = tf.saved_model.load(tmp_path / "saved").optimizer._variables
    for own, other in zip(model.optimizer.variables, loaded, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy(), err_msg=own.path)


def test_copies_are_read_as_variables(monkeypatch):
    model = fitted(monkeypatch, adam, packed=True)
    slot = model.optimizer.variables[2]
    copy, value = slot.value.values[1], slot.numpy()
    np.testing.assert_array_equal(list(copy), value)
    np.testing.assert_array_equal(copy.sparse_read([1, 0]), value[[1, 0]])
    np.testing.assert_array_equal(copy.gather_nd([[1, 2]]), value[[1], [2]])
    rows = tf.IndexedSlices(tf.zeros([1, 25]), tf.constant([0]))
    copy.scatter_max(rows)
    np.testing.assert_array_equal(copy[0], np.maximum(value[0], 0))
    copy.scatter_min(rows)
    np.testing.assert_array_equal(copy[0], np.zeros(25))
    np.testing.assert_array_equal(copy[1:], value[1:])


class OwnUpdate(optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / 2, variable, learning_rate)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optimizers.RMSprop(0.01),  # its last bits depend on the place
        lambda: optimizers.SGD(0.01),  # without state
        lambda: OwnUpdate(0.01),
        lambda: tfdp.optimizers.LAMB(0.01),
    ],
)
def test_others_are_updated_weight_by_weight(optimizer, monkeypatch):
    fitted_model = None
    with pytest.raises(AssertionError):
        fitted_model = fitted(monkeypatch, optimizer, packed=True)
    assert fitted_model is None


@pytest.mark.filterwarnings("ignore::tfdp.errors.NotFiniteWarning")
def test_a_copy_taken_before_the_first_step_is_put_back(monkeypatch):
    """A roll back to the start, when no state was packed yet."""
    x, y = drawn(12)
    x[5] = np.nan

    def trained(packed):
        largest = packed_updates.LARGEST_BYTES if packed else 0
        monkeypatch.setattr(packed_updates, "LARGEST_BYTES", largest)
        keras.utils.set_random_seed(0)
        with make_strategy(2).scope():
            model = network()
            model.compile(adam(), "mse")
            model.optimizer.build(model.trainable_variables)
        guard = tfdp.callbacks.NaNGuard(on_nan="rollback")
        model.fit(x, y, 4, shuffle=False, verbose=0, callbacks=[guard])
        assert guard.rollbacks == 1
        return model

    check_same_bits(trained(True), trained(False))


def kept(model):
    return [one.numpy() for one in (*model.weights, *model.optimizer.variables)]


@pytest.fixture
def compared(monkeypatch):
    """Compares what a function returns with and without packs."""

    def compare(trained, has_packs):
        results = []
        for packed in (True, False):
            largest = packed_updates.LARGEST_BYTES if packed else 0
            keras.utils.set_random_seed(0)
            with monkeypatch.context() as changed:
                changed.setattr(packed_updates, "LARGEST_BYTES", largest)
                if not packed:
                    changed.setattr(packed_updates, "PACKABLE", ())
                with make_strategy(2).scope():
                    model = network()
                    model.compile(adam(), "mse")
                results.append(trained(model))
            assert bool(packs_of(model.optimizer).packs) == (packed and has_packs)
        for own, other in zip(*map(tf.nest.flatten, results), strict=True):
            np.testing.assert_array_equal(own, other)

    return compare


def fit(model):
    model.fit(*drawn(), batch_size=4, shuffle=False, verbose=0)


def apply_twice(model):
    """A step in which each weight is updated twice."""
    optimizer, strategy = model.optimizer, model.distribute_strategy

    @tf.function
    def step(x):
        def own_step(x):
            with tf.GradientTape() as tape:
                loss = tfdp.losses.local_mean(model(x) ** 2)
            weights = model.trainable_variables
            own = tape.gradient(loss, weights)
            optimizer.apply([*own, *own], [*weights, *weights])

        strategy.run(own_step, args=(x,))

    with strategy.scope():
        optimizer.build(model.trainable_variables)
    step(tf.constant(drawn()[0]))


def test_a_weight_that_is_updated_twice(compared):
    def trained(model):
        apply_twice(model)
        return kept(model)

    compared(trained, has_packs=True)


def test_an_optimizer_that_is_built_again(compared):
    """Its new state is updated, and packed again."""

    def trained(model):
        fit(model)
        model.optimizer.built = False
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
        model.compile(model.optimizer, "mse")
        assert not packs_of(model.optimizer).packs
        fit(model)
        return kept(model)

    compared(trained, has_packs=True)


def test_an_update_set_on_the_instance(compared):
    def trained(model):
        original = model.optimizer.update_step
        vars(model.optimizer)["update_step"] = lambda gradient, *args: original(
            gradient / 2, *args
        )
        fit(model)
        return kept(model)

    compared(trained, has_packs=False)


def test_functions_traced_before_the_first_step(compared):
    """They hold the storage of the state, which is therefore not moved."""

    def trained(model):
        optimizer = model.optimizer
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
        state = optimizer.variables[2:]

        @tf.function
        def total():
            return tf.add_n([tf.reduce_sum(one.value) for one in state])

        @tf.function
        def reset():
            for one in state:
                one.assign(one * 0)

        reset()
        fit(model)
        seen = [total().numpy()]
        reset()
        fit(model)
        return [*seen, *kept(model)]

    compared(trained, has_packs=False)


def test_copies_kept_before_the_first_step(compared):
    def trained(model):
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
        slots = [one.value.values[1] for one in model.optimizer.variables[2:]]
        fit(model)
        return [*kept(model), *(one.numpy() for one in slots)]

    compared(trained, has_packs=False)


class BuiltInStep(keras.Model):
    """A model whose optimizer is built while its step is traced."""

    def __init__(self):
        super().__init__()
        self.inner, self.second = network(), adam()

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tfdp.losses.local_mean((self.inner(x) - y) ** 2)
        weights = self.inner.trainable_variables
        gradients = tape.gradient(loss, weights)
        if not self.second.built:
            self.second.build(weights)
        self.second.apply(gradients, weights)
        return {"loss": loss}


def test_an_optimizer_built_within_a_step(monkeypatch):
    """Its state has no value yet when the step is traced."""

    def trained(largest):
        monkeypatch.setattr(packed_updates, "LARGEST_BYTES", largest)
        keras.utils.set_random_seed(0)
        with make_strategy(2).scope():
            model = BuiltInStep()
            model.compile()
        fit(model)
        return [one.numpy() for one in (*model.weights, *model.second.variables)]

    largest = packed_updates.LARGEST_BYTES
    for own, other in zip(trained(largest), trained(0), strict=True):
        np.testing.assert_array_equal(own, other)


def test_a_saved_function_that_reads_packed_state_is_refused(monkeypatch, tmp_path):
    model = fitted(monkeypatch, adam, packed=True)
    module = tf.Module()
    module.model, slot = model, model.optimizer.variables[2].value
    module.read = tf.function(lambda: tf.reduce_sum(slot), input_signature=[])
    with pytest.raises(AssertionError, match="untracked"):
        tf.saved_model.save(module, tmp_path / "saved")
