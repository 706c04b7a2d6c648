"""Keras optimizers whose state is sharded: what they do besides their own arithmetic.

An elementwise update needs no help: it works on shards as it stands. What looks at
whole tensors does, and gets it from instance attributes while a step is traced:

    _clip_gradients           norms are taken over the shards of all replicas
    update_step               state is as flat as the shard: Keras' sums ask for shapes
    _backend_update_step      the updated shards are gathered into the mirrored weights
    moving averages           are updated, and written back, shard by shard

LARS and LAMB offer `update_phases`: the norms of all layers travel in one small sum.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.names import current_rank
from tfdp._private.optimizer_hooks import (
    APPLY_GRADIENTS,
    AVERAGE,
    CLIP,
    DECAY,
    IN_USE,
    ON_THE_WAY,
    OVERWRITE_WITH_AVERAGE,
    UPDATE_OF_STRATEGY,
    UPDATE_STEP,
    averages_of,
    by_keras,
    strategy_of,
    variable_index,
)
from tfdp.errors import ConfigurationError
from tfdp.plan.exclusions import variable_path
from tfdp.sharding.updates import ShardUpdates
from tfdp.sharding.variables import ShardedVariable, shard_kind
from tfdp.tracing.run import current_run

# Those whose update of an element needs that element only.
ELEMENTWISE = (
    "SGD RMSprop Adam Adadelta Adagrad Adamax Nadam Ftrl Lion ScheduleFreeAdamW"
).split()
ADVICE = {
    "Lamb": "Take tfdp.optimizers.LAMB(form='keras'), which is the same to the bit.",
    "Adafactor": "It needs the rows and columns of whole matrices.",
    "Muon": "It needs whole matrices.",
    "OneBitAdam": "It sends its momentum, of whole variables.",
    "OneBitLAMB": "It sends its momentum, of whole variables.",
}


def check_shardable(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an optimizer whose update of a shard would not be that of the whole.

    Raises:
      ConfigurationError: naming the optimizer and what to do.
    """
    is_elementwise = getattr(optimizer, "is_elementwise", False)
    check_own_hooks(optimizer)
    # What sends its momentum does so in whole variables (tfdp.step.compression).
    if not hasattr(optimizer, "momentum_compression") and (
        hasattr(optimizer, "update_phases") or is_elementwise
    ):
        return
    owner = next(c for c in type(optimizer).__mro__ if "update_step" in vars(c))
    if owner.__module__.startswith("keras.") and owner.__name__ in ELEMENTWISE:
        return
    advice = ADVICE.get(
        owner.__name__,
        "If its update of an element needs that element only, say so with the class "
        "attribute is_elementwise = True.",
    )
    raise ConfigurationError(
        f"The optimizer {type(optimizer).__name__} cannot update shards: its "
        f"update_step may need whole tensors. {advice} Or use shard='none'. Allowed: "
        f"{', '.join(ELEMENTWISE)}, AdamW, tfdp.optimizers.LARS and LAMB."
    )


def check_own_hooks(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses hooks of a program's own that would be given shards of gradients.

    Raises:
      ConfigurationError: naming the optimizer, the hook and what to do.
    """
    own = own_look_at_gradients(optimizer, (*ON_THE_WAY, *IN_USE))
    if own is not None:
        raise ConfigurationError(
            f"The optimizer {type(optimizer).__name__} cannot update shards: its own "
            f"{own} may need whole gradients, of which each replica has a shard. If it "
            "looks at single elements only, say so with the class attribute "
            "is_elementwise = True. Or use shard='none'."
        )
    if is_own(optimizer, AVERAGE):  # it is led in the place of what a class has
        raise ConfigurationError(
            f"The optimizer {type(optimizer).__name__} cannot update shards: its own "
            f"{AVERAGE} would not be called. Use shard='none'."
        )


def own_look_at_gradients(
    optimizer: keras.optimizers.Optimizer, methods: Sequence[str]
) -> str | None:
    """The one of `methods` with which a class of the program's own looks at gradients.

    Those of Keras look at single elements, or are led. None: there is none, or the
    class says that it looks at single elements.
    """
    if getattr(optimizer, "is_elementwise", False):
        return None
    return next((name for name in methods if is_own(optimizer, name)), None)


def is_own(optimizer: keras.optimizers.Optimizer, method: str) -> bool:
    """Whether a class that is neither Keras' nor tfdp's defines `method`."""
    owner = next((c for c in type(optimizer).__mro__ if method in vars(c)), None)
    return owner is not None and not owner.__module__.startswith(("keras.", "tfdp."))


def shard_overrides(
    optimizer: keras.optimizers.Optimizer, shards: ShardUpdates
) -> dict[str, Any]:
    """The instance attributes with which a shardable `optimizer` updates shards."""
    known: list[Any] = []

    def apply_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        known[:] = variables
        _refuse_eager_constraints(variables)
        return by_keras(optimizer, APPLY_GRADIENTS)(gradients, variables)

    def clip(gradients: Sequence[Any]) -> list[Any]:
        return clip_over_shards(optimizer, gradients, known, shards)

    leads: dict[str, Any] = {
        APPLY_GRADIENTS: apply_gradients,
        CLIP: clip,
        AVERAGE: functools.partial(_average_shards, optimizer),
        DECAY: functools.partial(_decay_on_devices, optimizer, shards),
        "update_step": functools.partial(_update_flat, optimizer),
    }
    for method in (UPDATE_STEP, OVERWRITE_WITH_AVERAGE):
        leads[method] = functools.partial(_then_gather, optimizer, method, shards)
    if hasattr(optimizer, "update_phases"):
        leads[UPDATE_OF_STRATEGY] = functools.partial(
            _update_in_phases, optimizer, shards
        )
    return leads


def _refuse_eager_constraints(variables: Sequence[Any]) -> None:
    """A constraint looks at the whole weight, whose shards are updated one by one.

    Raises:
      ConfigurationError: where eager replicas, which run one after the other, would
        each look at shards of which some are updated and others not yet.
    """
    if not tf.executing_eagerly():
        return
    for variable in variables:
        is_sharded = shard_kind(variable) is ShardedVariable
        if is_sharded and getattr(variable, "constraint", None) is not None:
            raise ConfigurationError(
                f"The weight {variable_path(variable)!r} has a constraint, which "
                "cannot be applied to shards in eager mode: it looks at the whole "
                "weight before all replicas have updated their shards. Compile with "
                "run_eagerly=False, or leave out shard='parameters'."
            )


def clip_over_shards(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    shards: ShardUpdates,
) -> list[Any]:
    """Keras' clipping, with norms over whole gradients of which shards are here.

    Cost: one sum of a number per sharded variable, when there is a norm to take.
    """
    stock = by_keras(optimizer, CLIP)
    if not (optimizer.clipnorm or optimizer.global_clipnorm):
        return stock(gradients)
    places = [
        i
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
        if gradient is not None and shard_kind(variable)
    ]
    if not places:
        return stock(gradients)
    squares = sum_squares([gradients[i] for i in places], shards)
    clipped = list(gradients)
    if optimizer.clipnorm:
        others = [i for i in range(len(gradients)) if i not in places]
        clipped_by_keras = stock([gradients[i] for i in others])
        for place, gradient in zip(others, clipped_by_keras, strict=True):
            clipped[place] = gradient
        for place, square in zip(places, squares, strict=True):
            gradient, bound = gradients[place], optimizer.clipnorm
            larger = tf.maximum(tf.sqrt(square), bound)
            clipped[place] = gradient * bound / tf.cast(larger, gradient.dtype)
        return clipped
    whole = [
        tf.reduce_sum(tf.square(tf.cast(tf.convert_to_tensor(g), tf.float32)))
        for i, g in enumerate(gradients)
        if g is not None and i not in places
    ]
    norm = tf.sqrt(tf.add_n([*whole, *squares]))
    bound = optimizer.global_clipnorm
    # Adding 0, or nan where the norm is infinite: as Keras, everything is then nan.
    scale = bound * tf.minimum(1.0 / norm, 1.0 / bound) + (norm - norm)
    return [None if g is None else g * tf.cast(scale, g.dtype) for g in gradients]


def sum_squares(pieces: Sequence[tf.Tensor], shards: ShardUpdates) -> list[tf.Tensor]:
    """For each whole tensor the sum of its squares, from its shards; in one sum."""
    own = [tf.reduce_sum(tf.square(tf.cast(p, tf.float32))) for p in pieces]
    return total_over_shards(own, shards)


def total_over_shards(
    own: Sequence[tf.Tensor], shards: ShardUpdates
) -> list[tf.Tensor]:
    """The sums of scalars over the replicas that hold the shards."""
    stacked = tf.stack([tf.cast(value, tf.float32) for value in own])
    if not tf.executing_eagerly():
        return tf.unstack(shards.reducer.sum_of_shards(stacked, current_rank()))
    if not shards.reducer.holds_first_copy:
        stacked = tf.zeros_like(stacked)  # other hosts count the same shards
    context = tf.distribute.get_replica_context()
    return tf.unstack(context.all_reduce("SUM", stacked))


def _then_gather(
    optimizer: keras.optimizers.Optimizer,
    method: str,
    shards: ShardUpdates,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = getattr(type(optimizer), method)(optimizer, *args, **kwargs)
    if not tf.executing_eagerly():
        shards.gather_updated()
    return result


def _update_flat(
    optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any, *args: Any
) -> Any:
    """`update_step` of a shard, whose state is as flat as what is read of it.

    `keras.ops.add` takes what fits the last axis of a matrix for a bias: a shard of as
    many elements would be added to the whole that the state's shape told of.
    """
    place = variable_index(optimizer, variable)
    slots = [value for value in vars(optimizer).values() if isinstance(value, list)]
    found = current_run()
    with contextlib.ExitStack() as stack:
        if found is not None:
            stack.enter_context(found[0].updating_shard())
        for slot in slots:
            state = slot[place] if place < len(slot) else None
            if state is not None and shard_kind(state) is ShardedVariable:
                flat = {"_shape": (state.value.layout.shard_elements,)}
                stack.enter_context(instance_attributes(state, flat))
        return type(optimizer).update_step(optimizer, gradient, variable, *args)


def _decay_on_devices(
    optimizer: keras.optimizers.Optimizer,
    shards: ShardUpdates,
    variables: Sequence[Any],
) -> None:
    """Keras' decay of the weights, which needs no state that is on the host."""
    with shards.updating_on_devices():
        by_keras(optimizer, DECAY)(variables)


def _average_shards(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]
) -> None:
    """Keras' moving average of the weights, each replica its shards."""
    first = tf.equal(tf.convert_to_tensor(optimizer.iterations), 0)
    averages = averages_of(optimizer)
    for variable, average in zip(variables, averages, strict=True):
        if average is None:
            continue
        momentum = tf.where(first, 0.0, optimizer.ema_momentum)
        momentum = tf.cast(momentum, variable.dtype)

        def update(
            own: Any, variable: Any = variable, momentum: Any = momentum
        ) -> None:
            weights = tf.convert_to_tensor(variable)
            own.assign(momentum * own + (1 - momentum) * weights)

        strategy_of(optimizer).extended.update(average.value, update, group=False)


def _update_in_phases(
    optimizer: Any,
    shards: ShardUpdates,
    strategy: tf.distribute.Strategy,
    gradients_and_variables: Sequence[tuple[Any, Any]],
    learning_rate: Any,
) -> None:
    """First every layer's norms, then one sum for all of them, then every update."""
    if tf.distribute.in_cross_replica_context():
        # Eager replicas update across replicas, one variable after the other.
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot update shards in eager mode: the norms "
            "of its layers are summed over the replicas first. Compile with "
            "run_eagerly=False, or leave out shard=."
        )
    running: list[Any] = []
    found: list[tuple[tf.Tensor, ...]] = []

    def begin(target: Any, gradient: Any, learning_rate: Any) -> None:
        phases = optimizer.update_phases(gradient, target, learning_rate)
        running.append(phases)
        found.append(next(phases))

    pairs = list(gradients_and_variables)
    for gradient, variable in pairs:
        strategy.extended.update(
            variable, begin, args=(gradient, learning_rate), group=False
        )
    places = [
        (layer, norm)
        for layer, (_, variable) in enumerate(pairs)
        if shard_kind(variable)
        for norm in range(len(found[layer]))
    ]
    totals = [list(squares) for squares in found]
    if places:
        own = [found[layer][norm] for layer, norm in places]
        sums = total_over_shards(own, shards)
        for (layer, norm), total in zip(places, sums, strict=True):
            totals[layer][norm] = tf.cast(total, found[layer][norm].dtype)
    for layer, (_, variable) in enumerate(pairs):

        def finish(target: Any, layer: int = layer) -> None:
            try:
                running[layer].send(tuple(totals[layer]))
            except StopIteration:
                return

        strategy.extended.update(variable, finish, group=False)
