"""Local training steps: groups of replicas step independently (`tfdp.sync`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp.errors import ConfigurationError
from tfdp.plan.options import refuse_options
from tfdp.plan.topology import Groups
from tfdp.step.find_optimizers import optimizers_with_sync
from tfdp.tracing.keras_steps import name_of_step
from tfdp.tracing.step import Step

if TYPE_CHECKING:
    from tfdp.sync.policy import Policy


def groups_across(strategy: tf.distribute.Strategy, sync: Policy) -> Groups:
    """The replicas of this process that step together, by group; ConfigurationError if
    this strategy's replicas cannot train so."""
    extended = strategy.extended
    if getattr(strategy, "compiles_steps", True):
        raise ConfigurationError(
            f"sync=... lets replicas train locally, which {type(strategy).__name__} "
            "cannot. Use tfdp.DataParallelStrategy or "
            "tfdp.MultiHostDataParallelStrategy, or leave sync out."
        )
    refuse_options(strategy.given.replace(sync=sync))
    if sync.across == "replicas":
        return Groups([rank] for rank in range(len(extended.worker_devices)))
    transport = extended.reducer.transport
    topology, elastic = transport.topology, getattr(strategy, "elastic_hosts", None)
    # Local training was not tried with TensorFlow's collectives.
    if elastic is None and (topology.hosts == 1 or transport.name == "tensorflow"):
        raise ConfigurationError(
            "sync with across='hosts' lets hosts train locally, and here is one host, "
            "or engine='tensorflow', with which local training was not tried. Set "
            "across='replicas' to let each replica train locally, or use several hosts "
            "(tfdp.MultiHostDataParallelStrategy with engine='sockets' or 'mpi', or "
            "Communication(hierarchy=(2, 2)), which simulates them)."
        )
    # All hosts have as many replicas, so that the first groups stand for those here.
    hosts = len(extended.worker_devices) // topology.devices_per_host
    return Groups(topology.within_hosts[:hosts])


@dataclasses.dataclass(frozen=True, eq=False)
class LocalLook:
    """A step that does not train on rows, and sums nothing over hosts."""

    look: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.look(*args)


def begin_local_step(
    fn: Any,
    optimizers: Sequence[Optimizer],
    step: Step,
    strategy: Any,
) -> None:
    """Begins a training step where an optimizer of the model has a `sync`; most make
    `step` local training. A `LocalLook` starts no round.

    Raises:
      ConfigurationError: when such a step is not supported.
    """
    if isinstance(fn, LocalLook):
        # Others may be in a step, and eager replicas, which take turns, would hang.
        step.train_in(Groups([rank] for rank in range(step.replicas)))
        return
    own = optimizers_with_sync(optimizers, strategy)
    if not own or name_of_step(fn) != "train_step":
        return
    across = {optimizer.sync.across for optimizer in own}
    if len(across) > 1:
        raise ConfigurationError(
            "One model is trained by optimizers whose sync=... says across='hosts' and "
            "across='replicas'. Say the same for all."
        )
    if strategy.is_jitted(fn.__self__):
        raise ConfigurationError(
            "sync=... has not been shown to work with jit_compile=True. Compile the "
            "model with jit_compile=False."
        )
    if len(own) > 1 and getattr(strategy, "elastic_hosts", None) is not None:
        raise ConfigurationError(
            "One model is trained by several optimizers with sync=... under "
            "Communication(min_hosts=...), where an update has one round of hosts. "
            "Give one optimizer for all variables, or leave out min_hosts."
        )
    if all(optimizer.sync.trains_locally for optimizer in own):
        step.train_in(groups_across(strategy, own[0].sync))
    for place, optimizer in enumerate(own):
        # What layers store belongs to the model: its first optimizer handles it.
        state = fn.__self__.non_trainable_variables if place == 0 else ()
        optimizer.train_apart([variable.value for variable in state], step)


def refuse_in_local_step(step: Step) -> None:
    """Raises ConfigurationError for a sum over replicas in local training."""
    if step.is_local:
        raise ConfigurationError(
            "A layer, a loss or a step of your own sums over all replicas "
            "(all_reduce, synchronized batch normalization, a variable with "
            "aggregation 'mean' or 'sum'), and with sync=... replicas do not wait for "
            "each other within a step. Leave that sum out, or sync."
        )


SumOverHosts = Callable[[tf.Tensor], tf.Tensor]


def summed_over_hosts(
    sums: dict[Any, tf.Tensor], sum_over_hosts: SumOverHosts
) -> dict[Any, tf.Tensor]:
    """`sums` added up over the hosts, in one exchange per dtype."""
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
