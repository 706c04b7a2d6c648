"""Stock Keras optimizers made exact: they get gradients that are already reduced.

Keras clips, tests for infinities and then reduces. The other way round is right: a
gradient is clipped, and found infinite, as a whole. While the strategy runs a step of a
model, the model's own optimizers are led by instance attributes (no class is patched,
and they are gone after the trace):

    apply                     reduces first, then goes on with the reduced gradients
    _all_reduce_sum_gradients returns them as they are

With Keras' gradient accumulation the reduction stays where it was, once per K
micro-steps and within a conditional; clipping is held back until after it, and the test
for infinities agrees over the replicas, because all must take the same branch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._tf.instance_attributes import instance_attributes
from tfdp._tf.names import current_rank, keras_state, own_copy
from tfdp._tf.replica_run import ReplicaRun
from tfdp._tf.sharding.optimizers import clip_over_shards, shard_kind, shard_leads
from tfdp._tf.sharding.updates import ShardUpdates
from tfdp._tf.sharding.variables import ShardUpdatedVariable
from tfdp._tf.wire_dtype import from_wire, sum_gradients_and_state, to_wire
from tfdp.errors import ConfigurationError

__all__ = [
    "agree_finite",
    "led_optimizers",
    "optimizers_of",
    "reduce_gradients",
    "refuse_unled",
    "shards_of",
    "strategy_of",
    "takes_reduced",
]

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
ALREADY_REDUCED = {"_all_reduce_sum_gradients": lambda grads_and_vars: grads_and_vars}


def optimizers_of(model: Any) -> list[keras.optimizers.Optimizer]:
    """The optimizers that `model` holds: the compiled one and any of its attributes."""
    if not isinstance(model, keras.Model):
        return []
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    unique: dict[int, keras.optimizers.Optimizer] = {}
    for value in found:
        if isinstance(value, keras.optimizers.Optimizer):
            unique.setdefault(id(value), value)
    return list(unique.values())


def strategy_of(optimizer: keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """The strategy under whose scope `optimizer` was made."""
    return optimizer._distribution_strategy


@contextlib.contextmanager
def led_optimizers(
    optimizers: Sequence[keras.optimizers.Optimizer], run: ReplicaRun
) -> Iterator[None]:
    """While this lasts, `optimizers` reduce before they clip, test and update."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            for target, attributes in _leads(optimizer, run):
                stack.enter_context(instance_attributes(target, attributes))
        yield


def refuse_unled(value: Sequence[Any]) -> bool:
    """Refuses a reduction asked by an optimizer that clips or tests before it.

    Returns:
      Whether an optimizer that nobody leads asks: for the sum of its gradients.

    Raises:
      ConfigurationError: in a custom loop whose optimizer is not the model's own.
    """
    stack = keras_state.get_global_attribute("name_scope_stack") or []
    callers = [getattr(scope, "caller", None) for scope in stack]
    optimizers = [c for c in callers if isinstance(c, keras.optimizers.Optimizer)]
    for optimizer in optimizers:
        if "_all_reduce_sum_gradients" in vars(optimizer) or "apply" in vars(optimizer):
            return False
    for optimizer in optimizers:
        if shards_of(optimizer) is not None:
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} is used in a custom loop with "
                "shard=...: it would add gradients of which each replica holds "
                "another shard. Use model.fit, or run a method of the model that owns "
                "the optimizer, or wrap it: tfdp.DistributedOptimizer(optimizer)."
            )
        set_options = [name for name in CLIPPING if getattr(optimizer, name, None)]
        if set_options:
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} has {set_options[0]} set and is "
                "used in a custom loop: Keras would clip each replica's gradient "
                "before they are added, which is another update than on one device. "
                "Use model.fit, or run a method of the model that owns the optimizer, "
                "or wrap it: tfdp.DistributedOptimizer(optimizer)."
            )
    is_led = any(getattr(o, "reduces_gradients", False) for o in optimizers)
    return bool(optimizers) and not is_led


def _leads(
    optimizer: keras.optimizers.Optimizer, run: ReplicaRun
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The instance attributes that lead `optimizer`, object by object."""
    if getattr(optimizer, "reduces_gradients", False):
        return  # DistributedOptimizer does all of this itself
    leaves = _leaves(optimizer)
    shards = shards_of(optimizer)
    accumulates = any(leaf.gradient_accumulation_steps for leaf in leaves)
    reduces_first = not accumulates or (shards is not None and shards.stage > 1)
    apply = _reduce_then_apply if reduces_first else _apply_as_it_is
    led: dict[str, Any] = {"apply": functools.partial(apply, optimizer, run)}
    knows_only_its_own = not reduces_first or shards is not None
    if knows_only_its_own and hasattr(optimizer, "inner_optimizer"):
        led["check_finite"] = functools.partial(agree_finite, optimizer)
    # Both may be for one object: an optimizer without a scaler is its own leaf.
    leads = [(optimizer, led)]
    for leaf in leaves:
        own = {} if shards is None else shard_leads(leaf, shards)
        if reduces_first:
            leads.append((leaf, own | ALREADY_REDUCED))
            continue
        clipping = {name: getattr(leaf, name) for name in CLIPPING}
        reduce = functools.partial(_reduce_then_clip, leaf, run, clipping)
        held_back: dict[str, Any] = dict.fromkeys(CLIPPING)
        leads.append((leaf, own | held_back | {"_all_reduce_sum_gradients": reduce}))
    yield from leads


def names_of_updates(model: Any) -> list[str]:
    """The scopes in which the optimizers that `model` holds update its weights."""
    return [leaf.name for owner in optimizers_of(model) for leaf in _leaves(owner)]


def _leaves(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """The optimizers that reduce and update, within a loss scaler or a group."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "optimizers", None) or [inner])


@contextlib.contextmanager
def takes_reduced(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """While this lasts, `optimizer` does not reduce the gradients that it is given."""
    shards = shards_of(optimizer)
    with contextlib.ExitStack() as stack:
        if shards is not None:
            run = strategy_of(optimizer).extended.current_run
            stack.enter_context(run.updating())
        for leaf in _leaves(optimizer):
            own = {} if shards is None else shard_leads(leaf, shards)
            stack.enter_context(instance_attributes(leaf, own | ALREADY_REDUCED))
        yield


def shards_of(optimizer: keras.optimizers.Optimizer) -> ShardUpdates | None:
    """What updates the shards of the strategy of `optimizer`; None: it has none."""
    return getattr(strategy_of(optimizer).extended, "shards", None)


def _apply_as_it_is(
    optimizer: keras.optimizers.Optimizer, run: ReplicaRun, *args: Any, **kwargs: Any
) -> Any:
    with run.updating():
        return type(optimizer).apply(optimizer, *args, **kwargs)


def _reduce_then_apply(
    optimizer: keras.optimizers.Optimizer,
    run: ReplicaRun,
    gradients: Sequence[Any],
    trainable_variables: Any = None,
) -> Any:
    original = type(optimizer).apply.__get__(optimizer)
    variables = None if trainable_variables is None else list(trainable_variables)
    gradients = list(gradients)
    targets = variables or [None] * len(gradients)
    # fp8 amax "gradients" are values to store, not slopes to add.
    places = [
        i
        for i, (gradient, variable) in enumerate(zip(gradients, targets, strict=True))
        if gradient is not None
        and not getattr(variable, "overwrite_with_gradient", False)
    ]
    built_with = variables or optimizer._trainable_variables
    reduced = reduce_gradients(
        [gradients[i] for i in places], run, [built_with[i] for i in places]
    )
    for place, gradient in zip(places, reduced, strict=True):
        gradients[place] = gradient
    with run.updating():
        return original(gradients, variables)


def _reduce_then_clip(
    optimizer: keras.optimizers.Optimizer,
    run: ReplicaRun,
    clipping: dict[str, Any],
    grads_and_vars: Sequence[tuple[Any, Any]],
) -> list[tuple[Any, Any]]:
    pairs = list(grads_and_vars)
    places = [i for i, (gradient, _) in enumerate(pairs) if gradient is not None]
    variables = [pairs[i][1] for i in places]
    reduced = reduce_gradients([pairs[i][0] for i in places], run, variables)
    shards = shards_of(optimizer)
    with instance_attributes(optimizer, clipping):
        if shards is None:
            clipped = optimizer._clip_gradients(reduced)
        else:
            clipped = clip_over_shards(optimizer, reduced, variables, shards)
    for place, gradient in zip(places, clipped, strict=True):
        pairs[place] = (gradient, pairs[place][1])
    return pairs


def reduce_gradients(
    gradients: Sequence[Any], run: ReplicaRun, variables: Sequence[Any]
) -> list[Any]:
    """The sum of the gradients over the replicas, with the replicas' own state.

    Of a variable that is updated by shards each replica gets its shard of the sum.
    The gradient of a variable that is stored in shards is one already.

    Moving statistics that each replica updated on its own ride in the same buckets:
    no launch of their own. They come back as the mean over all samples.
    """
    if not gradients:
        return []
    results = list(gradients)
    kinds = [shard_kind(variable) for variable in variables]
    scattered = [i for i, kind in enumerate(kinds) if kind is ShardUpdatedVariable]
    if scattered:
        shards = tf.distribute.get_strategy().extended.shards
        sent = [gradients[i] for i in scattered]
        own = shards.scatter(to_wire(sent), [variables[i] for i in scattered])
        for place, shard in zip(scattered, from_wire(own, sent), strict=True):
            results[place] = shard
    whole = [i for i, kind in enumerate(kinds) if kind is None]
    rank = current_rank()
    state = run.take_local_state(rank)
    shares = [_weighted_state(variable, run, rank) for variable in state]
    if whole or shares:
        dense = [gradients[i] for i in whole]
        totals, means = sum_gradients_and_state(dense, shares)
        for place, value in zip(whole, totals, strict=True):
            results[place] = value
        for variable, value in zip(state, means, strict=True):
            extended = variable.distribute_strategy.extended
            extended.update_own_copy(variable, lambda own, v: own.assign(v), value)
    return results


def _weighted_state(variable: Any, run: ReplicaRun, rank: Any) -> tf.Tensor:
    """This replica's share of a mean over samples; nothing when it has no sample."""
    share = tf.cast(run.share_of(rank), variable.dtype)
    value = own_copy(variable, rank).read_value()
    # Statistics of no sample are not a number, and 0 times that is not 0.
    return tf.where(share > 0, value * share, tf.zeros_like(value))


def agree_finite(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]
) -> tf.Tensor:
    """Whether the gradients are finite on every replica; the same answer on each."""
    mine = type(optimizer).check_finite(optimizer, gradients)
    bad = tf.cast(tf.logical_not(mine), tf.float32)
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, bad) == 0.0
