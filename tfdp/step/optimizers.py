"""Overrides methods of stock Keras optimizers so that they get reduced gradients.

Keras clips, tests for infinities and then reduces. Exact is the reverse: clip and test
the global gradient. So while a strategy runs, on every optimizer instance created in
its scope `apply` reduces first, and `_all_reduce_sum_gradients` does nothing.

With Keras' gradient accumulation the reduction stays inside Keras' conditional, once
per K micro-steps; clipping is deferred until after it, and replicas agree on the test
for infinities, because all must take the same branch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.names import current_rank, is_branch_graph, keras_state
from tfdp._private.optimizer_hooks import (
    BEFORE_ACCUMULATION,
    CLIP,
    CLIPPING,
    REDUCE,
    by_keras,
    find_gradient_hook,
    is_own,
    momentum_compression_of,
    strategy_of,
    variables_built_with,
)
from tfdp._private.step_ops import operations_within
from tfdp.chain.reduction import Reduction, update_through
from tfdp.chain.stages import agree_finite, largest_of_replicas, reduce_gradients
from tfdp.errors import ConfigurationError, ScopeError
from tfdp.lint.op_kinds import draws
from tfdp.seams.replace import Override, instance_attributes, instead
from tfdp.step.buffer_synchronization import synchronize_layer_state
from tfdp.step.find_optimizers import innermost_optimizers
from tfdp.tracing.keras_steps import VARIABLES
from tfdp.tracing.loss_shares import note_gradients
from tfdp.tracing.step import Step, call_before_step, current_step
from tfdp.variables.in_shards import updates_of

# What a loss scaler has besides the optimizer that it wraps.
SCALE_STATE = ("step_counter", "dynamic_scale")
ALREADY_REDUCED = {REDUCE: lambda grads_and_vars: grads_and_vars}


class Overridden:
    """An optimizer that gets reduced gradients in a step, and what is known of it."""

    def __init__(self, optimizer: Optimizer, step: Step):
        self.optimizer, self.step = optimizer, step
        self.updates = updates_of(optimizer)
        self.leaves = innermost_optimizers(optimizer)
        accumulates = any(leaf.gradient_accumulation_steps for leaf in self.leaves)
        #: Whether gradients are reduced before the optimizer looks at them. With
        #: accumulation Keras reduces once for all batches, within its conditional.
        self.reduces_first = not accumulates or self.updates.sums_every_batch
        #: Those with a sum of their own, which would not be called.
        self.own_reduction = [leaf for leaf in self.leaves if is_own(leaf, REDUCE)]


def optimizer_overrides(
    optimizers: Iterable[Optimizer], step: Step
) -> Iterator[Override]:
    """Overrides that make `optimizers` reduce before they clip, test and update; nested
    ones (a loss scaler's, a group's) only if they are called directly."""
    known = [Overridden(optimizer, step) for optimizer in optimizers]
    some_defer = not all(facts.reduces_first for facts in known)
    for facts in known:
        for name, method in _method_overrides(facts, some_defer).items():
            yield Override(facts.optimizer, name, instead(method))


def _method_overrides(facts: Overridden, some_defer: bool) -> dict[str, Any]:
    """`some_defer`: whether an optimizer, maybe one that holds this one, accumulates
    and sums in its update, so that clipping has to wait for the sum."""
    optimizer, step = facts.optimizer, facts.step
    overrides: dict[str, Any] = {}
    if type(optimizer).scale_loss is not Optimizer.scale_loss:
        overrides["scale_loss"] = functools.partial(_scale_loss, optimizer)
    if getattr(optimizer, "reduces_gradients", False):
        return overrides  # DistributedOptimizer does the rest itself
    overrides["apply"] = functools.partial(_apply, facts)
    if is_own(optimizer, "apply_gradients"):
        overrides["apply_gradients"] = functools.partial(_apply_gradients, facts)
    # A loss scaler branches on its test: replicas that branch differently deadlock, so
    # they agree on the result first.
    if hasattr(optimizer, "inner_optimizer"):
        overrides["check_finite"] = functools.partial(_check_finite, facts)
        return overrides
    own = facts.updates.overrides(optimizer)
    if not some_defer:
        return own | ALREADY_REDUCED | overrides
    # Keras clips before it accumulates and reduces. Clipping of gradients that are not
    # reduced yet is deferred to `_reduce`.
    clip = own.get(CLIP, by_keras(optimizer, CLIP))

    def clip_unless_deferred(gradients: Sequence[Any]) -> Any:
        is_deferred = current_step() is not None and step.reduces_in_update
        return gradients if is_deferred else clip(gradients)

    own[CLIP] = clip_unless_deferred
    own[REDUCE] = functools.partial(_reduce, facts)
    return own | overrides


def _apply_gradients(
    facts: Overridden, grads_and_vars: Iterable[tuple[Any, Any]], **more: Any
) -> Any:
    """Wraps a user's own `apply_gradients`; Keras' one just calls `apply`."""
    own = type(facts.optimizer).apply_gradients.__get__(facts.optimizer)
    gradients, variables = zip(*grads_and_vars, strict=True)

    def original(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        own(list(zip(gradients, variables, strict=True)), **more)

    _apply(facts, gradients, variables, original)
    return facts.optimizer.iterations


def _apply(
    facts: Overridden,
    gradients: Sequence[Any],
    trainable_variables: Any = None,
    original: Callable[..., Any] | None = None,
) -> Any:
    """Keras' `apply` with reduced gradients; `original` makes the update."""
    optimizer, step, found = facts.optimizer, facts.step, current_step()
    original = original or type(optimizer).apply.__get__(optimizer)
    # A nested optimizer is called with gradients that the outer one has reduced.
    if found is None or step.is_updating:
        return _noting_draws(facts, original, gradients, trainable_variables)
    rank = found[1]
    # Lists, because Keras passes zips, which can be read once only.
    gradients = list(gradients)
    variables = None if trainable_variables is None else list(trainable_variables)
    note_gradients(step, rank, gradients, optimizer.name)
    gradients = [
        tf.convert_to_tensor(one) if isinstance(one, VARIABLES) else one
        for one in gradients
    ]
    _check(facts, gradients)
    if variables is not None and not optimizer.built:
        build_before_step(optimizer, variables)
    built_with = variables or variables_built_with(optimizer)
    if not step.is_local:
        from tfdp.step.packed_updates import pack_state

        pack_state(facts.leaves, built_with, gradients)
    are_stored = [getattr(v, OVERWRITTEN, False) for v in built_with]
    if variables is not None and step.replicas > 1 and any(are_stored):
        gradients = maximize_stored_values(gradients, variables, step, optimizer)
    if facts.reduces_first:
        pairs = enumerate(zip(gradients, are_stored, strict=True))
        places = [i for i, (one, stored) in pairs if one is not None and not stored]
        sent, targets = [gradients[i] for i in places], [built_with[i] for i in places]
        reduced = reduce_gradients(sent, step, rank, targets, optimizer)
        for place, gradient in zip(places, reduced, strict=True):
            gradients[place] = gradient
    else:
        synchronize_layer_state(step, rank)

    def update() -> None:
        with step.updating(reduces=not facts.reduces_first):
            _noting_draws(facts, original, gradients, variables)

    reduction = Reduction(gradients, built_with, step, rank, optimizer)
    update_through(reduction, update)
    return None


def _check(facts: Overridden, gradients: Sequence[Any]) -> None:
    """Refuses an optimizer that would look at parts of sums, or whose own sum would not
    be called, and a step without a gradient."""
    if gradients and all(gradient is None for gradient in gradients):
        raise ConfigurationError(
            f"No variable has a gradient for {facts.optimizer.name!r}: the loss does "
            "not depend on them. Compute the model's outputs and the loss within the "
            "GradientTape, by TensorFlow or keras.ops (not by NumPy)."
        )
    facts.updates.check(facts.optimizer, facts.leaves)
    if facts.step.replicas == 1:
        return
    for leaf in facts.own_reduction:
        raise ConfigurationError(
            f"The optimizer {type(leaf).__name__} has {REDUCE} of its own, which "
            "would not be called: gradients are added up before an optimizer looks "
            "at them. What it does with the sum belongs into apply, before it "
            "calls super().apply."
        )
    if not facts.reduces_first:
        _refuse_own_look(facts.optimizer)


def _refuse_own_look(optimizer: Optimizer) -> None:
    for leaf in (optimizer, *innermost_optimizers(optimizer)):
        own = find_gradient_hook(leaf, BEFORE_ACCUMULATION)
        if own is not None:
            raise ConfigurationError(
                f"The optimizer {type(leaf).__name__} has {own} of its own, and "
                "accumulates gradients (gradient_accumulation_steps): it would look at "
                "each replica's part of their sum, which Keras adds up later. If it "
                "only multiplies single elements, declare the class attribute "
                "is_elementwise = True. Or accumulate with "
                "tfdp.DistributedOptimizer(optimizer, accumulate_steps=...)."
            )


def build_before_step(optimizer: Optimizer, variables: list[Any]) -> None:
    """Builds `optimizer` outside of the replicas, before the step goes on.

    Within the step one replica would store, in every step, what some optimizers copy
    from the weights when they are built.
    """
    found = _scale_state(optimizer)

    def add_variable(*args: Any, name: Any = None, **options: Any) -> Any:
        if name in found:
            return found[name]
        return type(optimizer).add_variable(optimizer, *args, name=name, **options)

    def build() -> None:
        with (
            keras.name_scope(optimizer.name, caller=optimizer),
            instance_attributes(
                optimizer, {"add_variable": add_variable} if found else {}
            ),
        ):
            optimizer.build(variables)
        optimizer.built = True

    if current_step() is None:
        build()
    else:
        leaves = innermost_optimizers(optimizer)
        updates_of(optimizer).check_build(optimizer, leaves, variables)
        call_before_step(build)


def _scale_state(optimizer: Optimizer) -> dict[str, keras.Variable]:
    """The state of a loss scale that `_build_scale` has built."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return {}
    own = vars(optimizer)
    return {name: own[name] for name in SCALE_STATE if name in own}


def _scale_loss(optimizer: Any, loss: Any) -> Any:
    """`scale_loss` as after `build`.

    A loss scaler that is not built multiplies by a constant, which a graph would keep.
    """
    scale_loss = type(optimizer).scale_loss.__get__(optimizer)
    if optimizer.built or current_step() is None:
        return scale_loss(loss)
    is_scaler = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if is_scaler and not _scale_state(optimizer):
        call_before_step(functools.partial(_build_scale, optimizer))
    try:
        with instance_attributes(optimizer, {"built": True}):
            return scale_loss(loss)
    except AttributeError as error:
        raise ConfigurationError(
            f"The optimizer {type(optimizer).__name__} has scale_loss of its own, "
            f"which uses what build creates ({error}), and is not built: call "
            "optimizer.build(model.trainable_variables) in `with strategy.scope():` "
            "before training."
        ) from error


def _build_scale(optimizer: Any) -> None:
    """Builds only the state of the loss scale, which needs no weights."""
    without_weights = {"build": lambda variables: None}
    with (
        keras.name_scope(optimizer.name, caller=optimizer),
        instance_attributes(optimizer.inner_optimizer, without_weights),
    ):
        keras.optimizers.LossScaleOptimizer.build(optimizer, [])
    optimizer.built = False


def _check_finite(facts: Overridden, gradients: Sequence[Any]) -> tf.Tensor:
    """Keras' test on replicated gradients; otherwise replicas agree on the result."""
    optimizer = facts.optimizer
    is_replicated = facts.reduces_first and facts.updates.has_whole_sums
    if is_replicated or tf.distribute.in_cross_replica_context():
        return type(optimizer).check_finite(optimizer, gradients)
    if is_own(optimizer, "check_finite"):
        raise ConfigurationError(
            f"The optimizer {type(optimizer).__name__} has check_finite of its own, "
            "which would look at each replica's part of the gradients, or its shards: "
            "leave out shard=, layout= and gradient_accumulation_steps, or the method."
        )
    return agree_finite(optimizer, gradients, facts.step, current_rank())


def _reduce(
    facts: Overridden, grads_and_vars: Sequence[tuple[Any, Any]]
) -> list[tuple[Any, Any]]:
    """Reduces, and then clips, gradients that were not reduced before."""
    optimizer, step = facts.optimizer, facts.step
    pairs = list(grads_and_vars)
    if current_step() is None or not step.reduces_in_update:
        return pairs
    places = [i for i, (gradient, _) in enumerate(pairs) if gradient is not None]
    variables = [pairs[i][1] for i in places]
    gradients = [pairs[i][0] for i in places]
    reduced = reduce_gradients(gradients, step, current_rank(), variables, optimizer)
    clipped = facts.updates.clip(optimizer, reduced, variables)
    for place, gradient in zip(places, clipped, strict=True):
        pairs[place] = (gradient, pairs[place][1])
    return pairs


@contextlib.contextmanager
def takes_reduced(optimizer: Optimizer) -> Iterator[None]:
    """Makes `optimizer` treat its gradients as reduced already within the context."""
    updates, found = updates_of(optimizer), current_step()
    with contextlib.ExitStack() as stack:
        if found is not None:
            stack.enter_context(found[0].updating())
        for leaf in innermost_optimizers(optimizer):
            updates.check(leaf, [leaf])
            own = updates.overrides(leaf)
            stack.enter_context(instance_attributes(leaf, own | ALREADY_REDUCED))
        yield


class _UpdatesBuilt(list[tuple[str, list[tf.Operation]]]):
    """Names of optimizers, and the operations of the first replica's update."""


def warn_about_draws(step: Step) -> None:
    """Warns of TensorFlow's random ops in updates: their seeds differ by replica, and
    those of `keras.random` do not."""
    for names, built in step.of(_UpdatesBuilt):
        if any(map(draws, operations_within(built))):
            step.state_suspicions.add(
                f"the optimizer {names} draws random numbers with TensorFlow ops, "
                "which differ on each replica, so the copies of the weights "
                "diverge. Draw with keras.random and a keras.random.SeedGenerator "
                "in the optimizer: in an update these draws are the same on all "
                "replicas"
            )


def _noting_draws(
    facts: Overridden, update: Callable[..., Any], gradients: Any, variables: Any
) -> Any:
    """Calls `update`, and notes what it builds, for the end of the step."""
    step = facts.step
    # As in a user's own merge_call: one draw for all copies.
    is_noted = not tf.distribute.in_cross_replica_context()
    is_noted = is_noted and step.replicas > 1 and not step.is_local
    if not is_noted or step.here is not step.traces[0]:  # one replica is enough
        return update(gradients, variables)
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = update(gradients, variables)
    names = sorted({type(each).__name__ for each in (facts.optimizer, *facts.leaves)})
    step.of(_UpdatesBuilt).append((", ".join(names), graph.get_operations()[before:]))
    return result


#: Keras' mark of variables that get their gradient as the next value.
OVERWRITTEN = "overwrite_with_gradient"
# Of such a history only the first value is new, the others are equal on all replicas.
HISTORY = "amax_history"


def is_overwritten(variable: Any) -> bool:
    """Whether Keras stores the gradient of `variable` as its next value."""
    return bool(getattr(variable, OVERWRITTEN, False))


def maximize_stored_values(
    gradients: list[Any], variables: Sequence[Any], step: Step, optimizer: Optimizer
) -> list[Any]:
    """`gradients`, where values to store are the elementwise maximum over all replicas.

    A float8 layer (`quantize("float8")`) tracks the largest values and passes the new
    ones on as gradients; Keras takes the maximum over accumulated micro-steps, too. It
    costs one exchange of a number per such variable and replica.
    """
    new: dict[int, tf.Tensor] = {}
    for place, (gradient, variable) in enumerate(
        zip(gradients, variables, strict=False)
    ):
        if not is_overwritten(variable) or gradient is None:
            continue
        updates_of(optimizer).check_overwritten(variable)
        flat = tf.reshape(gradient, [-1])
        new[place] = flat[:1] if variable.name.endswith(HISTORY) else flat
    if not new:
        return gradients
    results = list(gradients)
    maxima = largest_of_replicas(list(new.values()), step, current_rank(), optimizer)
    for place, part in zip(new, maxima, strict=True):
        flat = tf.reshape(gradients[place], [-1])
        whole = tf.concat([part, flat[part.shape[0] :]], axis=0)
        results[place] = tf.reshape(whole, gradients[place].shape)
    return results


def refuse_overwritten(variables: Sequence[Any], wrapper: str) -> None:
    """Raises ConfigurationError if the gradient of one of `variables` is its value."""
    for variable in variables:
        if is_overwritten(variable):
            raise ConfigurationError(
                f"{wrapper} adds gradients up, and that of {variable.path!r} is a "
                "value to store (float8 layer). Use the Keras optimizer itself."
            )


def sums_without_overrides() -> bool:
    """Whether an optimizer without overrides requests the sum of its gradients; raises
    ConfigurationError, or ScopeError, unless that sum is exact."""
    # TensorFlow's reduction does not pass the caller; Keras' open name scopes have it.
    stack = keras_state.get_global_attribute("name_scope_stack") or []
    callers = [getattr(scope, "caller", None) for scope in stack]
    optimizers = [c for c in callers if isinstance(c, Optimizer)]
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


def _why_not_exact(optimizer: Optimizer) -> str | None:
    """Why summing the gradients of an optimizer without overrides is not enough."""
    if not updates_of(optimizer).has_whole_sums:
        return "with shard= or layout= each replica would add other parts of gradients"
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
        return "its gradients would be sent instead of its momentum"
    graph = tf.compat.v1.get_default_graph()
    if is_branch_graph(graph) and not optimizer.gradient_accumulation_steps:
        return (
            "is called within a conditional, such as a loss scaler's, and each replica "
            "would branch by its own gradients: replicas would deadlock"
        )
    return None
