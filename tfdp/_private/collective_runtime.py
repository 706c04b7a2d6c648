"""Starts and aborts TensorFlow's collective runtime over several processes.

Each process serves its own devices by gRPC and sees no others; process 0 assigns the
group parameters. Runs before TensorFlow, as device names contain the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp._private.names import runtime_context
from tfdp.cluster.machine import notebook_restart_hint
from tfdp.errors import ConfigurationError

JOB = "worker"
_started: list[tuple[int, int]] = []


def start_collectives(rank: int, addresses: Sequence[str]) -> bool:
    """Starts the runtime, once per process; later strategies of its workers reuse it.

    Args:
      rank: of this process.
      addresses: "host:port" of every process, by rank; the port of this one is free.

    Returns:
      Whether it started now: a server of this process listens at its port.

    Raises:
      ConfigurationError: TensorFlow has started already, or with other workers.
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
    runtime = runtime_context.context()
    try:
        runtime.configure_collective_ops(
            collective_leader=f"/job:{JOB}/replica:0/task:0",
            device_filters=(f"/job:{JOB}/task:{rank}",),
        )
        cluster = tf.train.ClusterSpec({JOB: list(addresses)})
        server = tf.train.ServerDef(job_name=JOB, task_index=rank, protocol="grpc")
        server.cluster.CopyFrom(cluster.as_cluster_def())
        server.default_session_config.CopyFrom(runtime.config)
        runtime.enable_collective_ops(server)
    except RuntimeError as error:
        raise ConfigurationError(
            "Communication(engine='tensorflow') on several hosts: make the strategy "
            "before anything else uses TensorFlow (tensors, variables, models, lists "
            f"of logical devices).{notebook_restart_hint()} TensorFlow says: {error}"
        ) from error
    tf.config.list_logical_devices()  # starts the server
    _started.append(place)
    return True


def has_started() -> bool:
    """Whether TensorFlow's runtime is running without these collectives."""
    return bool(runtime_context.context()._initialized) and not _started


def abort_collectives(message: str) -> None:
    """Aborts every pending and later collective op with `message`."""
    runtime_context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)
