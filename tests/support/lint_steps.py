"""Programs of the table in `lint_programs`: losses of a `train_step` of one's own."""

import keras
import tensorflow as tf

from tests.support.lint_gradients import apply, with_step
from tests.support.lint_programs import (
    CLASSES,
    FEATURES,
    WIDTH,
    Wrapped,
    add,
    cross_entropy,
    dense,
    of_rows,
    rows_and_targets,
)
from tfdp.losses import all_rows, local_mean, local_sum, own_rows

layers = keras.layers


# Losses that pass through other operations on their way to the gradient.


def looked_after(after, listed=True, **more):
    """A metric of one's own gets the loss that `after` makes of two Keras losses."""

    def init(self):
        Wrapped.__init__(self)
        mean = keras.metrics.Mean(name="total")
        self.kept = mean if listed else [lambda: mean]  # Keras looks into no function

    def step(self, data):
        x, y = data
        of_batch = cross_entropy()
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = after(of_batch(y, p), of_batch(y, 0.5 * p))
        apply(self, tape, loss)
        mean = self.kept if listed else self.kept[0]()
        mean.update_state(loss)
        return {"total": mean.result()}

    return with_step(step, __init__=init)


def through_stack(a, b):
    both = tf.stack([a, b])
    return both[0] + 0.5 * both[1]


def through_loop(a, b):
    """Losses of several heads, weighted and added up in a Python loop."""
    total = 0.0
    for weight, loss in ((0.7, a), (0.2, b), (0.1, a)):
        total += weight * loss
    return total


def through_while(a, b):
    terms = tf.stack([a, b])
    _, total = tf.while_loop(
        lambda place, _: place < 2,
        lambda place, total: (place + 1, total + tf.gather(terms, place)),
        (0, tf.constant(0.0)),
    )
    return total


WAYS = {
    "sum": lambda a, b: a + 0.5 * b,
    "average": lambda a, b: (a + b) / 2,
    "times a constant": lambda a, b: 128.0 * (a + b) / 64.0,
    "check_numerics": lambda a, b: tf.debugging.check_numerics(a + b, "loss"),
    "stack and index": through_stack,
    "sum of stack": lambda a, b: tf.reduce_sum(tf.stack([a, 0.5 * b])),
    "mean of stack": lambda a, b: tf.reduce_mean(tf.stack([a, b])),
    "add_n": lambda a, b: tf.add_n([a, b, a]),
    "tensordot": lambda a, b: tf.tensordot(
        tf.stack([a, b]), tf.constant([1.0, 0.5]), axes=1
    ),
    "einsum": lambda a, b: tf.einsum("i,i->", tf.stack([a, b]), tf.constant([1.0, 2])),
    "where": lambda a, b: tf.where(tf.constant(True), a + b, 0.0),
    "cond": lambda a, b: tf.cond(tf.constant(True), lambda: a + b, lambda: a),
    "loop": through_loop,
    "while_loop": through_while,
    "reshaped": lambda a, b: tf.squeeze(tf.reshape(tf.concat([[a]], 0), (1, 1))) + b,
}
for _name, _after in WAYS.items():
    add(f"loss through {_name}", "exact", looked_after(_after))
add(
    "loss through float16",
    "exact",
    looked_after(lambda a, b: tf.cast(tf.cast(a + b, tf.float16), tf.float32)),
    # The loss is rounded to 11 bits, a share to 11 of its own; the gradient is not.
    report_bound=4 * 2.0**-11,
)
add("metric that is not listed", "exact", looked_after(WAYS["sum"], listed=False))


# Losses of one's own in a step.


def own_loss(compute, returned=True, **more):
    """`compute` takes the model and a batch, and returns the loss."""

    def step(self, data):
        with tf.GradientTape() as tape:
            loss = compute(self, *data)
        apply(self, tape, loss)
        return {"total": loss if returned else self.optimizer.learning_rate}

    return with_step(step, **more)


def mean_by_hand(scale):
    return lambda model, x, y: scale(tf.reduce_mean(of_rows(y, model(x))))


def curriculum(model, x, y):
    """Another loss after the first step, in a branch that all replicas take."""
    p = model(x)
    return tf.cond(
        model.optimizer.iterations < 1,
        lambda: tf.reduce_mean(tf.square(p)),
        lambda: tf.reduce_mean(of_rows(y, p)),
    )


def sharper(model, x, y):
    """The mean loss at three temperatures."""
    p = model(x)

    def body(place, total):
        scale = tf.cast(place + 1, "float32")
        return place + 1, total + tf.reduce_mean(of_rows(y, scale * p)) / 3

    return tf.while_loop(lambda place, _: place < 3, body, (0, tf.constant(0.0)))[1]


def sum_by_hand(model, x, y):
    """Divided by the size of the whole batch, a number that the program has."""
    return tf.reduce_sum(of_rows(y, model(x))) / 10.0


def added_losses(scale):
    """`sum(self.losses)` beside a Keras loss, as in old tutorials."""

    def compute(model, x, y):
        loss = cross_entropy()(y, model(x, training=True))
        return loss + scale(sum(model.losses))

    return compute


def regularised(self):
    Wrapped.__init__(self)
    self.inner = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(WIDTH, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(CLASSES),
        ]
    )


def uncertain(scale):
    """Kendall et al., 2018: two losses with learned weights."""

    def compute(model, x, y):
        p = model(x)
        first, second = cross_entropy()(y, p), cross_entropy()(y, 0.5 * p)
        a, b = tf.unstack(model.scales.value)
        losses = tf.exp(-a) * first + tf.exp(-b) * second
        return losses + scale(a + b)

    return compute


def build_with_scales(self, shape):
    self.scales = self.add_weight(name="scales", shape=(2,), initializer="zeros")


def standard_inputs(gather):
    def compute(model, x, y):
        every = gather(x)
        x = (x - tf.reduce_mean(every, 0)) / (tf.math.reduce_std(every, 0) + 1e-3)
        return model.compute_loss(x, y, model(x, training=True))

    return compute


def mixed(partner, share=0.7):
    """Mixup with a partner within the batch, and the same for the labels."""

    def compute(model, x, y):
        y = tf.one_hot(y, CLASSES)
        x, y = (share * t + (1 - share) * partner(t) for t in (x, y))
        return keras.losses.CategoricalCrossentropy(from_logits=True)(y, model(x))

    return compute


def reversed_of_all(rows):
    return own_rows(tf.reverse(all_rows(rows), axis=[0]), rows)


def gradient_penalty(scale):
    """A critic whose gradient by each row has norm one (WGAN-GP)."""

    def compute(model, x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            score = tf.reduce_sum(model(x), axis=-1)
        norms = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(score, x)), -1) + 1e-6)
        return scale(tf.reduce_mean(score) + 5 * tf.reduce_mean(tf.square(norms - 1)))

    return compute


def distilled(model, x, y):
    """A frozen teacher, here a linear one, softened."""
    teacher = tf.stop_gradient(2 * x[:, :CLASSES])
    p = model(x)
    soft = keras.losses.KLDivergence()(tf.nn.softmax(teacher / 3), tf.nn.softmax(p / 3))
    return 0.3 * cross_entropy()(y, p) + 0.7 * 9 * soft


def views_contrasted(gather, own):
    """SimCLR with two views of each row; a row's partner is its other view."""

    def compute(model, x, y):
        first, second = (
            tf.math.l2_normalize(model(view), axis=-1) for view in (x, x * 0.8 + 0.1)
        )
        scores = tf.matmul(first, gather(second), transpose_b=True) / 0.2
        labels = own(tf.range(tf.shape(gather(second))[0]), x)
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return losses(labels, scores)

    return compute


def in_chunks(model, x, y):
    """Row by row in a `tf.map_fn`, and a Keras loss of what comes out."""
    p = tf.map_fn(lambda row: model(row[None])[0], x)
    return cross_entropy()(y, p)


def of_examples(model, x, y):
    """Losses of rows without a reduction, their weights, and a mean with its share."""
    losses = keras.losses.SparseCategoricalCrossentropy(True, reduction="none")
    return local_mean(tf.reduce_mean((1.0 + tf.abs(x[:, 0])) * losses(y, model(x))))


OWN = {
    "mean by hand": ("warn", own_loss(mean_by_hand(lambda x: x)), "local_mean"),
    "mean by hand, fixed": ("exact", own_loss(mean_by_hand(local_mean)), None),
    "sum said": ("exact", own_loss(lambda m, x, y: local_sum(sum_by_hand(m, x, y)))),
    "sum": ("exact", own_loss(sum_by_hand, returned=False)),
    "sum returned": ("told", own_loss(sum_by_hand), "local_sum|all_sum"),
    "mean in a cond": (
        "warn",
        own_loss(curriculum),
        "local_mean",
    ),
    "mean in a cond, fixed": (
        "exact",
        own_loss(lambda m, x, y: local_mean(curriculum(m, x, y))),
    ),
    "means in a while_loop": (
        "warn",
        own_loss(sharper),
        "local_mean",
    ),
    "means in a while_loop, fixed": (
        "exact",
        own_loss(lambda m, x, y: local_mean(sharper(m, x, y))),
    ),
    "added losses": (
        "warn",
        own_loss(added_losses(lambda x: x), __init__=regularised),
        "local_mean",
    ),
    "added losses, fixed": (
        "exact",
        own_loss(added_losses(local_mean), __init__=regularised),
    ),
    "uncertainties": (
        "warn",
        own_loss(uncertain(lambda x: x), build=build_with_scales),
        "local_mean",
    ),
    "uncertainties, fixed": (
        "exact",
        own_loss(uncertain(local_mean), build=build_with_scales),
    ),
    "inputs standardised": (
        "warn",
        own_loss(standard_inputs(lambda x: x)),
        "all_rows|all_sum",
    ),
    "inputs standardised, fixed": ("exact", own_loss(standard_inputs(all_rows))),
    "mixup with reversed rows": (
        "warn",
        own_loss(mixed(lambda rows: tf.reverse(rows, axis=[0]))),
        "all_rows",
    ),
    "mixup, fixed": ("exact", own_loss(mixed(reversed_of_all))),
    "gradient penalty": (
        "warn",
        own_loss(gradient_penalty(lambda x: x)),
        "local_mean",
    ),
    "gradient penalty, fixed": ("exact", own_loss(gradient_penalty(local_mean))),
    "distillation": ("exact", own_loss(distilled)),
    "two views": (
        "warn",
        own_loss(views_contrasted(lambda x: x, lambda labels, like: labels)),
        "all_rows",
    ),
    "two views, fixed": ("exact", own_loss(views_contrasted(all_rows, own_rows))),
    "rows by map_fn": ("exact", own_loss(in_chunks)),
    "weighted mean": ("exact", own_loss(of_examples)),
    "constant added": (
        "warn",
        own_loss(lambda m, x, y: m.compute_loss(x, y, m(x)) + 1.0),
        "local_mean",
    ),
}
for _name, (_kind, _run, *_fix) in OWN.items():
    add(f"step: {_name}", _kind, _run, *_fix)


def moving_teacher(self, data):
    """A mean teacher: its weights follow the student's, whose loss has both."""
    x, y = data
    with tf.GradientTape() as tape:
        p = self(x, training=True)
        apart = keras.losses.MeanSquaredError()(self.teacher(x), p)
        loss = self.compute_loss(x, y, p) + 0.5 * apart
    apply(self, tape, loss)
    for old, new in zip(self.teacher.weights, self.inner.weights, strict=True):
        old.assign(0.9 * old + 0.1 * new)
    return {"total": loss}


def with_teacher(self):
    Wrapped.__init__(self)
    self.teacher = dense()
    self.teacher.trainable = False


add("step: moving teacher", "exact", with_step(moving_teacher, __init__=with_teacher))


def adversaries(of_scores, scale=lambda loss: loss):
    """A generator and a discriminator, each with its optimizer."""

    def step(self, data):
        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            made = self.inner(x)
            right, wrong = self.critic(x[:, :CLASSES]), self.critic(made)
            ones, zeros = tf.ones_like(right), tf.zeros_like(right)
            critics = scale(of_scores(ones, right)) + scale(of_scores(zeros, wrong))
            generators = scale(of_scores(ones, wrong))
        mine, other = self.inner.trainable_variables, self.critic.trainable_variables
        self.optimizer.apply(tape.gradient(generators, mine), mine)
        self.second.apply(tape.gradient(critics, other), other)
        return {"critic": critics, "generator": generators}

    def init(self):
        Wrapped.__init__(self)
        self.critic = keras.Sequential(
            [
                keras.Input((CLASSES,)),
                keras.layers.Dense(4, "tanh"),
                keras.layers.Dense(1),
            ]
        )
        self.second = keras.optimizers.SGD(0.05)

    return with_step(step, __init__=init)


def by_hand(y, p):
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, p))


_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
add("adversaries", "exact", adversaries(_entropy), replicas=(2, 3))
add("adversaries, means by hand", "warn", adversaries(by_hand), "local_mean")
add("adversaries, fixed", "exact", adversaries(by_hand, local_mean))


def with_metrics(self, data):
    """Keras' guide: listed metrics, of which one is a number for all rows."""
    x, y = data
    with tf.GradientTape() as tape:
        p = self(x, training=True)
        loss = self.compute_loss(x, y, p)
    apply(self, tape, loss)
    for metric in self.metrics:
        if metric.name == "loss":
            metric.update_state(loss)
        else:
            metric.update_state(y, p)
    return {m.name: m.result() for m in self.metrics}


add("step: Keras' guide", "exact", with_step(with_metrics))


def by_targets(self, data):
    """Regression with a loss object, and a metric of rows beside the model."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = keras.losses.Huber()(y, self(x, training=True))
    apply(self, tape, loss)
    return {"total": loss, "targets": tf.reduce_mean(y)}


add("step: loss object", "exact", with_step(by_targets, None, rows_and_targets))
