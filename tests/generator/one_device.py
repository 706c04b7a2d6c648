"""One device's answer to a program, and how far rounding can carry it.

The bound is that of `tfdp.tools.testing.rounding`, for any model: one device's run is
repeated ("twins") with the rows of each batch in another order and the inputs and first
weights moved by one rounding each. What that does not reach is added as in
`tests/support/conformance_reference.py`: where terms of a gradient cancel exactly on
one device, replicas that scale them before they add them keep a rounding of their sum.
So each entry of each gradient is also raised or lowered at random by

    2 sqrt(n) u max|g|

with n the rows of the batch and the widest layer: the sum of n terms of the size of the
variable's largest entry, in two orders (Higham and Mary 2019, section 3).
"""

import math

import numpy as np
import tensorflow as tf

from tests.generator.build import Rows, make_model
from tests.generator.calls import Caller
from tests.generator.layers import RANDOM
from tests.generator.program import layer_names
from tests.generator.train_steps import halves
from tests.support.parity import perturb
from tfdp.tools.testing import rounding
from tfdp.tools.testing.model_parts import compute_round_off, unit_round_off

TWINS = 3
WIDEST = 64


def is_random(program):
    """Whether the program draws numbers, so that one device's answer is not unique."""
    return any(name in RANDOM for name in layer_names(program))


def may_overflow(program):
    """Whether sums may leave float16: those of replicas, which are smaller, may not.

    Keras' and tfdp's first loss scale is 2^15; `optimizers.make_optimizer` takes 2^10.
    """
    chosen = program.optimizer
    return program.policy == "mixed_float16" and (
        chosen.wrapper != "loss_scale" or "loss_scale_factor" in chosen.options
    )


def make_rows(program):
    return (
        Rows(program, sum(program.data.batches), seed=1),
        Rows(program, program.data.validation_rows, seed=2),
    )


def optimizers_of(model):
    found = [model.optimizer, getattr(model, "second_optimizer", None)]
    return [optimizer for optimizer in found if optimizer is not None]


def build_optimizers(model):
    """Before the first step, so that the run can be repeated from the start."""
    for optimizer, variables in zip(optimizers_of(model), halves(model), strict=True):
        # Keras' loss scaler does not note what the optimizer inside makes for itself.
        getattr(optimizer, "inner_optimizer", optimizer).build(variables)
        if not optimizer.built:
            optimizer.build(variables)


def state_of(model):
    """Name -> array: weights and the optimizers' variables, counters apart."""
    found, exact = {}, {}
    for place, weight in enumerate(model.weights):
        if "seed_generator" not in weight.path:
            found[f"weight {place} {weight.path}"] = value_of(weight)
    chosen = optimizers_of(model)
    if len(chosen) > 1:
        # Keras builds the compiled one for all variables under a strategy, and for
        # those that it is given on one device.
        return found, exact
    for variable in inner_variables(chosen[0]):
        key = f"optimizer {variable.path.split('/')[-1]}"
        is_float = variable.dtype.startswith(("float", "bfloat"))
        # `MultiOptimizer` has several variables of a name.
        same = found if is_float else exact
        same[f"{key} {len(same)}" if key in same else key] = value_of(variable)
    return found, exact


def inner_variables(optimizer):
    """Those of the optimizer that updates; accumulators are each replica's own."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [v for v in inner.variables if "gradient_accumulator" not in v.path]


def value_of(variable):
    return np.asarray(variable.numpy(), "float64")


class OneDevice:
    """A program on one device, to be run again and again."""

    def __init__(self, program):
        self.program = program
        self.rows, self.validation = make_rows(program)
        self.model = make_model(program)
        build_optimizers(self.model)
        self.unit = compute_round_off(self.model)
        self.size = tf.Variable(0.0, trainable=False)
        self.seed = tf.Variable(0, trainable=False, dtype=tf.int64)
        n = max(program.data.sizes) + WIDEST
        # Keras takes losses in float32 whatever the policy: each row's gradient is
        # scaled there, on one device by one number, on replicas by two.
        unit = max(self.unit, unit_round_off("float32"))
        for optimizer in optimizers_of(self.model):
            self._perturb(optimizer, 2 * math.sqrt(n) * unit)
        self.variables = list({id(v): v for v in self._variables()}.values())
        self.start = [variable.numpy() for variable in self.variables]

    def _variables(self):
        yield from self.model.variables
        for optimizer in optimizers_of(self.model):
            yield from optimizer.variables
            yield from getattr(optimizer, "inner_optimizer", optimizer).variables

    def _perturb(self, optimizer, relative):
        apply = optimizer.apply

        def perturbed(grads, trainable_variables=None):
            step = tf.cast(optimizer.iterations, tf.int64)
            layout = self.program.layout
            if layout.shard and layout.replicas > 1:
                # Behind shards the rows of a word that occurs twice are added first
                # (docs/sharding.md), and then squared. One replica has no shards.
                grads = [g if g is None else tf.convert_to_tensor(g) for g in grads]
            changed = [
                gradient
                if gradient is None
                else self._raised(gradient, relative, [self.seed, 97 * step + place])
                for place, gradient in enumerate(grads)
            ]
            return apply(changed, trainable_variables)

        optimizer.apply = perturbed

    def _raised(self, gradient, relative, seed):
        error = relative * tf.reduce_max(tf.abs(getattr(gradient, "values", gradient)))
        error = tf.where(tf.math.is_finite(error), error, 0) * tf.cast(
            self.size, error.dtype
        )
        return perturb(gradient, error, tf.stack(seed), keep_zeros=False)

    def run(self, twin=0):
        """What the program gives; `twin` 0 as it is, others moved by rounding."""
        rng = np.random.default_rng([11, twin])
        for variable, value in zip(self.variables, self.start, strict=True):
            if twin and variable.trainable:
                value = rounding.nudge(value, self.unit, rng)
            variable.assign(value)
        self.model.reset_metrics()
        self.size.assign(float(twin > 0))
        self.seed.assign(twin)
        rows = self._moved(rng) if twin else self.rows
        # One device finds an end that it was not told of by a step without a batch, and
        # that counts: the optimizer's counter, decay, the mean of an output's losses.
        # Not so with jit_compile or steps_per_execution, and never under tfdp.
        caller = Caller(
            self.program, self.model, rows, self.validation, tells_length=True
        )
        values = caller.call_all()
        if twin:
            values = self._in_first_order(values)
        state, exact = state_of(self.model)
        return values | state, exact

    def _moved(self, rng):
        """The rows of each batch in another order, but where layers draw numbers."""
        sizes = self.program.data.sizes
        ends = np.cumsum(sizes)
        self.order = np.concatenate(
            [
                end - size + rng.permutation(size)
                for end, size in zip(ends, sizes, strict=True)
            ]
        )
        return self.rows.changed(
            self.order, lambda array: rounding.nudge(array, self.unit, rng)
        )

    def _in_first_order(self, values):
        found = dict(values)
        for key, value in values.items():
            if "predict" in key:
                # `predict_on_batch` has the last batch only.
                order = self.order[-len(value) :] - (len(self.order) - len(value))
                found[key] = np.empty_like(value)
                found[key][order] = value
        return found


def bounds(program, one, answer, twins):
    """For each value of the answer, what rounding explains of a difference.

    The stored part is that of `rounding.bound`: each update rounds. A mean of n terms
    of the size of the largest that the program tells rounds n times at most.
    """
    steps = len(program.data.sizes) * program.epochs * len(program.calls)
    terms = [np.abs(v) for key, v in answer.items() if ": " in key and v.size]
    size = max([1.0, *(float(np.nanmax(t)) for t in terms if np.isfinite(t).any())])
    n = sum(program.data.batches) + WIDEST
    found = {}
    for key, value in answer.items():
        moved = [rounding.difference(twin[key], value) for twin in twins]
        spread = np.max([_finite_largest(m) for m in moved], initial=0.0)
        if ": " in key:
            # Metrics are float32 whatever the policy.
            unit = max(one.unit, unit_round_off("float32"))
            stored = 2 * math.sqrt(n) * unit * size
        else:
            is_double = program.policy == "float64"
            unit = unit_round_off("float64" if is_double else "float32")
            stored = 2 * (steps + 1) * unit * _finite_largest(value)
        found[key] = rounding.SAFETY * spread + stored
    return found


def _finite_largest(values):
    finite = values[np.isfinite(values)]
    return float(np.max(np.abs(finite), initial=0.0))
