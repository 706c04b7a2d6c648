"""Local training (`DistributedOptimizer(sync=...)`): checks and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from tfdp._private.names import is_default_strategy
from tfdp._private.optimizer_hooks import averages_of, strategy_of
from tfdp.compression.method import momentum_compression_of
from tfdp.errors import ConfigurationError
from tfdp.step.local_run import groups_across
from tfdp.step.local_sgd import Rounds
from tfdp.sync.backup_workers import BackupWorkers
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.rounds import Sync
from tfdp.tracing.run import current_run
from tfdp.variables.local_view import LocalView, keep_all_copies
from tfdp.variables.own_values import OwnSumVariable

if TYPE_CHECKING:
    from tfdp.step.backup_rounds import BackupRounds


def refuse_with_sync(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an inner optimizer that cannot train locally."""
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        raise ConfigurationError(
            f"The optimizer {optimizer.name!r} has ema_overwrite_frequency="
            f"{optimizer.ema_overwrite_frequency}, and with sync=... the average is "
            "that of the outer weights, which a step between two synchronizations must "
            "not overwrite. Leave it out: fit then takes the average at its end."
        )
    if momentum_compression_of(optimizer) is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} sends its momentum in every step, and with "
            "sync=... most steps send nothing. Use keras.optimizers.Adam with sync, or "
            "leave sync out."
        )


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
    groups = groups_across(strategy, sync.across)
    reducer = strategy.extended.reducer
    if reducer.compressed is not None:
        raise ConfigurationError(
            f"Communication(compression={reducer.compressed.method!r}) and sync=... "
            "both determine what hosts send. Leave out one of them; "
            "tfdp.sync.DiLoCo(compression=...) compresses what a synchronization sends."
        )
    communication = getattr(reducer, "communication", None)
    if communication is not None and communication.repeated_rows != "auto":
        raise ConfigurationError(
            "Communication(repeated_rows='sum') does not work with sync=...: replicas "
            "that train locally take the rows of an embedding as they come. Leave it "
            "out."
        )
    for variable in own:
        if isinstance(variable, LocalView):
            variable.is_of_group = True
            variable.group_size = len(groups[0])
            if isinstance(variable, OwnSumVariable):
                variable.adds_up_over = "replica" if len(groups) > 1 else "host"
            if len(groups) > 1:
                keep_all_copies(variable)
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
    optimizer: keras.optimizers.Optimizer,
    sync: BackupWorkers,
    variables: Sequence[Any],
) -> BackupRounds | None:
    """The rounds of a built optimizer; None without a strategy."""
    from tfdp.step.backup_rounds import BackupRounds

    updates = optimizer.add_variable(shape=(), dtype="int", name="sync_updates")
    strategy = strategy_of(optimizer)
    if is_default_strategy(strategy):
        return None
    weights = [variable.value for variable in variables]
    return BackupRounds(sync, strategy, optimizer, weights, updates.value)


def refuse_outside_of_fit(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an update outside of a local training step."""
    found = current_run()
    if found is None or not found[0].is_local:
        raise ConfigurationError(
            f"The optimizer {optimizer.name!r} has sync=..., and its update is called "
            "outside of a Keras model's train_step under a strategy of tfdp: a custom "
            "loop has read the outer weights already. Train with model.fit or "
            "train_on_batch (with your own train_step, if you like), or leave out sync."
        )
