"""Steps and layers that take their losses themselves, each with its data.

As in `conformance_fits.py`: 15 rows in batches of 7, so that two replicas get 4 and 3
each time, and 1 and 0 in the end.
"""

import dataclasses

import keras
import tensorflow as tf

import tfdp
from tests.support.conformance_fits import (
    crossentropy,
    random_weights,
    rows,
    sequence_model,
    sequences,
)
from tests.support.parity import dense_model

ops = keras.ops


class OwnStep(keras.Model):
    """A model around another one, whose train_step is its own; see `loss_of`."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner()
        self.tracker = keras.metrics.Mean("own_loss")
        self.total = keras.metrics.Sum("total_loss")

    def call(self, x):
        return self.inner(x)

    def build(self, shape):
        self.inner.build(shape)
        self.built = True

    def loss_of(self, x, y, y_pred, sample_weight):
        return self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, self(x, training=True), sample_weight)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.report(x, loss)

    def test_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return self.report(x, self.loss_of(x, y, self(x), sample_weight))

    def report(self, x, loss):
        self.tracker.update_state(loss)
        return {"own_loss": self.tracker.result()}


class ByRows(OwnStep):
    """As Keras itself: a mean over the rows of all batches."""

    def report(self, x, loss):
        self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"own_loss": self.tracker.result()}


class Returned(OwnStep):
    """No metric at all, and a number that was taken by hand beside it."""

    def report(self, x, loss):
        return {"raw": loss, "twice": 2 * loss, "mean": tf.reduce_mean(x)}


class Summed(OwnStep):
    def report(self, x, loss):
        self.total.update_state(loss)
        return {"total_loss": self.total.result()}


class RowsMasked(OwnStep):
    """Leaves rows out before it takes the loss: of the first ones most."""

    def loss_of(self, x, y, y_pred, sample_weight):
        chosen = y != 0
        return self.compute_loss(y=y[chosen], y_pred=y_pred[chosen])


class RowsTwice(OwnStep):
    """Some rows are taken twice, as in contrastive or adversarial training."""

    def loss_of(self, x, y, y_pred, sample_weight):
        again = tf.where(y == 1)[:, 0]
        y = tf.concat([y, tf.gather(y, again)], 0)
        y_pred = tf.concat([y_pred, tf.gather(y_pred, again)], 0)
        return self.compute_loss(y=y, y_pred=y_pred)


class TokensTakenApart(OwnStep):
    """A mean over all tokens that are no padding, of all sequences."""

    def loss_of(self, x, y, y_pred, sample_weight):
        is_token = x != 0
        return self.compute_loss(y=y[is_token], y_pred=y_pred[is_token])


class OwnLossObject(OwnStep):
    def __init__(self, inner):
        super().__init__(inner)
        self.loss_object = crossentropy()

    def loss_of(self, x, y, y_pred, sample_weight):
        return self.loss_object(y, y_pred)


class LocalMeanOfKerasLoss(OwnLossObject):
    """A Keras loss is a share already; saying it again must change nothing."""

    def loss_of(self, x, y, y_pred, sample_weight):
        keras_loss = self.loss_object(y, y_pred)
        return tfdp.losses.local_mean(0.5 * keras_loss + self.loss_object(y, -y_pred))


class BothKinds(OwnLossObject):
    def loss_of(self, x, y, y_pred, sample_weight):
        by_hand = tfdp.losses.local_mean(tf.reduce_mean(tf.square(y_pred)))
        return self.loss_object(y, y_pred) + 0.1 * by_hand


class SumByHand(OwnStep):
    def loss_of(self, x, y, y_pred, sample_weight):
        return tfdp.losses.local_sum(0.01 * tf.reduce_sum(tf.square(y_pred)))


class Adversarial(OwnStep):
    """Two players with an optimizer each, and labels that are made in the step."""

    def __init__(self, inner):
        super().__init__(inner)
        keras.utils.set_random_seed(2)
        self.critic = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        self.critic_optimizer = keras.optimizers.SGD(0.1)
        self.critic_optimizer.build(self.critic.trainable_variables)
        self.critic_tracker = keras.metrics.Mean("critic_loss")
        self.bce = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data):
        x, y = data
        real, made = tf.one_hot(y, 5), self.inner(x)
        labels = tf.concat([tf.ones_like(y), tf.zeros_like(y)], 0)[:, None]
        with tf.GradientTape() as tape:
            judged = self.critic(tf.concat([real, made], 0))
            critic_loss = tfdp.losses.local_mean(self.bce(labels, judged))
        variables = self.critic.trainable_variables
        self.critic_optimizer.apply(tape.gradient(critic_loss, variables), variables)
        with tf.GradientTape() as tape:
            wanted = tf.ones((tf.shape(x)[0], 1))
            loss = self.bce(wanted, self.critic(self.inner(x)))
        variables = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.critic_tracker.update_state(critic_loss)
        return {**self.report(x, loss), "critic_loss": self.critic_tracker.result()}

    def test_step(self, data):
        x, _ = data
        return self.report(
            x, self.bce(tf.ones((tf.shape(x)[0], 1)), self.critic(self.inner(x)))
        )


class Endpoint(keras.layers.Layer):
    """keras.io's endpoint layer: takes the targets in, and adds its own loss."""

    def __init__(self, state=lambda loss: loss, reduction="sum_over_batch_size"):
        super().__init__()
        self.loss_object = crossentropy(reduction=reduction)
        self.state = state

    def call(self, y_pred, targets=None):
        self.add_loss(self.state(self.loss_object(targets, y_pred)))
        return y_pred


def endpoint_model(**options):
    keras.utils.set_random_seed(0)
    features = keras.Input((12,), name="x")
    targets = keras.Input((), dtype="int32", name="y")
    hidden = keras.layers.Dense(6, "tanh", kernel_regularizer="l2")(features)
    y_pred = Endpoint(**options)(keras.layers.Dense(5)(hidden), targets)
    return keras.Model({"x": features, "y": targets}, y_pred)


def endpoint_rows():
    data = rows()
    return {"x": {"x": data["x"], "y": data["y"].astype("int32")}}


class AddedLoss(keras.layers.Layer):
    def __init__(self, take):
        super().__init__()
        self.take = take

    def call(self, inputs):
        self.add_loss(self.take(inputs))
        return inputs


def adding(take):
    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.Dense(6, "tanh", activity_regularizer="l2"),
                AddedLoss(take),
                keras.layers.Dense(5),
            ]
        )

    return build


def sum_of_squares(inputs):
    return 0.01 * ops.sum(ops.square(inputs))


def masked_by_itself(y_true, y_pred):
    """A loss function that leaves out rows: labels of 0 are not known."""
    known = tf.not_equal(tf.reshape(y_true, [-1]), 0)
    labels = tf.boolean_mask(tf.reshape(y_true, [-1]), known)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(labels, tf.int32), tf.boolean_mask(y_pred, known)
    )


def scalar_that_says_so(y_true, y_pred):
    labels = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y_pred)
    return tfdp.losses.local_mean(tf.reduce_mean(losses))


@dataclasses.dataclass(frozen=True)
class Step:
    """What is built and trained.

    Args:
      build: makes the model.
      loss: for `compile`.
      data: arguments of `fit`.
      metrics: for `compile`.
    """

    build: object
    loss: object = dataclasses.field(default_factory=crossentropy)
    data: object = dataclasses.field(default_factory=rows)
    metrics: tuple = ()


def own(model_class, inner=dense_model):
    def build():
        model = model_class(inner)
        model.build((None, 12) if inner is dense_model else (None, 6))
        return model

    return build


def tokens():
    return dict(zip("xy", sequences(), strict=True))


def all_tokens():
    """Without a mask of Keras: the step itself looks at the padding."""
    return sequence_model(mask=False)


def synchronized_model():
    """Replicas wait for each other after a layer has added its loss."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(6, "tanh", activity_regularizer="l2"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(5),
        ]
    )


STEPS = {
    "stock": Step(
        dense_model,
        metrics=("accuracy", "sparse_top_k_categorical_accuracy"),
    ),
    "stock-weighted": Step(dense_model, data=rows(sample_weight=random_weights())),
    "tracker": Step(own(OwnStep)),
    "tracker-weighted": Step(own(OwnStep), data=rows(sample_weight=random_weights())),
    "tracker-by-rows": Step(own(ByRows)),
    "tracker-sum": Step(own(Summed)),
    "returned": Step(own(Returned)),
    "rows-masked": Step(own(RowsMasked)),
    "rows-twice": Step(own(RowsTwice)),
    "tokens-taken-apart": Step(own(TokensTakenApart, all_tokens), data=tokens()),
    "own-loss-object": Step(own(OwnLossObject)),
    "local-mean-of-keras-loss": Step(own(LocalMeanOfKerasLoss)),
    "both-kinds": Step(own(BothKinds)),
    "sum-by-hand": Step(own(SumByHand)),
    "adversarial": Step(own(Adversarial)),
    "endpoint": Step(endpoint_model, None, endpoint_rows()),
    "endpoint-sum": Step(
        lambda: endpoint_model(
            reduction="sum", state=lambda loss: tfdp.losses.local_sum(0.1 * loss)
        ),
        None,
        endpoint_rows(),
    ),
    "endpoint-local-mean": Step(
        lambda: endpoint_model(state=tfdp.losses.local_mean), None, endpoint_rows()
    ),
    "added-and-synchronized": Step(synchronized_model),
    "added-mean": Step(adding(lambda x: 0.1 * ops.mean(ops.square(x)))),
    "added-local-mean": Step(
        adding(lambda x: tfdp.losses.local_mean(ops.mean(ops.square(x))))
    ),
    "added-local-sum": Step(adding(lambda x: tfdp.losses.local_sum(sum_of_squares(x)))),
    "loss-masks-rows": Step(dense_model, masked_by_itself),
    "scalar-loss": Step(dense_model, scalar_that_says_so),
    "reduction-none": Step(dense_model, crossentropy(reduction="none")),
    "reduction-sum": Step(dense_model, crossentropy(reduction="sum")),
}
