"""Optimizers that need whole matrices: which weights, and which replica updates them.

Each such weight has one owner among the replicas that share its shards. Its gradient is
reduced to the owner, which keeps the optimizer's state, computes the update once, and
hands the new weight out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private import keras_models
from tfdp._private import optimizer_hooks as hooks
from tfdp.errors import ConfigurationError
from tfdp.plan.exclusions import variable_path
from tfdp.plan.owners import assign_owners, newton_schulz_cost
from tfdp.plan.shards import OwnedLayout
from tfdp.seams.replace import is_replaced, replace
from tfdp.variables.in_shards import is_in_shards, is_stored_in_shards


class WholeUpdates(NamedTuple):
    """Which weights an optimizer updates whole, and what that costs.

    Args:
      needs: whether it needs the whole of a weight, given the optimizer and the weight.
      cost: of the update of a weight of a shape.
    """

    needs: Callable[[Any, Any], bool]
    cost: Callable[[Sequence[int]], int]


def _always(optimizer: Any, variable: Any) -> bool:
    return True


#: Keras' optimizers, by the class that defines `update_step`.
OF_KERAS = {
    "Muon": WholeUpdates(hooks.orthogonalizes, newton_schulz_cost),
    "Adafactor": WholeUpdates(_always, math.prod),
}
OF_USERS = WholeUpdates(_always, newton_schulz_cost)


def whole_updates(optimizer: Optimizer) -> WholeUpdates | None:
    """The rule for weights that `optimizer` updates whole; None: it updates none."""
    if getattr(optimizer, "needs_whole_matrix", False):
        return OF_USERS
    owner = hooks.definer_of(optimizer, "update_step")
    is_keras = owner.__module__.startswith("keras.")
    return OF_KERAS.get(owner.__name__) if is_keras else None


def place_when_built(optimizer: Optimizer) -> None:
    """Makes `build` of `optimizer` decide which of its weights have owners."""
    if not is_replaced(optimizer, "build"):
        replace(optimizer, "build", functools.partial(_build, optimizer))


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    shards = getattr(hooks.strategy_of(optimizer).extended, "shards", None)
    rule = whole_updates(optimizer)
    build = type(optimizer).build.__get__(optimizer)
    # A loss scaler or a group has no weights of its own: the optimizers within decide,
    # and may have been built before, in another scaler.
    is_around = hasattr(optimizer, "inner_optimizer") or hasattr(
        optimizer, "optimizers"
    )
    if optimizer.built or shards is None or is_around:
        build(variables)
        return
    owned = owned_by(optimizer, variables)
    # Another optimizer may have had them: the last one that is built decides.
    ids = set(map(id, owned))
    for variable in filter(is_in_shards, variables):
        if id(variable) not in ids:
            variable.value.owner = None
    if rule is None:
        build(variables)
        return
    if shards.transport.is_compiled:
        raise ConfigurationError(
            f"The optimizer {type(optimizer).__name__} cannot update shards on a TPU: "
            "it updates whole matrices, each on one replica, and there one program "
            "serves all replicas. Use shard='none'."
        )
    for variable in owned:
        _refuse_block(optimizer, variable)
    new = [variable for variable in owned if variable.value.owner is None]
    costs = [rule.cost(tuple(variable.shape)) for variable in new]
    for variable, owner in zip(new, assign_owners(costs, shards.loads), strict=True):
        variable.value.owner = owner
    build(variables)
    _place_state(optimizer, variables, owned, shards)


def _refuse_block(optimizer: Any, variable: Any) -> None:
    """Refuses a weight of groups, for an optimizer that updates it whole."""
    if variable.value.layout.groups is not None:
        by = variable.value.stored_by
        raise ConfigurationError(
            f"The optimizer {type(optimizer).__name__} updates the whole of the weight "
            f"{variable_path(variable)!r}, at a replica that it chooses among all, and "
            f"{by} has given parts to the replicas of groups. Leave {by} out for that "
            "weight, or use an optimizer that updates each element by itself, such as "
            "AdamW."
        )


def owned_by(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """The sharded ones of `variables` that `optimizer` updates whole."""
    rule = whole_updates(optimizer)
    if rule is None:
        return []
    return [v for v in variables if is_in_shards(v) and rule.needs(optimizer, v)]


def refuse_late_owners(optimizer: Any, leaves: Sequence[Any], variables: Any) -> None:
    """Refuses owners of weights whose gradients this step has reduced to shards."""
    for variable in variables:
        if not is_stored_in_shards(variable) or variable.value.owner is not None:
            continue
        if any(owned_by(leaf, [variable]) for leaf in leaves):
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} updates the weight "
                f"{variable_path(variable)!r} whole, on one replica, and is not built "
                'before the step, whose gradients are in shards (shard="parameters"). '
                "Call its build(variables), with the variables that it updates, in "
                "`with strategy.scope():` before training."
            )


def _place_state(
    optimizer: Any, variables: Sequence[Any], owned: list[Any], shards: Any
) -> None:
    """Moves state that `build` created by its own shape (Adafactor's rows and columns)
    to owners, and moving averages of weights to where the weights are stored."""
    places = {id(variable): place for place, variable in enumerate(variables)}
    averages = hooks.averages_of(optimizer) if optimizer.use_ema else []
    for state in hooks.states_by_weight(optimizer, len(variables)).values():
        for variable in owned:
            slot, layout = state[places[id(variable)]], variable.value.update_layout
            if not isinstance(slot, keras.Variable) or slot is variable:
                continue
            if state is averages:
                layout = variable.value.layout
            elif not is_in_shards(slot):
                layout = OwnedLayout(tuple(slot.shape), layout.parts, layout.owner)
            if not is_in_shards(slot) or slot.value.layout != layout:
                with tf.init_scope(), hooks.strategy_of(optimizer).scope():
                    value = slot.numpy()
                    with shards.making(layout):
                        keras_models.recreate_variable(slot, value)


def check_owners(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses weights that `optimizer` needs whole and that have no owner, or that have
    one for another optimizer."""
    owned = set(map(id, owned_by(optimizer, variables)))
    for variable in filter(is_in_shards, variables):
        if (variable.value.owner is not None) != (id(variable) in owned):
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} updates the weight "
                f"{variable_path(variable)!r} in other shards than the optimizer that "
                "was built last for it. Use one optimizer for a weight, or compile "
                "with a new one; create it in `with strategy.scope():`."
            )
