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
from tfdp._private.names import current_rank
from tfdp._private.optimizer_hooks import (
    CLIP,
    ON_THE_WAY,
    REDUCE,
    by_keras,
    variables_built_with,
)
from tfdp.errors import ConfigurationError
from tfdp.sharding.optimizers import (
    check_own_hooks,
    check_shardable,
    clip_over_shards,
    is_own,
    own_look_at_gradients,
    shard_leads,
)
from tfdp.sharding.updates import shards_of
from tfdp.step.drawn_updates import watch_draws
from tfdp.step.finite_guard import update_if_finite
from tfdp.step.held_optimizers import innermost_optimizers
from tfdp.step.overwritten import is_overwritten, overwritten_alike
from tfdp.step.state_means import bring_layers_together
from tfdp.step.sums import agree_finite, largest_of_replicas, reduce_gradients
from tfdp.tracing.assigned_terms import as_tensors
from tfdp.tracing.before_the_step import do_before_the_step
from tfdp.tracing.current_run import current_run
from tfdp.tracing.run import ReplicaRun

__all__ = [
    "led_optimizers",
    "takes_reduced",
]

ALREADY_REDUCED = {REDUCE: lambda grads_and_vars: grads_and_vars}


@contextlib.contextmanager
def led_optimizers(
    optimizers: Iterable[keras.optimizers.Optimizer], run: ReplicaRun
) -> Iterator[None]:
    """While this lasts, `optimizers` reduce before they clip, test and update.

    One that another one holds (a loss scaler's, a group's) is led as well: called from
    there it gets reduced gradients; called by itself it reduces them.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(instance_attributes(optimizer, _leads(optimizer, run)))
        yield


def _leads(optimizer: keras.optimizers.Optimizer, run: ReplicaRun) -> dict[str, Any]:
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
    own = {} if shards is None else shard_leads(optimizer, shards)
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
        gradients = overwritten_alike(
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
            own = {} if shards is None else shard_leads(leaf, shards)
            stack.enter_context(instance_attributes(leaf, own | ALREADY_REDUCED))
        yield
