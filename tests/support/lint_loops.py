"""Programs of the table in `lint_programs`: loops around `strategy.run`."""

import copy

import keras
import tensorflow as tf

from tests.support.lint_gradients import (
    clipped,
    clipped_by_all,
    decayed,
    decayed_once,
)
from tests.support.lint_programs import (
    BATCH,
    CLASSES,
    FEATURES,
    RATE,
    WIDTH,
    add,
    cross_entropy,
    focal,
    of_rows,
    rows_and_anchors,
    rows_and_labels,
    scope_of,
    soft_dice,
    summed,
    symmetric_contrast,
    symmetric_contrast_of_all,
)
from tfdp.losses import all_rows, local_mean, local_sum


def penalised_model(outputs):
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(WIDTH, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(outputs),
        ]
    )


def replicas():
    return tf.distribute.get_strategy().num_replicas_in_sync


class Loop:
    """A training loop, as TensorFlow's tutorial for strategies has it.

    Args:
      loss: takes the model, rows and labels; returns the loss of a replica.
      data: all rows, and their labels.
      change: of the gradients, before `apply`.
      counted: takes the labels and the predictions; a Mean counts what it returns.
      is_share: whether the sum of the replicas' losses is reported.
    """

    def __init__(self, loss, *, data=None, change=None, counted=None, is_share=False):
        self.loss, self.change, self.counted = loss, change, counted
        self.data = data or rows_and_labels()
        self.is_share = is_share

    def __call__(self, strategy):
        return copy.copy(self).trained(strategy)  # the table's own stays as it is

    def trained(self, strategy):
        self.build(strategy)
        reports = [float(self.step(strategy, *b)) for b in self.batches(strategy)]
        return self.results(reports if self.is_share else [])

    def build(self, strategy):
        keras.utils.set_random_seed(3)
        outputs = 5 if self.data[1].ndim > 1 else CLASSES
        with scope_of(strategy):
            self.model = penalised_model(outputs)
            self.optimizer = keras.optimizers.SGD(RATE / 2, momentum=0.5)
            self.optimizer.build(self.model.trainable_variables)
            self.mean = keras.metrics.Mean()
        self.step = tf.function(self._step)

    def batches(self, strategy):
        found = tf.data.Dataset.from_tensor_slices(self.data).batch(BATCH)
        return strategy.experimental_distribute_dataset(found) if strategy else found

    def results(self, reports):
        counted = [self.mean.result().numpy()] if self.counted else []
        return self.model.get_weights(), reports + counted

    def _step(self, strategy, x, y):
        if strategy is None:
            return self.of_replica(x, y)
        losses = strategy.run(self.of_replica, args=(x, y))
        return strategy.reduce("SUM", losses, axis=None)

    def of_replica(self, x, y):
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss(self.model, x, y)
        gradients = tape.gradient(loss, weights)
        if self.change:
            gradients = self.change(gradients, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        if self.counted:
            self.mean.update_state(self.counted(y, self.model(x), loss))
        return loss


class WholeEpoch(Loop):
    """All steps in one function, a loop over the data within it."""

    def trained(self, strategy):
        self.build(strategy)

        @tf.function
        def epoch(batches):
            for x, y in batches:
                self._step(strategy, x, y)

        epoch(self.batches(strategy))
        return self.results([])


class FunctionOfReplica(Loop):
    """The function of a replica is a `tf.function` itself."""

    def build(self, strategy):
        super().build(strategy)
        self.of_replica = tf.function(self.of_replica)


# Losses.


def mean(model, x, y):
    return tf.reduce_mean(of_rows(y, model(x, training=True)))


def total(model, x, y):
    return tf.reduce_sum(of_rows(y, model(x, training=True))) / BATCH


def keras_loss(model, x, y):
    return cross_entropy()(y, model(x, training=True))


def of_each(model, x, y):
    return cross_entropy(reduction="none")(y, model(x, training=True))


def average(**options):
    return lambda *args: tf.nn.compute_average_loss(of_each(*args), **options)


def penalty(model):
    return 0.05 * tf.add_n([tf.nn.l2_loss(w) for w in model.trainable_variables])


def with_penalty(scale):
    return lambda model, x, y: keras_loss(model, x, y) + scale(penalty(model))


def with_losses(scale):
    return lambda model, x, y: keras_loss(model, x, y) + scale(sum(model.losses))


def tutorial(model, x, y):
    """The loss of TensorFlow's tutorial, with its penalty."""
    losses = tf.nn.compute_average_loss(of_each(model, x, y), global_batch_size=BATCH)
    return losses + tf.nn.scale_regularization_loss(sum(model.losses))


def dice(gather):
    # Times 4, because its gradients are small.
    return lambda model, x, y: local_mean(4.0 * soft_dice(gather(y), gather(model(x))))


def positives(count):
    return lambda model, x, y: focal(y, model(x), count)


def contrast(of_pairs):
    return lambda model, x, y: local_mean(tf.reduce_mean(of_pairs(None, model(x))))


EVEN = {"data": rows_and_labels(20)}
ANCHORS = {"data": rows_and_anchors()}
WRONG = {
    "mean": (Loop(mean, is_share=True), "local_mean"),
    "mean, whole epoch": (WholeEpoch(mean), "local_mean"),
    "mean, function": (FunctionOfReplica(mean), "local_mean"),
    "penalty": (
        Loop(with_penalty(lambda x: x), is_share=True),
        "local_mean|scale_regularization",
    ),
    "model.losses": (Loop(with_losses(lambda x: x)), "local_mean|scale_regularization"),
    "global norm": (Loop(keras_loss, change=clipped), "all_sum"),
    "decay": (
        Loop(keras_loss, change=decayed),
        "local_mean|weight_decay|all_sum",
    ),
    "dice": (Loop(dice(lambda x: x)), "all_rows"),
    "positives": (Loop(positives(lambda n: n), **ANCHORS), "all_sum|all_rows"),
    "contrast": (Loop(contrast(symmetric_contrast)), "all_rows"),
}
RIGHT = {
    "mean, fixed": Loop(lambda *args: local_mean(mean(*args)), is_share=True),
    "mean, whole epoch, fixed": WholeEpoch(lambda *args: local_mean(mean(*args))),
    "penalty, fixed": Loop(with_penalty(local_mean), is_share=True),
    "model.losses, fixed": Loop(with_losses(tf.nn.scale_regularization_loss)),
    "global norm, fixed": Loop(keras_loss, change=clipped_by_all),
    "decay, fixed": Loop(keras_loss, change=decayed_once),
    "dice, fixed": Loop(dice(all_rows)),
    "positives, fixed": Loop(positives(summed), **ANCHORS),
    "contrast, fixed": Loop(contrast(symmetric_contrast_of_all)),
    "sum over the batch": Loop(total, is_share=True),
    "sum said": Loop(lambda *args: local_sum(total(*args)), is_share=True),
    "mean over replicas": Loop(lambda *args: mean(*args) / replicas(), **EVEN),
    "average loss": Loop(average(global_batch_size=BATCH), is_share=True),
    "average loss, even": Loop(average(), **EVEN),
    "tutorial": Loop(tutorial, is_share=True),
    "Keras loss": Loop(keras_loss, is_share=True),
    "Keras loss, whole epoch": WholeEpoch(keras_loss),
    "Keras loss, function": FunctionOfReplica(keras_loss, is_share=True),
    "metric of rows": Loop(keras_loss, counted=lambda y, p, loss: of_rows(y, p)),
}
for _name, (_run, _fix) in WRONG.items():
    add(f"loop: {_name}", "warn", _run, _fix)
for _name, _run in RIGHT.items():
    _replicas = (2, 3) if _name in ("tutorial", "mean, fixed") else (2,)
    add(f"loop: {_name}", "exact", _run, replicas=_replicas)


def closure(strategy):
    """No class and no method: functions, and what they close over."""
    loop = Loop(mean)
    loop.build(strategy)
    model, optimizer = loop.model, loop.optimizer

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(of_rows(y, model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def step(x, y):
        strategy.run(replica_step, (x, y)) if strategy else replica_step(x, y)

    for x, y in loop.batches(strategy):
        step(x, y)
    return model.get_weights(), []


add("loop: mean, closure", "warn", closure, "local_mean")
add(
    "loop: metric of the loss",
    "told",
    Loop(keras_loss, counted=lambda y, p, loss: loss),
    "all_sum|rows",
)
