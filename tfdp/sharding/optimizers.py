"""Keras optimizers with sharded state: what they do besides elementwise arithmetic.

An elementwise update works on shards unchanged. What needs whole tensors is overridden
by instance attributes while a step is traced:

    _clip_gradients           norms are taken over the shards of all replicas
    update_step               the state reports the shard's shape
    _distributed_tf_update_step  weights that are updated whole come to their owners
    _backend_update_step      gathers the updated shards into the mirrored weights
    moving averages           are updated, and written back, shard by shard

LARS and LAMB offer `update_phases`: one small sum carries the norms of all layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private import optimizer_hooks as hooks
from tfdp._private.names import current_rank
from tfdp._private.optimizer_hooks import find_gradient_hook, is_own
from tfdp.errors import ConfigurationError
from tfdp.exchange.sparse import values_of, with_values
from tfdp.plan.shards import OwnedLayout
from tfdp.seams.replace import instance_attributes
from tfdp.sharding.owners import (
    OF_KERAS,
    check_owners,
    refuse_late_owners,
    whole_updates,
)
from tfdp.sharding.updates import ShardUpdates
from tfdp.sharding.variables import updating_rank
from tfdp.tracing.step import current_step
from tfdp.variables.in_shards import PlainUpdates, is_in_shards, is_stored_in_shards

ADVICE = {
    "Lamb": "Use tfdp.optimizers.LAMB(form='keras'), which is identical to the bit.",
    "OneBitAdam": "It sends its momentum, of whole variables.",
    "OneBitLAMB": "It sends its momentum, of whole variables.",
}


def check_shardable(optimizer: Optimizer) -> None:
    """Refuses an optimizer that may need whole tensors for its update."""
    check_own_hooks(optimizer)
    # Momentum compression works on whole variables (tfdp.chain.momentum).
    if not hasattr(optimizer, "momentum_compression") and (
        hasattr(optimizer, "update_phases")
        or getattr(optimizer, "is_elementwise", False)
    ):
        return
    if whole_updates(optimizer) is not None:
        return
    if hooks.elementwise_of_keras(optimizer) is not None:
        return
    advice = ADVICE.get(
        hooks.definer_of(optimizer, "update_step").__name__,
        "If its update of an element needs that element only, set the class attribute "
        "is_elementwise = True; if it needs the whole of each weight, "
        "needs_whole_matrix = True (which no rule of layout= may then cut).",
    )
    raise ConfigurationError(
        f"The optimizer {type(optimizer).__name__} cannot update shards: its "
        f"update_step may need whole tensors. {advice} Or use shard='none' "
        f"without layout=. Allowed: {', '.join(hooks.ELEMENTWISE)}, AdamW, "
        f"{', '.join(OF_KERAS)}, tfdp.optimizers.LARS and LAMB."
    )


def check_own_hooks(optimizer: Optimizer) -> None:
    """Refuses a user class's hooks that would receive shards of gradients."""
    own = find_gradient_hook(
        optimizer, (*hooks.BEFORE_ACCUMULATION, *hooks.AFTER_ACCUMULATION)
    )
    if own is not None:
        raise ConfigurationError(
            f"The optimizer {type(optimizer).__name__} cannot update shards: its own "
            f"{own} may need whole gradients, of which each replica has a shard. If it "
            "treats each element independently, set the class attribute "
            "is_elementwise = True. Or use shard='none' without layout=."
        )
    if is_own(optimizer, hooks.AVERAGE):
        raise ConfigurationError(
            f"The optimizer {type(optimizer).__name__} cannot update shards: its own "
            f"{hooks.AVERAGE} would not be called. Use shard='none' without layout=."
        )


class ShardedUpdates(PlainUpdates):
    """How optimizers update the variables of a strategy that are in shards."""

    has_whole_sums = False

    def __init__(self, shards: ShardUpdates):
        self._shards = shards
        # From stage 2 on accumulators are shards of sums.
        self.sums_every_batch = shards.stage > 1

    def overrides(self, optimizer: Any) -> dict[str, Any]:
        shards = self._shards
        current: list[Any] = []

        def apply_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
            current[:] = variables
            check_owners(optimizer, variables)
            apply = hooks.by_keras(optimizer, hooks.APPLY_GRADIENTS)
            return apply(gradients, variables)

        def clip(gradients: Sequence[Any]) -> list[Any]:
            return self.clip(optimizer, gradients, current)

        methods: dict[str, Any] = {
            hooks.APPLY_GRADIENTS: apply_gradients,
            hooks.CLIP: clip,
            hooks.AVERAGE: partial(_average_shards, optimizer),
            hooks.DECAY: partial(_decay_on_devices, optimizer, shards),
            "update_step": partial(_update_shard, optimizer, shards),
        }
        for method in (hooks.UPDATE_STEP, hooks.OVERWRITE_WITH_AVERAGE):
            methods[method] = partial(_then_gather, optimizer, method, shards)
        if whole_updates(optimizer) is not None:
            methods[hooks.UPDATE_OF_STRATEGY] = partial(
                _update_at_owners, optimizer, shards
            )
        if hasattr(optimizer, "update_phases"):
            methods[hooks.UPDATE_OF_STRATEGY] = partial(
                _update_in_phases, optimizer, shards
            )
        return methods

    def check(self, optimizer: Any, leaves: Sequence[Any]) -> None:
        check_own_hooks(optimizer)
        for leaf in leaves:
            check_shardable(leaf)

    def check_build(self, optimizer: Any, leaves: Any, variables: Any) -> None:
        refuse_late_owners(optimizer, leaves, variables)

    def check_overwritten(self, variable: Any) -> None:
        if is_in_shards(variable):
            raise ConfigurationError(
                f"The variable {variable.path!r}, which Keras overwrites by its "
                "gradient, is in shards, and no replica has the whole of it. Give the "
                "strategy a shard_min_bytes above its size, such as the default."
            )

    def clip(self, optimizer: Any, gradients: Sequence[Any], variables: Any) -> Any:
        """Keras' clipping, with whole norms, summed over the shards."""
        stock = hooks.by_keras(optimizer, hooks.CLIP)
        if not (optimizer.clipnorm or optimizer.global_clipnorm):
            return stock(gradients)
        pairs = enumerate(zip(gradients, variables, strict=True))
        places = [i for i, (g, v) in pairs if g is not None and is_in_shards(v)]
        if not places:
            return stock(gradients)
        dtype = _dtype_of_norms([g for g in gradients if g is not None])
        own = [
            tf.reduce_sum(tf.square(tf.cast(values_of(gradients[i]), dtype)))
            for i in places
        ]
        held = [variables[i] for i in places]
        squares = _total_over_shards(own, held, self._shards)
        clipped = list(gradients)
        if optimizer.clipnorm:
            others = [i for i in range(len(gradients)) if i not in places]
            clipped_by_keras = stock([gradients[i] for i in others])
            for place, gradient in zip(others, clipped_by_keras, strict=True):
                clipped[place] = gradient
            for place, square in zip(places, squares, strict=True):
                clipped[place] = with_values(
                    gradients[place], partial(_to_norm, optimizer.clipnorm, square)
                )
            return clipped
        whole = [
            tf.reduce_sum(tf.square(tf.cast(tf.convert_to_tensor(g), dtype)))
            for i, g in enumerate(gradients)
            if g is not None and i not in places
        ]
        norm = tf.sqrt(tf.add_n([*whole, *squares]))
        bound = optimizer.global_clipnorm
        # Adds 0, or nan if the norm is infinite: then everything is nan, as in Keras.
        scale = bound * tf.minimum(1.0 / norm, 1.0 / bound) + (norm - norm)
        return [None if g is None else g * tf.cast(scale, g.dtype) for g in gradients]


def _to_norm(bound: Any, square: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    """A gradient of which the whole has this squared norm, clipped to a norm."""
    larger = tf.maximum(tf.sqrt(square), bound)
    return gradient * bound / tf.cast(larger, gradient.dtype)


def _dtype_of_norms(values: Sequence[Any]) -> tf.DType:
    """float32, or float64 where one of `values` has it."""
    is_double = any(value.dtype == tf.float64 for value in values)
    return tf.float64 if is_double else tf.float32


def _total_over_shards(
    own: Sequence[Any], variables: Sequence[Any], shards: ShardUpdates
) -> list[tf.Tensor]:
    """Sums scalars of shards of `variables` over the replicas that hold these."""
    dtype, rank = _dtype_of_norms(own), current_rank()
    counted = [
        tf.cast(value, dtype) if shards.counts(variable, rank) else tf.zeros([], dtype)
        for value, variable in zip(own, variables, strict=True)
    ]
    return tf.unstack(shards.reducer.sum_over(tf.stack(counted), rank))


def _then_gather(
    optimizer: Optimizer, method: str, shards: ShardUpdates, *args: Any, **kwargs: Any
) -> Any:
    result = getattr(type(optimizer), method)(optimizer, *args, **kwargs)
    shards.gather_updated()
    return result


def _update_shard(
    optimizer: Optimizer, shards: ShardUpdates, gradient: Any, variable: Any, *args: Any
) -> Any:
    """`update_step` of a shard, with state of the shard's shape.

    `keras.ops.add` treats a vector that fits a matrix's last axis as a bias: a shard of
    that length would be broadcast to the whole shape that the state reports.
    """
    place = hooks.variable_index(optimizer, variable)
    slots = [value for value in vars(optimizer).values() if isinstance(value, list)]
    rank = updating_rank()
    found = current_step()
    with contextlib.ExitStack() as stack:
        if found is not None:
            alone = isinstance(getattr(variable, "layout", None), OwnedLayout)
            stack.enter_context(found[0].updating_shard(alone=alone))
        for slot in slots:
            state = slot[place] if place < len(slot) else None
            if state is not None and is_stored_in_shards(state):
                layout = state.value.layout
                part = None if rank is None else shards.part_of(rank, layout)
                flat = {"_shape": layout.shard_shape(part)}
                stack.enter_context(instance_attributes(state, flat))
        return type(optimizer).update_step(optimizer, gradient, variable, *args)


def _update_at_owners(
    optimizer: Optimizer,
    shards: ShardUpdates,
    strategy: tf.distribute.Strategy,
    gradients_and_variables: Sequence[tuple[Any, Any]],
    learning_rate: Any,
) -> None:
    """Keras' update, of weights that their owners have whole."""
    pairs = list(gradients_and_variables)
    shards.bring_to_owners([variable for _, variable in pairs])
    update = hooks.by_keras(optimizer, hooks.UPDATE_OF_STRATEGY)
    update(strategy, pairs, learning_rate)


def _decay_on_devices(
    optimizer: Optimizer, shards: ShardUpdates, variables: Sequence[Any]
) -> None:
    """Keras' weight decay, which needs no state on the host."""
    with shards.updating_on_devices():
        if hooks.definer_of(optimizer, hooks.DECAY).__name__ == "Muon":
            _decay_by_muon(optimizer, variables)
        else:
            hooks.by_keras(optimizer, hooks.DECAY)(variables)


def _decay_by_muon(optimizer: Any, variables: Sequence[Any]) -> None:
    """Keras' Muon decays whole weights on all replicas; here shards, by its numbers."""
    for variable in variables:
        decay = hooks.decay_by_muon(optimizer, variable)
        if decay is None:
            continue

        def update(own: Any, decay: float = decay) -> None:
            rate = tf.cast(optimizer.learning_rate, own.dtype)
            own.assign(own - own * tf.cast(decay, own.dtype) * rate)

        strategy = hooks.strategy_of(optimizer)
        strategy.extended.update(variable.value, update, group=False)


def _average_shards(optimizer: Optimizer, variables: Sequence[Any]) -> None:
    """Keras' moving average of the weights, shard by shard."""
    first = tf.equal(tf.convert_to_tensor(optimizer.iterations), 0)
    averages = hooks.averages_of(optimizer)
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

        hooks.strategy_of(optimizer).extended.update(average.value, update, group=False)


def _update_in_phases(
    optimizer: Any,
    shards: ShardUpdates,
    strategy: tf.distribute.Strategy,
    gradients_and_variables: Sequence[tuple[Any, Any]],
    learning_rate: Any,
) -> None:
    """First every layer's norms, then one sum for all of them, then every update."""
    running: list[Any] = []
    found: list[tuple[tf.Tensor, ...]] = []

    def begin(target: Any, gradient: Any, learning_rate: Any) -> None:
        phases = optimizer.update_phases(gradient, target, learning_rate)
        running.append(phases)
        found.append(next(phases))

    pairs = list(gradients_and_variables)
    for gradient, variable in pairs:
        args = gradient, learning_rate
        strategy.extended.update(variable, begin, args=args, group=False)
    places = [
        (layer, norm)
        for layer, (_, variable) in enumerate(pairs)
        if is_in_shards(variable)
        for norm in range(len(found[layer]))
    ]
    totals = [list(squares) for squares in found]
    if places:
        own = [found[layer][norm] for layer, norm in places]
        held = [pairs[layer][1] for layer, _ in places]
        sums = _total_over_shards(own, held, shards)
        for (layer, norm), total in zip(places, sums, strict=True):
            totals[layer][norm] = tf.cast(total, found[layer][norm].dtype)
    for layer, (_, variable) in enumerate(pairs):

        def finish(target: Any, layer: int = layer) -> None:
            with contextlib.suppress(StopIteration):
                running[layer].send(tuple(totals[layer]))

        strategy.extended.update(variable, finish, group=False)
