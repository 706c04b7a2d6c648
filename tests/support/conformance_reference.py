"""One device's answer to a row of the conformance table, and how exact it can be.

The bound has two factors (Higham 2002, section 1.6: forward error = condition number x
backward error).

Backward error. Summing n terms in float32 in any order is off by at most
(n - 1) u sum|t| (Higham, eq. 4.4), and so is a dot product. Two runs that differ in the
order of summation compute the gradients of one batch with a difference of at most
2 n u A, where A is the gradient computed with absolute values throughout and n the
longest chain of additions: the rows of the batch, and on the way forward and back the
inputs of each layer. See `gradient_errors`.

Condition number. How far the weights move when the gradients of all steps move by that
much is asked of the optimizer itself: the run is repeated with every gradient entry of
every step raised or lowered at random by the backward error. Where the answer depends
smoothly on the D perturbed entries, with partial derivatives J_j times the error e,

    |change|  <=  e sum|J_j|  <=  sqrt(D) e sqrt(sum J_j^2)  =  sqrt(D) rms

with rms the root mean square change over random signs (small-sample condition
estimation, Kenney and Laub 1994). From eight repetitions rms is found to within a
factor of two nearly surely (chi-squared with 8 degrees of freedom falls below 2 once in
50 entries, below 0.5 once in 10^4), hence the factor 2. It holds for each entry of the
state by itself, for every optimizer, clipping and average, and so a new optimizer needs
no derivation of its own.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.support.conformance import (
    FEATURES,
    OUTPUTS,
    Outcome,
    global_batches,
    make_problem,
    outcome,
)
from tests.support.conformance_table import (
    LAYOUTS,
    OPTIONS,
    STEPS,
    Layout,
    build,
    make_optimizer,
)
from tests.support.parity import UNIT_ROUND_OFF, perturb

TINY = np.finfo("float32").tiny
REPETITIONS = 8
# The update itself rounds as well: some ten operations on numbers of the size of the
# weights and slots, in each step.
UPDATE_ROUNDINGS = 10


class OneDevice:
    """One optimizer with one option on one device, compiled.

    Args:
      optimizer, option: names of the row.
      parts: None takes each global batch whole. A layout takes it in the replicas'
        parts and adds their gradients in the replicas' order: what is left to compare
        is the exchange alone, where the rounding of half precision would hide it.
      dense: the embedding's gradient is a whole tensor. Keras' sparse updates and norms
        take each occurrence of a word by itself; accumulators and shards are dense.
    """

    def __init__(self, optimizer: str, option: str, parts: Layout | None, dense: bool):
        self.option = OPTIONS[option]
        self.parts = parts
        self.count = 1 if parts is None else parts.replicas
        self.micro_steps = self.option.accumulate_steps or 1
        self.dense = dense or self.micro_steps > 1
        self.model = make_problem(self.option.policy)
        self.optimizer = make_optimizer(optimizer, self.option, wrap=False)
        # Built lazily, ScheduleFreeAdamW would copy the weights in every step.
        build(self.optimizer, self.model.trainable_variables)
        self.variables = [*self.model.weights, *self.optimizer.variables]
        self.start = [variable.numpy() for variable in self.variables]
        self.errors = gradient_errors(
            self.model, max(8 * self.micro_steps, 8 * self._accumulated)
        )
        self.step = tf.function(
            self._step,
            input_signature=[
                tf.TensorSpec((None, FEATURES + 1)),
                tf.TensorSpec((None, OUTPUTS)),
                tf.TensorSpec((self.count,), tf.int32),
                tf.TensorSpec((2,), tf.int32),
                tf.TensorSpec(()),
            ],
            autograph=False,
        )

    @property
    def _accumulated(self) -> int:
        return self.option.arguments.get("gradient_accumulation_steps", 1)

    def run(self, kind: str, repetition: int = 0) -> Outcome:
        """Repetition 0 is the answer; the others are perturbed."""
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)
        losses, rows = 0.0, 0
        for step, (x, y, counts) in enumerate(self._batches(kind)):
            seed, size = (repetition, step), float(repetition > 0)
            losses += float(self.step(x, y, counts, seed, size)) * len(x)
            rows += len(x)
        return outcome(self.model, self.optimizer, losses / rows)

    def _batches(self, kind):
        batches = global_batches(kind, self.option.bad_row)
        for first in range(0, STEPS, self.micro_steps):
            group = batches[first : first + self.micro_steps]
            x, y = (np.concatenate(arrays) for arrays in zip(*group, strict=True))
            counts = [len(x)]
            if self.parts is not None:
                counts = self.parts.rows(kind)[first]
            yield x, y, counts

    def _step(self, x, y, counts, seed, size):
        split = [tf.split(tensor, counts, num=self.count) for tensor in (x, y)]
        loss_function = keras.losses.MeanSquaredError()
        losses, gradients = [], []
        for part_x, part_y in zip(*split, strict=True):
            share = tf.cast(tf.shape(part_x)[0], tf.float32) / tf.cast(
                tf.shape(x)[0], tf.float32
            )
            with tf.GradientTape() as tape:
                loss = loss_function(part_y, self.model(part_x, training=True)) * share
                scaled = self.optimizer.scale_loss(loss)
            losses.append(loss)
            found = tape.gradient(scaled, self.model.trainable_variables)
            if self.dense:
                found = [tf.convert_to_tensor(gradient) for gradient in found]
            gradients.append(found)
        total = [self._sum(terms) for terms in zip(*gradients, strict=True)]
        size = size * self.optimizer.scale_loss(tf.constant(1.0))
        perturbed = [
            perturb(gradient, size * error, seed + [7919 * place, 0], keep_zeros=True)
            for place, (gradient, error) in enumerate(
                zip(total, self.errors, strict=True)
            )
        ]
        self.optimizer.apply(perturbed, self.model.trainable_variables)
        return tf.add_n(losses)

    def _sum(self, terms):
        if isinstance(terms[0], tf.IndexedSlices):
            return tf.IndexedSlices(
                tf.concat([t.values for t in terms], 0),
                tf.concat([t.indices for t in terms], 0),
                terms[0].dense_shape,
            )
        if self.parts is not None and self.parts.is_two_level:
            terms = [terms[0] + terms[1], terms[2] + terms[3]]
        return functools.reduce(tf.add, terms)


def gradient_errors(model, rows):
    """By variable, how far two summation orders may be apart: 2 n u A (see the top).

    A is taken with absolute values at the first weights, of the batch with the largest
    mean, and doubled because the weights move.
    """
    embedding, kernel, _ = (np.abs(w.numpy()) for w in model.trainable_variables)
    sizes = []
    for x, y in global_batches("even", None):
        features, words = np.abs(x[:, :-1]), x[:, -1].astype(int)
        joined = np.concatenate([features, embedding[words]], axis=1)
        # |tanh| and its derivative are at most 1.
        backward = (1 + np.abs(y)) * 2 / OUTPUTS / len(x)
        sizes.append(
            [
                # One slice per row: its sum with other rows is taken by the update.
                (backward @ kernel[FEATURES:].T).max(),
                (joined.T @ backward).max(),
                backward.sum(axis=0).max(),
            ]
        )
    chain = rows + len(kernel) + 1 + OUTPUTS
    return 2 * chain * UNIT_ROUND_OFF * 2 * np.max(sizes, axis=0)


@functools.lru_cache(maxsize=1)
def _one_device(optimizer, option, layout, dense):
    return OneDevice(optimizer, option, LAYOUTS[layout] if layout else None, dense)


@functools.cache
def reference(optimizer: str, option: str, kind: str, layout: str | None, dense: bool):
    """The answer of one device, the movement, and the bound, entry by entry.

    Args:
      layout: takes the batches in that layout's parts; None takes them whole.
      dense: see `OneDevice`.
    """
    one = _one_device(optimizer, option, layout, dense)
    start = outcome_of_start(one)
    answer = one.run(kind)
    changes = [
        [a - b for a, b in zip(one.run(kind, 1 + i).state, answer.state, strict=True)]
        for i in range(REPETITIONS)
    ]
    perturbed_entries = STEPS * sum(np.size(w) for w in one.model.trainable_variables)
    bounds = []
    for place, value in enumerate(answer.state):
        rms = np.sqrt(np.mean([np.square(c[place]) for c in changes], axis=0))
        rounding = STEPS * UPDATE_ROUNDINGS * UNIT_ROUND_OFF * np.abs(value).max()
        bounds.append(2 * np.sqrt(perturbed_entries) * rms + rounding)
    movement = [np.abs(a - b) for a, b in zip(answer.state, start.state, strict=True)]
    return answer, movement, bounds


def worst_ratio(got, answer, bounds):
    """The largest |got - answer| / bound of lists of arrays; NaN where one is NaN."""
    ratios = [
        np.max(np.abs(a - b) / np.maximum(bound, TINY), initial=0.0)
        for a, b, bound in zip(got, answer, bounds, strict=True)
    ]
    # Python's max would pass over a NaN that does not come first.
    return float(np.max(ratios))


def outcome_of_start(one):
    for variable, value in zip(one.variables, one.start, strict=True):
        variable.assign(value)
    return outcome(one.model, one.optimizer, 0.0)
