"""Small programs that the analysis of a step is held to, and losses for `compile`.

The table goes on in `lint_layers`, `lint_models`, `lint_gradients`, `lint_steps` and
`lint_loops`. Each program is of one kind:

warn    its numbers on N replicas are not one device's, by the program's own doing: the
        user gets one warning, which contains the one-line fix
exact   its weights and reports are one device's, and there is no warning
told    either of the two
silent  no warning, though the numbers differ, as documented (BatchNormalization)

Where its fix can be applied, a `warn` program has an `exact` twin: "NAME, fixed".
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.parity import UNIT_ROUND_OFF, make_strategy
from tfdp.losses import all_rows, local_mean, local_sum, own_rows

ops = keras.ops

#: Two batches of ten rows and one of seven, of which two replicas get four and three.
ROWS, BATCH, FEATURES, CLASSES, WIDTH, RATE = 27, 10, 6, 4, 8, 0.1
STEPS = 3
# Two orders of a gradient's sums differ by 2 n u A (docs/notes/exactness.md): n is at
# most 40, the rows of a batch and the widths of three layers and of the loss on the way
# forward and back, and A, the gradient with absolute values, is below 8. The rate is at
# most RATE, or the program names a smaller bound by itself.
BOUND = 2 * 40 * UNIT_ROUND_OFF * 8 * STEPS * RATE
# A reported number is such a sum, of weights that are off by BOUND, times their slope,
# which is below 8 as well. It is relative to numbers above 1.
REPORT_BOUND = 8 * BOUND


@dataclasses.dataclass(frozen=True)
class Program:
    """A row of the table.

    Args:
      kind: warn, exact, told or silent; see the module.
      run: takes a strategy, or None for one device; returns the weights after the last
        step and the reported numbers, each a list of arrays.
      fix: a regular expression for what the warning names as the fix.
      replicas: on how many it runs.
      report_bound: where a report is rounded more coarsely than in float32.
    """

    kind: str
    run: Callable[[Any], tuple[list, list]]
    fix: str | None = None
    replicas: Sequence[int] = (2,)
    report_bound: float = REPORT_BOUND


PROGRAMS: dict[str, Program] = {}


def add(name: str, kind: str, run: Callable, fix: str | None = None, **more: Any):
    if name in PROGRAMS or (kind in ("warn", "told")) != (fix is not None):
        raise ValueError(f"{name}: a name twice, or or a fix without a warning")
    PROGRAMS[name] = Program(kind, run, fix, **more)


@functools.cache
def strategy_of(replicas: int):
    return make_strategy(replicas)


def scope_of(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def summed(value):
    """The sum over the replicas of a number, or of a structure of tensors."""
    context = tf.distribute.get_replica_context()
    return value if context is None else context.all_reduce("sum", value)


# Data. Rows differ in size and the classes drift, so that the replicas' parts differ in
# all that is counted of them.


@functools.cache
def rows_and_labels(count=ROWS):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(count, FEATURES)) * draw.uniform(0.3, 2.0, size=(count, 1))
    place = np.arange(count) % 10 / 10
    y = np.minimum(draw.random(count) * (0.6 + 2 * place), 0.999) * CLASSES
    return x.astype("float32"), y.astype("int64")


@functools.cache
def rows_and_targets():
    x, y = rows_and_labels()
    return x, np.sin(x[:, :CLASSES] + y[:, None]).astype("float32")


@functools.cache
def rows_and_anchors():
    """Five anchors for each row, of which more and more are positive."""
    draw = np.random.default_rng(2)
    chance = np.linspace(0.05, 0.9, 10)[np.arange(ROWS) % 10, None]
    return rows_and_labels()[0], (draw.random((ROWS, 5)) < chance).astype("float32")


@functools.cache
def words_and_items():
    """Queries of five words, and the item that each belongs to."""
    draw = np.random.default_rng(4)
    return draw.integers(1, 20, (ROWS, 5)), draw.integers(1, 20, ROWS)


# Models.


def dense(outputs=CLASSES):
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(WIDTH, "tanh"),
            keras.layers.Dense(outputs),
        ]
    )


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def of_rows(y, p):
    """The cross-entropy of each row."""
    y = ops.reshape(y, (-1,))
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


class Wrapped(keras.Model):
    """A subclass model; the programs override its methods."""

    outputs_of_inner = CLASSES

    def __init__(self):
        super().__init__()
        self.inner = dense(self.outputs_of_inner)

    def call(self, x, training=False):
        return self.inner(x, training=training)


def fitted(strategy, build, loss=None, data=None, *, rate=RATE, metrics=None):
    """Builds and compiles in the scope, and fits for one epoch."""
    x, y = data or rows_and_labels()
    keras.utils.set_random_seed(3)
    with scope_of(strategy):
        model = build()
        model(x[:2])
        model.compile(
            keras.optimizers.SGD(rate),
            loss() if isinstance(loss, type) else loss,
            metrics=metrics() if metrics else None,
            jit_compile=False,
        )
    kept = model.fit(x, y, BATCH, shuffle=False, verbose=0).history
    return model.get_weights(), [kept[name] for name in sorted(kept)]


# Losses that are given to `compile`.


def with_loss(loss, data=None, outputs=CLASSES, **options):
    return lambda strategy: fitted(
        strategy, lambda: dense(outputs), loss, data and data(), **options
    )


def soft_dice(y, p):
    y, p = ops.one_hot(ops.reshape(y, (-1,)), CLASSES), ops.softmax(p)
    return 1 - 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p * p) + 1e-6)


def concordance(y, p):
    """One minus Lin's coefficient, over all entries of the batch."""
    mean_y, mean_p = ops.mean(y), ops.mean(p)
    both = ops.mean((y - mean_y) * (p - mean_p))
    return 1 - 2 * both / (ops.var(y) + ops.var(p) + ops.square(mean_y - mean_p))


def unexplained_variance(y, p):
    left = ops.sum(ops.square(y - p))
    return left / ops.sum(ops.square(y - ops.mean(y, axis=0)))


class Correlation(keras.losses.Loss):
    """Pearson's coefficient of each output over the batch."""

    def call(self, y, p):
        y, p = y - ops.mean(y, 0), p - ops.mean(p, 0)
        sizes = ops.sqrt(ops.sum(y * y, 0) * ops.sum(p * p, 0))
        return 1 - ops.mean(ops.sum(y * p, 0) / (sizes + 1e-6))


def discrepancy(y, p):
    """The maximum mean discrepancy between predictions and targets, by distances."""

    def kernel(a, b):
        distances = ops.sum(ops.square(a[:, None] - b[None]), -1)
        return ops.mean(ops.exp(-0.2 * distances))

    return kernel(y, y) + kernel(p, p) - 2 * kernel(y, p)


def barlow_twins(y, p):
    """Two embeddings, the halves of the outputs, standardised over the batch."""

    def standard(z):
        return (z - ops.mean(z, 0)) / (ops.std(z, 0) + 1e-3)

    first, second = ops.split(p, 2, axis=-1)
    count = ops.cast(ops.shape(p)[0], p.dtype)
    between = ops.matmul(ops.transpose(standard(first)), standard(second)) / count
    return ops.mean(ops.square(between - ops.eye(2)))


def variance_hinge(y, p):
    """VICReg: the hinge of the deviation over the batch, and the error of the rows."""
    deviation = ops.sqrt(ops.var(p, axis=0) + 1e-4)
    return ops.mean(ops.relu(1 - deviation)) + ops.mean(ops.square(p - y))


def hardest(count):
    return lambda y, p: ops.top_k(of_rows(y, p), count)[0]


def hardest_of_all(y, p):
    found = ops.top_k(of_rows(all_rows(y), all_rows(p)), 3)[0]
    return local_mean(ops.mean(found))


def balanced(total):
    """Rare classes count more; `total` adds up the batch's counts of the classes."""

    def loss(y, p):
        found = ops.one_hot(ops.reshape(y, (-1,)), CLASSES)
        counts = total(ops.sum(found, axis=0))
        weights = ops.sum(counts) / (CLASSES * ops.maximum(counts, 1.0))
        return ops.sum(found * weights, -1) * of_rows(y, p)

    return loss


def focal(y, p, total=lambda count: count, of_total=lambda loss: loss):
    """RetinaNet's loss: the sum over anchors by the number of positive ones."""
    chance = ops.sigmoid(p)
    right = ops.where(y > 0.5, chance, 1 - chance)
    losses = -0.25 * ops.square(1 - right) * ops.log(right + 1e-6)
    return of_total(ops.sum(losses) / ops.maximum(total(ops.sum(y)), 1.0))


def by_their_mean(gather):
    def loss(y, p):
        weights = 1.0 + ops.cast(ops.reshape(y, (-1,)), "float32")
        return of_rows(y, p) * weights / ops.mean(gather(weights))

    return loss


def worst_groups(y, p):
    """Rows with large losses count more: a softmax over the batch."""
    losses = of_rows(y, p)
    return ops.sum(ops.stop_gradient(ops.softmax(losses, axis=0)) * losses)


def tilted(y, p):
    losses = of_rows(y, p)
    return ops.logsumexp(losses) - ops.log(ops.cast(ops.shape(losses)[0], "float32"))


def tilted_of_all(y, p):
    return local_mean(tilted(all_rows(y), all_rows(p)))


def ranked(gather):
    """RankNet: each row against each other row of the batch."""

    def loss(y, p):
        score, other = p[:, 0], gather(p[:, 0])
        grade, other_grade = y[:, 0], gather(y[:, 0])
        before = ops.cast(grade[:, None] > other_grade[None], "float32")
        return ops.mean(before * ops.softplus(other[None] - score[:, None]), axis=1)

    return loss


def centres(y, p):
    """The distance of each row to the mean of its class in the batch."""
    y = ops.cast(ops.reshape(y, (-1,)), "int32")
    means = tf.math.unsorted_segment_mean(p, y, CLASSES)
    return of_rows(y, p) + ops.sum(ops.square(p - ops.take(means, y, axis=0)), -1)


def spread(y, p):
    losses = of_rows(y, p)
    return ops.mean(losses) + 0.5 * ops.var(losses)


def root(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


class Root(keras.losses.Loss):
    """As people write it: a class, whose `call` returns one number."""

    def call(self, y, p):
        return tf.sqrt(tf.reduce_mean(tf.math.squared_difference(y, p)))


def root_of_all(y, p):
    return local_mean(root(all_rows(y), all_rows(p)))


def symmetric_contrast(y, p):
    """CLIP: the halves of the outputs are an image and its text."""
    first, second = (ops.normalize(z, axis=-1) for z in ops.split(p, 2, axis=-1))
    scores = 5 * ops.matmul(first, ops.transpose(second))
    labels = ops.arange(ops.shape(p)[0])
    there = keras.losses.sparse_categorical_crossentropy(labels, scores, True)
    back = keras.losses.sparse_categorical_crossentropy(
        labels, ops.transpose(scores), True
    )
    return (there + back) / 2


def symmetric_contrast_of_all(y, p):
    return own_rows(symmetric_contrast(None, all_rows(p)), p)


def smoothed(y, p):
    right = ops.one_hot(ops.reshape(y, (-1,)), CLASSES) * 0.9 + 0.1 / CLASSES
    return -ops.sum(right * ops.log_softmax(p), axis=-1)


def ranked_probability(y, p):
    """Cumulated along the classes, sorted within each row: no row sees another."""
    right = ops.one_hot(ops.reshape(y, (-1,)), CLASSES)
    between = ops.cumsum(right, axis=1) - ops.cumsum(ops.softmax(p), axis=1)
    return ops.mean(ops.sort(ops.square(between), axis=-1), axis=1)


def row_products(y, p):
    """Products along the columns, written in three ways."""
    one = tf.einsum("bc,bc->b", y, p)
    table = tf.constant(np.eye(CLASSES, dtype="float32") + 0.1)
    two = tf.reduce_sum(tf.tensordot(p, table, axes=1) * y, axis=-1)
    three = tf.squeeze(tf.matmul(y[:, None, :], p[:, :, None]), axis=[1, 2])
    return tf.square(one - 1.0) + 0.5 * tf.square(two) + tf.nn.relu(three)


def clipped_where(y, p):
    """Huber's loss by hand."""
    far = ops.abs(y - p)
    return ops.mean(ops.where(far < 0.5, ops.square(far), far - 0.25), axis=-1)


def pinball(y, p):
    each = [ops.maximum(q * (y - p), (q - 1) * (y - p)) for q in (0.1, 0.5, 0.9)]
    return ops.mean(ops.stack(each, axis=-1), axis=(1, 2))


def class_weighted(y, p):
    weights = ops.convert_to_tensor([0.5, 1.0, 2.0, 4.0])
    return ops.take(weights, ops.cast(ops.reshape(y, (-1,)), "int32")) * of_rows(y, p)


def local_mean_of_mean(y, p):
    return local_mean(tf.reduce_mean(of_rows(y, p)))


def local_mean_of_two_axes(y, p):
    """Means along the columns first, then along the rows, of a stack of both terms."""
    columns = tf.reduce_mean(tf.square(y - p), axis=-1)
    return local_mean(tf.reduce_mean(tf.stack([columns, 0.1 * columns], axis=1)))


def sum_over_rows(y, p):
    return ops.sum(ops.square(y - p))


TARGETS = {"data": rows_and_targets}
ANCHORS = {"data": rows_and_anchors, "outputs": 5}
WHOLE = {  # losses of the whole batch: (loss, of which data, fix)
    "soft dice": (soft_dice, {}, "all_rows"),
    "concordance": (concordance, TARGETS, "all_rows"),
    "unexplained variance": (unexplained_variance, TARGETS, "all_rows"),
    "correlation class": (Correlation, TARGETS, "all_rows"),
    "mean discrepancy": (discrepancy, TARGETS, "all_rows"),
    "Barlow twins": (barlow_twins, {}, "all_rows"),
    "variance hinge": (variance_hinge, TARGETS, "all_rows"),
    "hardest rows": (hardest(3), {}, "all_rows"),
    "classes balanced": (balanced(lambda n: n), {}, "all_sum|all_rows"),
    "focal by positives": (focal, ANCHORS, "all_sum|all_rows"),
    "weights by mean": (by_their_mean(lambda x: x), {}, "all_sum|all_rows"),
    "softmax over losses": (worst_groups, {}, "all_rows"),
    "tilted": (tilted, {}, "all_rows"),
    "ranked pairs": (ranked(lambda x: x), TARGETS, "all_rows"),
    "class centres": (centres, {}, "all_sum|all_rows"),
    "variance of losses": (spread, {}, "all_rows"),
    "root of mean, class": (Root, TARGETS, "all_rows"),
    "largest loss": (lambda y, p: ops.max(of_rows(y, p)), {}, "all_rows"),
    "contrast both ways": (symmetric_contrast, {}, "all_rows"),
    "local_mean of a root": (
        lambda y, p: local_mean(root(y, p)),
        TARGETS,
        "all_rows",
    ),
    "scalar mean": (lambda y, p: ops.mean(of_rows(y, p)), {}, "local_mean"),
    "local_mean of a sum": (
        lambda y, p: local_mean(ops.sum(of_rows(y, p))),
        {"rate": 0.01},
        "local_sum",
    ),
    "local_mean forgotten": (  # each replica has the loss of all rows
        lambda y, p: soft_dice(all_rows(y), all_rows(p)),
        {},
        "local_mean",
    ),
}
OF_ALL = {  # the fixes, and losses that need none
    "soft dice, fixed": (
        lambda y, p: local_mean(soft_dice(all_rows(y), all_rows(p))),
        {},
    ),
    "concordance, fixed": (
        lambda y, p: local_mean(concordance(all_rows(y), all_rows(p))),
        TARGETS,
    ),
    "Barlow twins, fixed": (lambda y, p: local_mean(barlow_twins(y, all_rows(p))), {}),
    "hardest rows, fixed": (hardest_of_all, {}),
    "classes balanced, fixed": (balanced(summed), {}),
    "focal by positives, fixed": (
        lambda y, p: focal(y, p, summed, local_sum),
        ANCHORS,
    ),
    "weights by mean, fixed": (by_their_mean(all_rows), {}),
    "tilted, fixed": (tilted_of_all, {}),
    "ranked pairs, fixed": (ranked(all_rows), TARGETS),
    "root of mean, fixed": (root_of_all, TARGETS),
    "contrast both ways, fixed": (symmetric_contrast_of_all, {}),
    "scalar mean, fixed": (local_mean_of_mean, {}),
    "local_sum of a sum": (
        lambda y, p: local_sum(ops.sum(of_rows(y, p))),
        {"rate": 0.01},
    ),
    "local_mean twice": (lambda y, p: local_mean(local_mean_of_mean(y, p)), {}),
    "label smoothing": (smoothed, {}),
    "ranked probability": (ranked_probability, {}),
    "row products": (row_products, TARGETS),
    "where by row": (clipped_where, TARGETS),
    "pinball": (pinball, TARGETS),
    "constant class weights": (class_weighted, {}),
    "mean along two axes": (local_mean_of_two_axes, TARGETS),
    "scalar sum": (sum_over_rows, {**TARGETS, "rate": 0.01}),
}


class SummedOfAll(keras.losses.Loss):
    """`own_rows` is forgotten: each replica adds up the values of all rows."""

    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y, p):
        return symmetric_contrast(None, all_rows(p))


for _name, (_loss, _options, _fix) in WHOLE.items():
    add(_name, "warn", with_loss(_loss, **_options), _fix)
add("own rows forgotten", "warn", with_loss(SummedOfAll, rate=0.01), "own_rows")
for _name, (_loss, _options) in OF_ALL.items():
    _replicas = (2, 3) if _name in ("soft dice, fixed", "ranked probability") else (2,)
    add(_name, "exact", with_loss(_loss, **_options), replicas=_replicas)
