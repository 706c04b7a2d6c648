"""A training step in which groups of replicas train apart (`tfdp.sync`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.sync.rounds import Sync
from tfdp.tracing.keras_steps import name_of_step
from tfdp.tracing.run import ReplicaRun
from tfdp.variables.local_view import LocalView

Groups = tuple[tuple[int, ...], ...]


def has_no_effect(sync: Sync, strategy: tf.distribute.Strategy) -> bool:
    """Whether `sync` lets hosts train apart and `auto_strategy` has found one host.

    Its replicas then meet in every step, and the first `fit` says so.
    """
    idle_options = getattr(strategy, "idle_options", None)
    if sync.across != "hosts" or idle_options is None:
        return False
    if strategy.extended.reducer.host_groups is not None:
        return False  # `hierarchy=(2, 2)` simulates hosts
    idle_options.add("sync", "there are no other hosts to train apart from")
    return True


def groups_across(strategy: tf.distribute.Strategy, across: str) -> Groups:
    """The replicas of this process that step together, group by group.

    Raises:
      ConfigurationError: when this strategy's replicas cannot train apart so.
    """
    extended = strategy.extended
    if getattr(strategy, "compiles_steps", True):
        raise ConfigurationError(
            f"sync=... lets replicas train apart, which {type(strategy).__name__} "
            "cannot. Use tfdp.DataParallelStrategy or "
            "tfdp.MultiHostDataParallelStrategy, or leave sync out."
        )
    if extended.shards is not None:
        raise ConfigurationError(
            "sync=... keeps weights and optimizer state of each replica's own, and "
            f"shard={strategy.shard!r} spreads one copy over replicas, within hosts as "
            "well (docs/options.md says why). Leave one of the two out."
        )
    if strategy.pad_batches:
        raise ConfigurationError(
            "sync=... does not go with pad_batches: its rows are counted over all "
            "replicas. Leave one of the two out."
        )
    if across == "replicas":
        return tuple((rank,) for rank in range(len(extended.worker_devices)))
    groups = extended.reducer.host_groups
    if groups is None:
        raise ConfigurationError(
            "sync with across='hosts' lets hosts train apart, and here is one host, or "
            "an engine without sums within a host (engine='tensorflow'). Say "
            "across='replicas' to let each replica train apart, or use several hosts "
            "(tfdp.MultiHostDataParallelStrategy with engine='sockets' or 'mpi', or "
            "Communication(hierarchy=(2, 2)), which simulates them)."
        )
    return groups


@dataclasses.dataclass(frozen=True, eq=False)
class LooksApart:
    """A step that only looks, where replicas train apart: it asks no other replica.

    Args:
      look: what runs on each replica.
    """

    look: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """What the look gives."""
        return self.look(*args)


def begin_local_run(
    step: Any,
    optimizers: Sequence[keras.optimizers.Optimizer],
    run: ReplicaRun,
    strategy: tf.distribute.Strategy,
    *,
    is_jitted: bool,
) -> None:
    """Lets the replicas of `run` train apart, where `step` is a model's training step
    and one of its optimizers says so.

    Args:
      step: what runs on each replica; one that `LooksApart` begins no round.
      optimizers: those of the model that `step` is of.
      run: the strategy's run, before the replicas are traced.
      strategy: the strategy.
      is_jitted: whether XLA compiles the step.

    Raises:
      ConfigurationError: when such a step cannot be.
    """
    if isinstance(step, LooksApart):
        # Others may be in a step; and eager replicas, which take turns, would wait.
        run.groups = tuple((rank,) for rank in range(run.replicas))
        return
    syncs = {
        o: o.sync
        for o in optimizers
        if isinstance(_sync_of(o), Sync) and not has_no_effect(o.sync, strategy)
    }
    if not syncs or name_of_step(step) != "train_step":
        return
    across = {sync.across for sync in syncs.values()}
    if len(across) > 1:
        raise ConfigurationError(
            "One model is trained by optimizers whose sync=... says across='hosts' and "
            "across='replicas'. Say the same for all."
        )
    if tf.executing_eagerly():
        raise ConfigurationError(
            "sync=... needs graphs: eager replicas run one after the other and stop "
            "for each other at every update. Leave out run_eagerly=True."
        )
    if is_jitted or step.__self__.jit_compile:
        raise ConfigurationError(
            "sync=... has not been shown to work with jit_compile=True. Compile the "
            "model with jit_compile=False."
        )
    run.groups = groups_across(strategy, across.pop())
    for place, optimizer in enumerate(syncs):
        # What layers store belongs to the model; one optimizer sees to it.
        state = step.__self__.non_trainable_variables if place == 0 else ()
        optimizer.train_apart([variable.value for variable in state])


def _sync_of(optimizer: keras.optimizers.Optimizer) -> Any:
    return getattr(optimizer, "sync", None)


def refuse_in_local_run(run: ReplicaRun) -> None:
    """Refuses a sum over replicas that train apart.

    Raises:
      ConfigurationError: within a step in which they do.
    """
    if run.is_local:
        raise ConfigurationError(
            "A layer, a loss or a step of your own sums over all replicas "
            "(all_reduce, synchronized batch normalization, a variable with "
            "aggregation 'mean' or 'sum'), and with sync=... replicas train apart: "
            "most steps exchange nothing. Leave that sum out, or sync."
        )


# What replicas that step together give to sums over them, and do with the results.


SumOverHosts = Callable[[tf.Tensor], tf.Tensor]


def parts_of(gradients: Sequence[Any]) -> list[list[tf.Tensor]]:
    """Tensors that a conditional can return: of slices their values and indices."""
    return [
        [g.values, g.indices] if isinstance(g, tf.IndexedSlices) else [g]
        for g in gradients
    ]


def times(gradient: Any, factor: tf.Tensor) -> Any:
    """The gradient times a scalar; slices stay slices."""
    factor = tf.cast(factor, gradient.dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient * factor
    values = gradient.values * factor
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def share_of_state(variable: LocalView, share: tf.Tensor, rank: int) -> tf.Tensor:
    """What the replica's own value is of a mean in which it has this share."""
    value = variable.local_copy(rank).read_value()
    share = tf.cast(share, value.dtype)
    # Statistics of no sample are not a number, and 0 times that is not 0.
    return tf.where(share > 0, value * share, tf.zeros_like(value))


def assign_local(
    variables: Sequence[LocalView], values: Sequence[tf.Tensor], rank: int
) -> None:
    """Stores a value in each of the replica's own variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.local_copy(rank).assign(value)


def summed_over_hosts(
    sums: dict[Any, tf.Tensor], sum_over_hosts: SumOverHosts
) -> dict[Any, tf.Tensor]:
    """`sums` added up over the hosts, in one exchange for each type."""
    totals: dict[Any, tf.Tensor] = {}
    for dtype in sorted({value.dtype.name for value in sums.values()}):
        keys = [key for key, value in sums.items() if value.dtype.name == dtype]
        flat = [tf.reshape(sums[key], [-1]) for key in keys]
        lengths = tf.stack([tf.size(part) for part in flat])
        total = sum_over_hosts(tf.concat(flat, 0))
        pieces = tf.split(total, lengths, num=len(keys))
        for key, piece in zip(keys, pieces, strict=True):
            whole = tf.reshape(piece, tf.shape(sums[key]))
            totals[key] = tf.ensure_shape(whole, sums[key].shape)
    return totals
