"""TensorFlow's collective runtime over several processes: its start and its abort.

Each process serves its own devices by gRPC and sees no others; process 0 hands out the
parameters of the groups. Devices get the process into their names, so it has to start
before TensorFlow does.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp._private.names import eager_context
from tfdp.cluster.machine import restart_in_words
from tfdp.errors import ConfigurationError

__all__ = ["abort_collectives", "has_started", "start_collectives"]

JOB = "worker"
_started: list[tuple[int, int]] = []


def start_collectives(rank: int, addresses: Sequence[str]) -> bool:
    """Lets collective ops of this process meet those of the others.

    Once per process: a later strategy of the same workers goes on with it.

    Args:
      rank: this process.
      addresses: "host:port" of every process, by rank; the port of this one is free.

    Returns:
      Whether they were started now: a server of this process listens at its port.

    Raises:
      ConfigurationError: when TensorFlow has started already, or with other workers.
    """
    place = (rank, len(addresses))
    if _started:
        if _started[0] != place:
            raise ConfigurationError(
                f"TensorFlow's collectives of this process were started as worker "
                f"{_started[0][0]} of {_started[0][1]}, and cannot become worker "
                f"{rank} of {len(addresses)}: use one cluster in a process."
            )
        return False
    runtime = eager_context.context()
    try:
        runtime.configure_collective_ops(
            collective_leader=f"/job:{JOB}/replica:0/task:0",
            device_filters=(f"/job:{JOB}/task:{rank}",),
        )
        cluster = tf.train.ClusterSpec({JOB: list(addresses)})
        runtime.enable_collective_ops(
            tf.train.ServerDef(
                cluster=cluster.as_cluster_def(),
                job_name=JOB,
                task_index=rank,
                protocol="grpc",
                default_session_config=runtime.config,
            )
        )
    except RuntimeError as error:
        raise ConfigurationError(
            "Communication(engine='tensorflow') on several hosts: make the strategy "
            "before anything else uses TensorFlow (tensors, variables, models, lists "
            f"of logical devices).{restart_in_words()} TensorFlow says: {error}"
        ) from error
    # Starts the server.
    tf.config.list_logical_devices()
    _started.append(place)
    return True


def has_started() -> bool:
    """Whether TensorFlow's runtime runs, and can be told of no other processes.

    Once they were told, it can go on with the same ones.
    """
    return bool(eager_context.context()._initialized) and not _started


def abort_collectives(message: str) -> None:
    """Ends every collective op that waits, and all later ones, with `message`."""
    eager_context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)
