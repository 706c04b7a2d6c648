"""Hand-written losses: noticed when they look local, exact when they say so."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
    train,
)
from tfdp.errors import ConfigurationError, LocalMeanWarning


class HandWritten(keras.Model):
    """A train_step of its own with a plain mean over the local batch."""

    def __init__(self, state):
        super().__init__()
        self.inner = dense_model()
        self.state_loss = state

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = self.state_loss(tf.reduce_mean(losses))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def hand_written(state, model_class=HandWritten):
    def build():
        model = model_class(state)
        model.build((None, 12))
        return model

    return build


def test_a_plain_mean_is_noticed_and_names_the_remedy():
    with pytest.warns(LocalMeanWarning, match=r"2 times too large.*local_mean"):
        train(make_strategy(2), hand_written(lambda loss: loss), epochs=1)


def test_a_local_mean_that_says_so_is_exact_on_uneven_batches():
    data = classification_data(samples=53)
    one, _ = train(None, hand_written(lambda loss: loss), data=data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several, _ = train(
            make_strategy(3), hand_written(tfdp.losses.local_mean), data=data
        )
    # 6 updates with a rate of 0.5 (momentum) on gradients below 3: see parity.py.
    assert largest_difference(one, several) < 1e-5


def test_a_loss_that_is_divided_already_is_left_alone():
    data = classification_data(samples=48)
    one, _ = train(None, hand_written(lambda loss: loss), data=data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several, _ = train(
            make_strategy(2),
            hand_written(lambda loss: tfdp.losses.local_sum(loss / 2)),
            data=data,
        )
        again, _ = train(None, hand_written(tfdp.losses.local_sum), data=data)
    assert largest_difference(one, several) < 1e-5
    assert largest_difference(one, again) == 0.0


def scalar_loss(y_true, y_pred):
    labels = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y_pred)
    return tf.reduce_mean(losses)


def test_a_loss_function_that_returns_a_scalar_is_noticed():
    with pytest.warns(LocalMeanWarning, match="it is a mean over the replica's rows"):
        train(make_strategy(2), loss=scalar_loss, epochs=1)


class NumberLoss(keras.losses.Loss):
    """A loss of a program's own that makes one number of all rows itself."""

    def __init__(self, of_rows, reduction):
        super().__init__(reduction=reduction)
        self.of_rows = of_rows

    def call(self, y_true, y_pred):
        labels = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        return self.of_rows(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y_pred)
        )


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "none"])
def test_a_loss_that_takes_a_mean_itself_is_noticed(reduction):
    with pytest.warns(LocalMeanWarning, match="it is a mean over the replica's rows"):
        loss = NumberLoss(tf.reduce_mean, reduction)
        train(make_strategy(2), loss=loss, epochs=1)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("of_rows", [tf.reduce_sum, lambda rows: rows])
def test_a_loss_that_adds_up_itself_is_not_suspected(of_rows, reduction):
    assert_not_suspected(NumberLoss(of_rows, reduction))


def assert_not_suspected(loss):
    one, _ = train(None, loss=loss, optimizer=lambda: keras.optimizers.SGD(0.002))
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several, _ = train(
            make_strategy(2), loss=loss, optimizer=lambda: keras.optimizers.SGD(0.002)
        )
    # 8 updates of 0.002 * 24 rows * 3, off by 100 u or so each.
    assert largest_difference(one, several) < 1e-5


def dice(y, p):
    y = keras.ops.one_hot(keras.ops.reshape(y, (-1,)), 5)
    p = keras.ops.softmax(p)
    both, each = keras.ops.sum(y * p), keras.ops.sum(y * y) + keras.ops.sum(p * p)
    return 1 - 2 * both / each


def dice_of_all(y, p):
    if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
        return dice(y, p)
    gather = tf.distribute.get_replica_context().all_gather
    return tfdp.losses.local_mean(dice(gather(y, axis=0), gather(p, axis=0)))


@pytest.mark.parametrize("samples", [96, 79])
def test_a_loss_of_gathered_rows_is_one_devices(samples):
    """Of 79 rows in batches of 24 the last has 7, in three uneven parts."""
    data = classification_data(samples=samples)
    one, _ = train(None, loss=dice_of_all, data=data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several, _ = train(make_strategy(3), loss=dice_of_all, data=data)
    # 8 updates of 0.05 times gradients below 1.
    assert largest_difference(one, several) < 1e-6


def test_a_local_mean_of_what_is_none_is_noticed():
    with pytest.warns(LocalMeanWarning, match="a sum over rows is divided.*all_rows"):
        train(make_strategy(3), loss=lambda y, p: tfdp.losses.local_mean(dice(y, p)))


@pytest.mark.parametrize("samples", [22, 24], ids=["uneven", "even"])
@pytest.mark.parametrize("stage", [0, 3])
def test_losses_of_layers_alone_are_not_suspected(samples, stage):
    def trained(strategy):
        with (strategy or tf.distribute.get_strategy()).scope():
            model = dense_model()
            model.layers[0].activity_regularizer = keras.regularizers.L2(0.1)
            model.compile("sgd", jit_compile=False)
        x, _ = classification_data(samples=samples)
        model.fit(x, batch_size=12, shuffle=False, verbose=0)
        return model

    one = trained(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several = trained(make_strategy(3, shard=stage))
    assert largest_difference(one, several) < 1e-6


@pytest.mark.parametrize("reduction", ["sum", None])
def test_sums_are_not_suspected(reduction):
    assert_not_suspected(
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=reduction
        )
    )


def test_outside_a_strategy_nothing_changes():
    assert float(tfdp.losses.local_mean(tf.constant(3.0))) == 3.0
    np.testing.assert_equal(float(tfdp.losses.local_sum(tf.constant(3.0))), 3.0)


class Adding(keras.layers.Layer):
    """Adds `take(inputs)` to the loss."""

    def __init__(self, take):
        super().__init__()
        self.take = take

    def call(self, inputs):
        self.add_loss(self.take(inputs))
        return inputs


def with_added(take):
    def build():
        model = dense_model()
        return keras.Sequential([keras.Input((12,)), Adding(take), *model.layers])

    return build


def kl_like(inputs):
    """As in variational autoencoders: a sum over the rows, or over all entries."""
    return -0.5 * tf.reduce_sum(1 - tf.square(inputs))


@pytest.mark.parametrize(
    "take",
    [
        kl_like,
        lambda inputs: kl_like(inputs) / 24.0,  # by a constant, not by the rows
    ],
    ids=["sum", "over-constant"],
)
def test_a_layers_sum_over_rows_is_noticed_beside_a_compiled_loss(take):
    with pytest.warns(LocalMeanWarning, match=r"add_loss.*local_sum"):
        train(make_strategy(2), with_added(take), epochs=1)


@pytest.mark.parametrize(
    "take",
    [
        lambda inputs: kl_like(inputs) / tf.cast(tf.shape(inputs)[0], tf.float32),
        lambda inputs: tf.reduce_mean(tf.reduce_sum(tf.square(inputs), axis=-1)),
        lambda inputs: tfdp.losses.local_sum(kl_like(inputs)),
    ],
    ids=["over-rows", "mean-of-sums", "said"],
)
@pytest.mark.parametrize("samples", [48, 53])
def test_means_over_rows_and_what_says_so_are_not_suspected(take, samples):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        data = classification_data(samples=samples)
        train(make_strategy(2), with_added(take), epochs=1, data=data)


def test_a_scalar_loss_is_noticed_beside_a_penalty():
    def build():
        model = dense_model()
        model.layers[0].kernel_regularizer = keras.regularizers.L2(0.01)
        return model

    with pytest.warns(LocalMeanWarning, match="it is a mean over the replica's rows"):
        train(make_strategy(2), build, loss=scalar_loss, epochs=1)


class Mixing(HandWritten):
    """Adds what was taken by hand to a Keras loss, which is a share already."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x)
            shared = self.compute_loss(y=y, y_pred=logits)
            loss = self.state_loss(shared, tf.reduce_mean(tf.square(logits)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def mixing(mix):
    def build():
        model = Mixing(mix)
        model.build((None, 12))
        return model

    return build


@pytest.mark.parametrize(
    "mix",
    [
        lambda shared, by_hand: shared + by_hand,
        lambda shared, by_hand: tf.sqrt(shared),
        lambda shared, by_hand: shared * shared,
    ],
    ids=["sum", "root", "square"],
)
def test_local_mean_of_what_is_partly_a_share_is_refused(mix):
    def state(shared, by_hand):
        return tfdp.losses.local_mean(mix(shared, by_hand))

    with pytest.raises(ConfigurationError, match="on the other part alone"):
        train(make_strategy(2), mixing(state), epochs=1)


def test_a_share_plus_something_else_is_noticed_where_it_is_reported():
    with pytest.warns(LocalMeanWarning, match=r"counts once for each replica"):
        train(
            make_strategy(2), mixing(lambda shared, by_hand: shared + by_hand), epochs=1
        )


class OwnComputeLoss(HandWritten):
    """Keras' guide: `compute_loss` of one's own adds to Keras' loss."""

    train_step = keras.Model.train_step

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        penalty = 0.01 * tf.reduce_sum(tf.square(self.inner.layers[0].kernel))
        return loss + self.state_loss(penalty)


class AddsConstant(HandWritten):
    """Adds what moves no weight, which is reported."""

    train_step = keras.Model.train_step

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + self.state_loss(tf.constant(3.0))


def test_a_constant_that_compute_loss_adds_is_noticed_and_its_local_mean_exact():
    data = classification_data(samples=53)
    with pytest.warns(LocalMeanWarning, match="a constant was added.*local_mean"):
        train(
            make_strategy(3),
            hand_written(lambda added: added, AddsConstant),
            data=data,
            epochs=1,
        )
    one, expected = train(
        None, hand_written(lambda added: added, AddsConstant), data=data
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several, history = train(
            make_strategy(3),
            hand_written(tfdp.losses.local_mean, AddsConstant),
            data=data,
        )
        # 0, which Keras itself begins its sum of losses with, says nothing.
        train(
            make_strategy(3),
            hand_written(lambda added: 0.0, AddsConstant),
            data=data,
            epochs=1,
        )
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    assert largest_difference(one, several) < 1e-5


@pytest.mark.parametrize(
    "how",
    [{}, {"jit_compile": True}],
    ids=["graph", "compiled"],
)
def test_what_compute_loss_adds_is_noticed_and_its_local_mean_exact(how):
    data = classification_data(samples=53)
    build = hand_written(lambda penalty: penalty, OwnComputeLoss)
    with pytest.warns(LocalMeanWarning, match=r"`compute_loss` returned.*local_mean"):
        train(make_strategy(3), build, data=data, epochs=1, **how)
    one, _ = train(None, build, data=data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several, _ = train(
            make_strategy(3),
            hand_written(tfdp.losses.local_mean, OwnComputeLoss),
            data=data,
            **how,
        )
    # 6 updates with a rate of 0.5 (momentum) on gradients below 3: see parity.py.
    assert largest_difference(one, several) < 1e-5


class OnlyComputeLoss(HandWritten):
    """The example of `keras.Model.compute_loss`: no loss is compiled."""

    train_step = keras.Model.train_step

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        right = tf.one_hot(tf.reshape(y, (-1,)), tf.shape(y_pred)[-1])
        return self.state_loss(tf.square(y_pred - right))


def train_on_compute_loss(strategy, loss, **how):
    x, y = classification_data(samples=48)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = hand_written(loss, OnlyComputeLoss)()
        model.compile(keras.optimizers.SGD(0.05), **{"jit_compile": False, **how})
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(
    "loss",
    [
        tf.reduce_mean,
        lambda rows: 3.0 * tf.reduce_mean(rows) + tf.reduce_mean(rows**2),
        lambda rows: tf.sqrt(tf.reduce_mean(rows)),
        lambda rows: tf.reduce_mean(tf.reduce_sum(rows, axis=-1)),
    ],
    ids=["mean", "terms", "root", "mean of sums"],
)
def test_a_loss_that_compute_loss_takes_itself_is_noticed(loss):
    """Its gradients are twice too large on two replicas."""
    words = "a mean over the replica's rows|its compute_loss is its own|a root"
    with pytest.warns(LocalMeanWarning, match=words):
        train_on_compute_loss(make_strategy(2), loss)


def of_all_replicas(rows):
    """How many rows there are."""
    mine = tf.cast(tf.shape(rows)[0], rows.dtype)
    if not tf.distribute.has_strategy():
        return mine
    context = tf.distribute.get_replica_context()
    return mine if context is None else context.all_reduce("SUM", mine)


def a_sum(rows):
    return tf.reduce_sum(rows) / 240


@pytest.mark.parametrize(
    "loss",
    [
        lambda rows: tfdp.losses.local_mean(tf.reduce_mean(rows)),
        lambda rows: tfdp.losses.local_sum(a_sum(rows)),
        a_sum,  # seen to be one
        lambda rows: tf.reduce_sum(rows) / (5 * of_all_replicas(rows)),
    ],
    ids=["mean", "sum that is said", "sum", "sum over all rows"],
)
def test_a_loss_that_compute_loss_takes_itself_may_say_what_it_is(loss):
    one = train_on_compute_loss(None, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several = train_on_compute_loss(make_strategy(3), loss)
    # 2 updates of 0.05 times gradients of a few units.
    assert largest_difference(one, several) < 1e-6


def trained_on_sequences(strategy, steps):
    """Weights after batches whose rows have other lengths, `steps` in an execution."""

    def batches():
        rng = np.random.default_rng(1)
        for length in (3, 5, 4, 6, 2, 4):
            tokens = rng.integers(0, 9, (5, length)).astype("int32")
            yield tokens, tokens % 3

    form = tf.TensorSpec((None, None), tf.int32)
    with strategy.scope():
        keras.utils.set_random_seed(5)
        tokens = keras.Input((None,), dtype="int32")
        embedded = keras.layers.Embedding(9, 4)(tokens)
        model = keras.Model(tokens, keras.layers.Dense(3)(embedded))
        model.compile(
            keras.optimizers.SGD(0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps,
        )
    dataset = tf.data.Dataset.from_generator(batches, output_signature=(form, form))
    model.fit(dataset, steps_per_epoch=6, verbose=0)
    return model.get_weights()


def test_a_loop_around_the_step_is_none_within():
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        found = trained_on_sequences(make_strategy(2), steps=2)
    one = trained_on_sequences(tf.distribute.get_strategy(), steps=1)
    for mine, theirs in zip(found, one, strict=True):
        # Six updates of 0.5 times gradients below 1, each a sum of at most 30 terms.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


class LossInLoop(HandWritten):
    def train_step(self, data):
        x, y = data
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def turn(number, total):
            logits = self(x)[: number + 1]
            return number + 1, total + loss_of(y[: number + 1], logits)

        start = (tf.constant(0), tf.constant(0.0))
        _, loss = tf.while_loop(lambda number, _: number < 2, turn, start)
        return {"loss": loss}


def test_a_loss_in_a_loop_of_the_step_is_noticed():
    with pytest.warns(LocalMeanWarning, match="within a tf.while_loop"):
        train(make_strategy(2), build=hand_written(None, LossInLoop))


class OfObjects(keras.losses.Loss):
    """Uses Keras loss objects, whose results are shares of the global loss already."""

    def __init__(self, mixes):
        super().__init__()
        self.inner, self.mixes = keras.losses.MeanSquaredError(), mixes

    def call(self, y, p):
        first, second = self.inner(y, p), self.inner(2 * y, p)
        if self.mixes:
            return first + keras.ops.mean(keras.ops.abs(y - p), axis=-1)
        return keras.ops.stack([first, second])


@pytest.mark.parametrize("eager", [False, True])
def test_a_loss_of_loss_objects_is_not_scaled_twice(eager):
    x, labels = classification_data(21)
    y = np.eye(5, dtype="float32")[labels]

    def fitted(strategy, mixes):
        with strategy.scope():
            model = dense_model()
            model.compile(
                keras.optimizers.SGD(0.05),
                OfObjects(mixes),
                run_eagerly=eager,
                jit_compile=False,
            )
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        return model

    one, several = (
        fitted(strategy, False)
        for strategy in (tf.distribute.get_strategy(), make_strategy(3))
    )
    assert largest_difference(one, several) < 1e-6
    if not eager:
        with pytest.raises(ConfigurationError, match="keras.losses.mean_squared"):
            fitted(make_strategy(3), True)


def of_mean(loss):
    return loss


def of_shared_sum(loss):
    return tfdp.losses.local_sum(loss / 2)


class TwoLosses(keras.Model):
    """Keras takes the mean of one loss; of the other one the step does."""

    def __init__(self, bring, reduce=False):
        super().__init__()
        self.bring, self.reduce = bring, reduce
        self.first, self.second = keras.layers.Dense(5), keras.layers.Dense(3)
        self.other = keras.optimizers.SGD(0.05, name="other")

    def call(self, x):
        return self.first(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            other = self.bring(tf.reduce_mean(tf.square(self.second(x) - 1.0)))
        weights = self.first.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        weights = self.second.trainable_variables
        gradients = tape.gradient(other, weights)
        if self.reduce:
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("mean", gradients)
        self.other.apply(gradients, weights)
        return {"loss": loss}


def two_losses(strategy, **options):
    data = classification_data(samples=48)

    def build():
        keras.utils.set_random_seed(3)
        model = TwoLosses(**options)
        model.first.build((None, 12))
        model.second.build((None, 12))
        model.built = True
        model.other.build(model.second.trainable_variables)
        return model

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, _ = train(strategy, build, data=data)
    return model, [str(w.message) for w in told if w.category is LocalMeanWarning]


def test_one_of_two_losses_that_is_no_share_is_noticed():
    _, told = two_losses(make_strategy(2), bring=of_mean)
    (message,) = set(told)
    assert "'other'" in message
    assert "local_mean" in message


@pytest.mark.parametrize("bring", [tfdp.losses.local_mean, of_shared_sum])
def test_two_losses_that_are_shares_are_exact(bring):
    one, _ = two_losses(None, bring=of_mean)
    several, told = two_losses(make_strategy(2), bring=bring)
    assert told == []
    # 6 updates with rates below 1 on gradients below 3: see parity.py.
    assert largest_difference(one, several) < 1e-5


def test_gradients_that_a_step_reduces_are_summed_again_and_noticed():
    one, _ = two_losses(None, bring=of_mean)
    several, told = two_losses(make_strategy(2), bring=of_mean, reduce=True)
    (message,) = set(told)
    assert "summed over the replicas already" in message
    assert largest_difference(one, several) > 1e-3  # twice the update


class Weighted(keras.Sequential):
    """A loss times a trained weight, and a penalty on that weight (A. Kendall)."""

    def __init__(self, say, layers):
        super().__init__(layers)
        self.say = say
        self.doubt = self.add_weight(shape=(), initializer="zeros", name="doubt")

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss * keras.ops.exp(-self.doubt) + self.say(self.doubt)


@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}], ids=str)
@pytest.mark.parametrize(
    "say",
    [
        lambda doubt: tfdp.losses.local_mean(doubt),
        lambda doubt: tfdp.losses.local_mean(doubt.value),
        lambda doubt: tfdp.losses.local_mean(keras.ops.convert_to_tensor(doubt)),
        lambda doubt: tfdp.losses.local_mean(0.5) + tfdp.losses.local_mean(doubt),
        lambda doubt: tfdp.losses.local_mean(np.float32(0.5)),
    ],
    ids=["variable", "value", "tensor", "number", "numpy"],
)
def test_a_variable_and_a_number_have_a_local_mean(say, how):
    def build():
        return Weighted(say, [keras.Input((12,)), keras.layers.Dense(5)])

    data = classification_data(samples=53)
    keras.utils.set_random_seed(3)
    one, expected = train(None, build, data=data, **how)
    keras.utils.set_random_seed(3)
    several, found = train(make_strategy(3), build, data=data, **how)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    assert largest_difference(one, several) < 1e-5


@pytest.mark.parametrize("state", [tfdp.losses.local_mean, tfdp.losses.local_sum])
def test_a_function_is_refused_also_outside_of_a_step(state):
    with pytest.raises(ConfigurationError, match="call it within the function"):
        state(keras.losses.MeanSquaredError())


@pytest.mark.parametrize("state", [tfdp.losses.local_mean, tfdp.losses.local_sum])
@pytest.mark.parametrize("loss", [None, "loss", 3, tf.constant(3)], ids=repr)
def test_what_is_no_loss_is_refused(state, loss):
    build = hand_written(lambda mean: state(loss))
    with pytest.raises(ConfigurationError, match="floating-point number"):
        train(make_strategy(2), build)
