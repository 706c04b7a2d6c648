"""Local training (`DistributedOptimizer(sync=...)`): checks, and what it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdp._private.names import is_default_strategy
from tfdp._private.optimizer_hooks import (
    ACCUMULATOR_NAME,
    AFTER_ACCUMULATION,
    AVERAGE,
    BEFORE_ACCUMULATION,
    WEIGHT_NAME,
    averages_of,
    elementwise_of_keras,
    find_gradient_hook,
    is_own,
    momentum_compression_of,
    strategy_of,
)
from tfdp.errors import ConfigurationError
from tfdp.step.local_sgd import Rounds
from tfdp.step.local_step import groups_across
from tfdp.step.local_training import LocalTraining
from tfdp.sync.asynchronous import Asynchronous
from tfdp.sync.backup_workers import BackupWorkers
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.late import LateSums
from tfdp.sync.policy import Policy
from tfdp.sync.rounds import Sync
from tfdp.tracing.step import current_step
from tfdp.variables.local_view import LocalView, keep_all_copies
from tfdp.variables.own_values import OwnSumVariable


def refuse_with_sync(owner: keras.optimizers.Optimizer) -> None:
    """Refuses a `DistributedOptimizer` that cannot train locally."""
    optimizer = owner.inner_optimizer
    has_rounds = isinstance(owner.sync, Sync)
    if has_rounds and optimizer.use_ema and optimizer.ema_overwrite_frequency:
        raise ConfigurationError(
            f"The optimizer {optimizer.name!r} has ema_overwrite_frequency="
            f"{optimizer.ema_overwrite_frequency}, and with sync=... the average is "
            "that of the outer weights, which a step between two synchronizations must "
            "not overwrite. Leave it out: fit then takes the average at its end."
        )
    if momentum_compression_of(optimizer) is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} sends its momentum in every step, which "
            "sync=... does not do. Use keras.optimizers.Adam with sync, or "
            "leave sync out."
        )
    if isinstance(owner.sync, Asynchronous):
        refuse_at_own_pace(owner)


def make_local_training(
    optimizer: keras.optimizers.Optimizer,
    sync: Policy,
    variables: Sequence[Any],
    update: Callable[[list[Any], list[Any]], None],
) -> LocalTraining | None:
    """The local training of a built optimizer; None outside a strategy.

    `update` makes an update by summed gradients.
    """
    if isinstance(sync, Sync):
        return make_rounds(optimizer, sync, variables)
    if isinstance(sync, BackupWorkers):
        return make_backup_rounds(optimizer, sync, variables)
    strategy = strategy_of(optimizer)
    if is_default_strategy(strategy):
        return None
    if isinstance(sync, Asynchronous):
        return make_own_pace(optimizer, sync, variables)
    if not isinstance(sync, LateSums):
        return None
    groups = groups_across(strategy, sync)
    # Its file is imported where it is used.
    from tfdp.step.late_sums import LateUpdates

    for variable in optimizer.variables:
        is_own = ACCUMULATOR_NAME in variable.path or WEIGHT_NAME in variable.path
        if is_own and isinstance(variable.value, LocalView):
            keep_by_group(variable.value, groups)
    return LateUpdates(
        sync,
        strategy,
        variables,
        group_size=len(groups[0]),
        optimizer=optimizer,
        update=update,
    )


def keep_by_group(variable: LocalView, groups: Sequence[Sequence[int]]) -> None:
    """Lets each group of replicas have its own value, in checkpoints too."""
    variable.is_of_group = True
    variable.group_size = len(groups[0])
    if isinstance(variable, OwnSumVariable):
        variable.adds_up_over = "replica" if len(groups) > 1 else "host"
    if len(groups) > 1:
        keep_all_copies(variable)


def make_rounds(
    optimizer: keras.optimizers.Optimizer, sync: Sync, variables: Sequence[Any]
) -> Rounds | None:
    """The local-SGD rounds of a built optimizer; None without a strategy."""
    own = [variable.value for variable in optimizer.variables]
    updates = optimizer.add_variable(shape=(), dtype="int", name="sync_updates")
    momenta = []
    if isinstance(sync, DiLoCo):
        momenta = [
            optimizer.add_variable_from_reference(v, name="outer_momentum")
            for v in variables
        ]
    strategy = strategy_of(optimizer)
    if is_default_strategy(strategy):
        return None
    groups = groups_across(strategy, sync)
    for variable in own:
        if isinstance(variable, LocalView):
            keep_by_group(variable, groups)
    inner = optimizer.inner_optimizer
    averages = averages_of(inner) if inner.use_ema else []
    return Rounds(
        sync,
        strategy,
        [variable.value for variable in variables],
        momenta=[momentum.value for momentum in momenta],
        averages=[None if a is None else a.value for a in averages],
        average_momentum=inner.ema_momentum if inner.use_ema else None,
        updates=updates.value,
        group_size=len(groups[0]),
        optimizer=optimizer,
    )


def make_backup_rounds(
    optimizer: keras.optimizers.Optimizer, sync: BackupWorkers, variables: Sequence[Any]
) -> LocalTraining | None:
    """The rounds of a built optimizer; None without a strategy."""
    from tfdp.step.backup_rounds import BackupRounds

    updates = optimizer.add_variable(shape=(), dtype="int", name="sync_updates")
    strategy = strategy_of(optimizer)
    if is_default_strategy(strategy):
        return None
    weights = [variable.value for variable in variables]
    return BackupRounds(sync, strategy, optimizer, weights, updates.value)


def refuse_at_own_pace(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses what `sync.Asynchronous` cannot do with these options."""
    inner = optimizer.inner_optimizer
    kind = type(inner).__name__
    is_known = elementwise_of_keras(inner) not in (None, "ScheduleFreeAdamW")
    hooks = (*BEFORE_ACCUMULATION, *AFTER_ACCUMULATION)
    own = find_gradient_hook(inner, hooks) or is_own(inner, AVERAGE)
    if own or not (is_known or getattr(inner, "is_elementwise", False)):
        raise ConfigurationError(
            f"sync=Asynchronous() gives each host a part of every weight, and {kind} "
            "may need whole weights for its update. Use SGD, Adam, AdamW, RMSprop, "
            "Adagrad, Adadelta, Adamax, Nadam, Ftrl or Lion, or set the class "
            "attribute is_elementwise = True if its update of an element needs that "
            "element only."
        )
    if optimizer.accumulate_steps > 1:
        raise ConfigurationError(
            "sync=Asynchronous() pushes the gradient of each step. Leave out "
            f"accumulate_steps={optimizer.accumulate_steps}, and choose a larger batch "
            "instead."
        )
    if optimizer.dynamic_loss_scale:
        raise ConfigurationError(
            "sync=Asynchronous() has no loss scale that all hosts share. Pass "
            "dynamic_loss_scale=False, with the policy mixed_bfloat16 or float32."
        )


def make_own_pace(
    optimizer: keras.optimizers.Optimizer, sync: Asynchronous, variables: Sequence[Any]
) -> LocalTraining:
    """The training of a built optimizer at the hosts' own pace."""
    strategy = strategy_of(optimizer)
    link, reducer = getattr(strategy, "link", None), strategy.extended.reducer
    if link is None or reducer.transport.name != "sockets":
        raise ConfigurationError(
            f"sync={sync!r} needs several hosts (tfdp.MultiHostDataParallelStrategy) "
            "with Communication(engine='sockets'), over which they push. Received: "
            f"{type(strategy).__name__} with the engine {reducer.transport.name!r}."
        )
    groups = groups_across(strategy, sync)
    for variable in variables:
        if getattr(variable, "constraint", None) is not None:
            raise ConfigurationError(
                f"The weight {variable.path!r} has a constraint, which may need the "
                f"whole weight, and with sync={sync!r} each host has a part. Leave out "
                "one of the two."
            )
    # Its file is imported where it is used.
    from tfdp.step.own_pace import OwnPace

    return OwnPace(
        sync, strategy, variables, group_size=len(groups[0]), optimizer=optimizer
    )


def refuse_outside_of_fit(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an update outside of a local training step."""
    found = current_step()
    if found is None or not found[0].is_local:
        raise ConfigurationError(
            f"The optimizer {optimizer.name!r} has sync=..., and its update is called "
            "outside of a Keras model's train_step under a strategy of tfdp: a custom "
            "loop has read the outer weights already. Train with model.fit or "
            "train_on_batch (with your own train_step, if you like), or leave out sync."
        )
