"""Stock Keras optimizers made exact: they get gradients that are already reduced.

Keras clips, tests for infinities and then reduces. The other way round is right: a
gradient is clipped, and found infinite, as a whole. While a strategy runs, every
optimizer that was made under it is led by instance attributes (no class is patched, and
they are gone after the trace), whoever calls it and wherever it is kept:

    apply                     reduces first, then goes on with the reduced gradients
    _all_reduce_sum_gradients returns them as they are

With Keras' gradient accumulation the reduction stays where it was, once per K
micro-steps and within a conditional; clipping is held back until after it, and the test
for infinities agrees over the replicas, because all must take the same branch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.names import current_rank, is_branch_graph, keras_state
from tfdp._private.optimizer_hooks import (
    CLIP,
    ON_THE_WAY,
    REDUCE,
    by_keras,
    strategy_of,
    variables_built_with,
)
from tfdp._private.step_ops import DRAWS, operations_within
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.sharding.optimizers import (
    check_own_hooks,
    check_shardable,
    clip_over_shards,
    is_own,
    own_look_at_gradients,
    shard_overrides,
)
from tfdp.sharding.updates import shards_of
from tfdp.sharding.variables import shard_kind
from tfdp.step.buffer_synchronization import bring_layers_together
from tfdp.step.compression import momentum_compression_of
from tfdp.step.find_optimizers import innermost_optimizers
from tfdp.step.finite_guard import update_if_finite
from tfdp.step.sums import agree_finite, largest_of_replicas, reduce_gradients
from tfdp.step.table_rows import CLIPPING
from tfdp.tracing.assigned_terms import as_tensors
from tfdp.tracing.run import ReplicaRun, current_run, do_before_the_step

ALREADY_REDUCED = {REDUCE: lambda grads_and_vars: grads_and_vars}


@contextlib.contextmanager
def overridden_optimizers(
    optimizers: Iterable[keras.optimizers.Optimizer], run: ReplicaRun
) -> Iterator[None]:
    """While this lasts, `optimizers` reduce before they clip, test and update.

    One that another one holds (a loss scaler's, a group's) is led as well: called from
    there it gets reduced gradients; called by itself it reduces them.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(
                instance_attributes(optimizer, _method_overrides(optimizer, run))
            )
        yield


def _method_overrides(
    optimizer: keras.optimizers.Optimizer, run: ReplicaRun
) -> dict[str, Any]:
    """The instance attributes that lead `optimizer`."""
    if getattr(optimizer, "reduces_gradients", False):
        return {}  # DistributedOptimizer does all of this itself
    leads: dict[str, Any] = {"apply": functools.partial(_apply, optimizer, run)}
    if is_own(optimizer, "apply_gradients"):
        leads["apply_gradients"] = functools.partial(_apply_gradients, optimizer, run)
    # A loss scaler chooses a branch by its test. Replicas that chose apart would wait
    # for each other for ever, so they agree on the answer first.
    if hasattr(optimizer, "inner_optimizer"):
        leads["check_finite"] = functools.partial(_check_finite, optimizer)
        return leads
    shards = shards_of(optimizer)
    own = {} if shards is None else shard_overrides(optimizer, shards)
    # Keras clips before it accumulates and before it reduces. Gradients that are yet
    # to be reduced are held back here, and clipped right after (`_reduce`).
    clip = own.get(CLIP, by_keras(optimizer, CLIP))
    own[CLIP] = functools.partial(_clip_unless_held_back, run, clip)
    own[REDUCE] = functools.partial(_reduce, optimizer, run)
    return own | leads


def _reduces_first(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether gradients are reduced before `optimizer` looks at them."""
    # Who accumulates reduces once for all its batches, within Keras' conditional; but
    # from stage 2 on what is accumulated are shards, of sums.
    shards = shards_of(optimizer)
    accumulates = any(
        leaf.gradient_accumulation_steps for leaf in innermost_optimizers(optimizer)
    )
    return not accumulates or (shards is not None and shards.stage > 1)


def _apply_gradients(
    optimizer: keras.optimizers.Optimizer,
    run: ReplicaRun,
    grads_and_vars: Iterable[tuple[Any, Any]],
    **more: Any,
) -> Any:
    """A program's own `apply_gradients`; Keras' is but another way to call `apply`."""
    own = type(optimizer).apply_gradients.__get__(optimizer)
    gradients, variables = zip(*grads_and_vars, strict=True)

    def original(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        own(list(zip(gradients, variables, strict=True)), **more)

    _apply(optimizer, run, gradients, variables, original)
    return optimizer.iterations


def _apply(
    optimizer: keras.optimizers.Optimizer,
    run: ReplicaRun,
    gradients: Sequence[Any],
    trainable_variables: Any = None,
    original: Callable[..., Any] | None = None,
) -> Any:
    """Keras' `apply`, with gradients that are reduced when they must be.

    Args:
      original: what is done with them; None: what the optimizer's class does.
    """
    original = original or type(optimizer).apply.__get__(optimizer)
    original = watch_draws([optimizer, *innermost_optimizers(optimizer)], run, original)
    # An optimizer that another one holds is called with what that one has reduced.
    is_given_reduced = current_run() is None or run.is_updating
    if is_given_reduced:
        return original(gradients, trainable_variables)
    if shards_of(optimizer) is not None:
        check_own_hooks(optimizer)
        for leaf in innermost_optimizers(optimizer):
            check_shardable(leaf)
    if run.replicas > 1:
        _refuse_own_reduction(optimizer)
    # Lists, because Keras gives zips, which end with the first who reads them.
    variables = None if trainable_variables is None else list(trainable_variables)
    gradients = as_tensors(gradients)
    if variables is not None and not optimizer.built:
        _build_as_keras(optimizer, run, variables)
    if variables is not None and run.replicas > 1:
        gradients = overwritten_by_mean(
            gradients,
            variables,
            lambda values: largest_of_replicas(values, run, optimizer),
        )
    reduces_first = _reduces_first(optimizer)
    if reduces_first:
        gradients = _reduce_before(optimizer, run, gradients, variables)
    else:
        if run.replicas > 1:
            _refuse_own_look(optimizer)
        bring_layers_together(run, current_rank())

    built_with = variables or variables_built_with(optimizer)

    def update() -> None:
        with run.updating(reduces=not reduces_first):
            original(gradients, variables)

    update_if_finite(optimizer, gradients, built_with, update)


def _refuse_own_reduction(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses what stands in the place of the sum over the replicas.

    Raises:
      ConfigurationError: a class of the program's own reduces gradients.
    """
    for leaf in innermost_optimizers(optimizer):
        if is_own(leaf, REDUCE):
            raise ConfigurationError(
                f"The optimizer {type(leaf).__name__} has {REDUCE} of its own, which "
                "would not be called: gradients are added up before an optimizer looks "
                "at them. What it does with the sum belongs into apply, before it "
                "calls super().apply."
            )


def _refuse_own_look(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses a program's own look at gradients that are yet to be added.

    Raises:
      ConfigurationError: naming the method that looks.
    """
    for leaf in (optimizer, *innermost_optimizers(optimizer)):
        own = own_look_at_gradients(leaf, ON_THE_WAY)
        if own is not None:
            raise ConfigurationError(
                f"The optimizer {type(leaf).__name__} has {own} of its own, and "
                "accumulates gradients (gradient_accumulation_steps): it would look at "
                "each replica's part of their sum, which Keras adds up later. If it "
                "looks at single elements only, and only multiplies them, say so with "
                "the class attribute is_elementwise = True. Or accumulate with "
                "tfdp.DistributedOptimizer(optimizer, accumulate_steps=...)."
            )


def _build_as_keras(
    optimizer: keras.optimizers.Optimizer, run: ReplicaRun, variables: list[Any]
) -> None:
    """As Keras does next; what compression leaves goes by an optimizer's variables."""

    def build() -> None:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True

    if not any(map(_stores_when_built, innermost_optimizers(optimizer))):
        with run.updating():
            build()
        return
    # In the step one replica would store it for itself, in every step.
    do_before_the_step(build)
    if hasattr(optimizer, "inner_optimizer") and not tf.executing_eagerly():
        # A loss scaler has scaled by a constant, since it was not built. A function
        # whose first trace makes a variable is traced once more; what the variable
        # starts with must not wait for the batch, as all of the step does.
        with tf.control_dependencies(None):
            tf.Variable(0.0, trainable=False)


def _stores_when_built(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether `build` stores something in variables, such as a copy of the weights."""
    builds = [vars(of).get("build") for of in type(optimizer).__mro__]
    codes = [inspect.unwrap(build).__code__ for build in builds if callable(build)]
    return any("assign" in code.co_names for code in codes)


def _reduce_before(
    optimizer: keras.optimizers.Optimizer,
    run: ReplicaRun,
    gradients: list[Any],
    variables: list[Any] | None,
) -> list[Any]:
    targets = variables or [None] * len(gradients)
    places = [
        i
        for i, (gradient, variable) in enumerate(zip(gradients, targets, strict=True))
        if gradient is not None and not is_overwritten(variable)
    ]
    built_with = variables or variables_built_with(optimizer)
    reduced = reduce_gradients(
        [gradients[i] for i in places], run, [built_with[i] for i in places], optimizer
    )
    for place, gradient in zip(places, reduced, strict=True):
        gradients[place] = gradient
    return gradients


def _check_finite(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]
) -> tf.Tensor:
    """Keras' test, on what all replicas have alike; else they agree on its answer."""
    is_alike = _reduces_first(optimizer) and shards_of(optimizer) is None
    if is_alike or tf.distribute.in_cross_replica_context():
        return type(optimizer).check_finite(optimizer, gradients)
    if is_own(optimizer, "check_finite"):
        raise ConfigurationError(
            f"The optimizer {type(optimizer).__name__} has check_finite of its own, "
            "which would look at each replica's part of the gradients, or its shards: "
            "leave out shard= and gradient_accumulation_steps, or the method."
        )
    return agree_finite(optimizer, gradients)


def _clip_unless_held_back(
    run: ReplicaRun, clip: Callable[[Sequence[Any]], Any], gradients: Sequence[Any]
) -> Any:
    is_held_back = current_run() is not None and run.reduces_in_update
    return gradients if is_held_back else clip(gradients)


def _reduce(
    optimizer: keras.optimizers.Optimizer,
    run: ReplicaRun,
    grads_and_vars: Sequence[tuple[Any, Any]],
) -> list[tuple[Any, Any]]:
    """Reduces, and then clips, what was not reduced before."""
    pairs = list(grads_and_vars)
    if current_run() is None or not run.reduces_in_update:
        return pairs
    places = [i for i, (gradient, _) in enumerate(pairs) if gradient is not None]
    variables = [pairs[i][1] for i in places]
    reduced = reduce_gradients([pairs[i][0] for i in places], run, variables, optimizer)
    shards = shards_of(optimizer)
    if shards is None:
        clipped = by_keras(optimizer, CLIP)(reduced)
    else:
        clipped = clip_over_shards(optimizer, reduced, variables, shards)
    for place, gradient in zip(places, clipped, strict=True):
        pairs[place] = (gradient, pairs[place][1])
    return pairs


@contextlib.contextmanager
def takes_reduced(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """While this lasts, `optimizer` does not reduce the gradients that it is given."""
    shards, found = shards_of(optimizer), current_run()
    with contextlib.ExitStack() as stack:
        if found is not None:
            stack.enter_context(found[0].updating())
        for leaf in innermost_optimizers(optimizer):
            if shards is not None:
                check_shardable(leaf)
            own = {} if shards is None else shard_overrides(leaf, shards)
            stack.enter_context(instance_attributes(leaf, own | ALREADY_REDUCED))
        yield


# Optimizers that draw random numbers: copies of a weight must get the same ones.
#
# `keras.random` draws alike on all replicas there (`tfdp.variables.mirrored`).
# TensorFlow's own random operations are seeded by their place in the graph, which is
# another one for each replica, or by nothing.


def watch_draws(
    optimizers: Iterable[keras.optimizers.Optimizer],
    run: ReplicaRun,
    update: Callable[..., Any],
) -> Callable[..., Any]:
    """`update`, which notes for a warning where replicas draw apart in it.

    Args:
      optimizers: those that update.
      run: in which the replicas are traced.
      update: builds the update of one replica.
    """
    if run.replicas == 1 or run.is_local or tf.executing_eagerly():
        return update
    if tf.distribute.in_cross_replica_context():
        return update  # as a program's own merge_call does: one draws for all copies
    rank = current_rank()
    if isinstance(rank, int) and rank != 0:
        return update  # what one of them draws by all do

    @functools.wraps(update)
    def watched(*args: Any, **kwargs: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        result = update(*args, **kwargs)
        made = operations_within(graph.get_operations()[before:])
        if any(op.type in DRAWS for op in made):
            names = ", ".join(sorted({type(each).__name__ for each in optimizers}))
            run.state_suspicions.add(
                f"the optimizer {names} draws random numbers by TensorFlow, which are "
                "others on each replica, so that the copies of the weights become "
                "unlike. Draw with keras.random and a keras.random.SeedGenerator that "
                "the optimizer holds: in an update all replicas draw alike by it"
            )
        return result

    return watched


# Variables that Keras overwrites by their gradients, alike on all replicas.
#
# A layer of float8 (`quantize("float8")`) keeps the largest values that it has seen,
# and hands the new ones on as gradients. Over the replicas the largest one counts, as
# Keras has it over the micro-steps of an accumulation.


# Of such a history the first value is new, the others are alike on all replicas.
HISTORY = "amax_history"


def is_overwritten(variable: Any) -> bool:
    """Whether a gradient is what Keras stores in `variable` next."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def overwritten_by_mean(
    gradients: list[Any],
    variables: Sequence[Any],
    largest: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> list[Any]:
    """`gradients`, of which those to store are the largest of all replicas.

    Args:
      gradients: of the calling replica, one for each of `variables`.
      largest: of vectors, element by element the largest that a replica has.

    Cost: one exchange of a number for each such variable, from each replica; nothing
    where there is none.

    Raises:
      ConfigurationError: where such a variable is in shards.
    """
    places = [
        place
        for place, variable in enumerate(variables)
        if is_overwritten(variable) and gradients[place] is not None
    ]
    if not places:
        return gradients
    for place in places:
        if shard_kind(variables[place]) is not None:
            raise ConfigurationError(
                f"The variable {variables[place].path!r}, which Keras overwrites by "
                "its gradient, is in shards, and no replica has the whole of it. Give "
                "the strategy a shard_min_bytes above its size, such as the default."
            )
    new = [_new_part(gradients[place], variables[place]) for place in places]
    results = list(gradients)
    for place, part in zip(places, largest(new), strict=True):
        flat = tf.reshape(gradients[place], [-1])
        whole = tf.concat([part, flat[part.shape[0] :]], axis=0)
        results[place] = tf.reshape(whole, gradients[place].shape)
    return results


def _new_part(gradient: tf.Tensor, variable: Any) -> tf.Tensor:
    flat = tf.reshape(gradient, [-1])
    return flat[:1] if variable.name.endswith(HISTORY) else flat


def refuse_overwritten(variables: Sequence[Any], wrapper: str) -> None:
    """Refuses an optimizer that would add up what is to be stored.

    Raises:
      ConfigurationError: one of `variables` is overwritten by its gradient.
    """
    for variable in variables:
        if is_overwritten(variable):
            raise ConfigurationError(
                f"{wrapper} adds gradients up, and that of {variable.path!r} is a "
                "value to store (a layer of float8). Use the Keras optimizer itself."
            )


# Optimizers that nobody leads: what cannot be exact with them is refused.


def check_overridden(value: Sequence[Any]) -> bool:
    """Refuses a reduction that an unknown optimizer asks for, where it is not exact.

    Returns:
      Whether an optimizer that nobody leads asks: for the sum of its gradients.

    Raises:
      ScopeError: when it was made elsewhere.
      ConfigurationError: when it would clip, test or update by shards before.
    """
    # TensorFlow's reduction is not told who asks; Keras' open name scopes tell.
    stack = keras_state.get_global_attribute("name_scope_stack") or []
    callers = [getattr(scope, "caller", None) for scope in stack]
    optimizers = [c for c in callers if isinstance(c, keras.optimizers.Optimizer)]
    for optimizer in optimizers:
        if REDUCE in vars(optimizer) or "apply" in vars(optimizer):
            return False
    for optimizer in optimizers:
        if strategy_of(optimizer) is not tf.distribute.get_strategy():
            raise ScopeError(
                f"The optimizer {optimizer.name!r} updates weights in strategy.run, "
                "but was not made under this strategy. Make it in `with "
                "strategy.scope():`, once and before strategy.run."
            )
        why = _why_not_exact(optimizer)
        if why is not None:
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} was made within strategy.run, or "
                f"copied, so the strategy does not know it, and {why}. Make it in "
                "`with strategy.scope():`, once and before strategy.run, or wrap it: "
                "tfdp.DistributedOptimizer(optimizer)."
            )
    is_overridden = any(getattr(o, "reduces_gradients", False) for o in optimizers)
    return bool(optimizers) and not is_overridden


def _why_not_exact(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Why adding the gradients of an unknown optimizer is not enough."""
    if shards_of(optimizer) is not None:
        return "with shard=... each replica would add another shard of its gradients"
    set_options = [name for name in CLIPPING if getattr(optimizer, name, None)]
    if set_options:
        return (
            f"has {set_options[0]} set: Keras would clip each replica's gradient "
            "before they are added, which is another update than on one device"
        )
    reducer = tf.distribute.get_strategy().extended.reducer
    if reducer.compressed is not None:
        return "its gradients would be sent without Communication(compression=...)"
    if momentum_compression_of(optimizer) is not None:
        return "its gradients would be sent in the place of its momentum"
    graph = tf.compat.v1.get_default_graph()
    if is_branch_graph(graph) and not optimizer.gradient_accumulation_steps:
        return (
            "is called within a conditional, such as a loss scaler's, whose branch "
            "each replica would choose by its own gradients: the replicas would wait "
            "for each other for ever"
        )
    return None
