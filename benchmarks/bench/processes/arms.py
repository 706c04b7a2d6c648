"""The arms of several processes; to add an arm, add a row to `GROUP_ARMS`.

TensorFlow is imported in functions, so that names can be listed without it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tfdp.tools.measuring.models import BATCHES_IN_MEMORY, LOCAL_BATCH

if TYPE_CHECKING:
    import tensorflow as tf

ONE_PROCESS = "one-process"
NO_EXCHANGE = "no-exchange"
STOCK_MULTI_WORKER = "stock-multi-worker"
BOTH = ("allreduce", "train")
# The timed call; and the facts that a worker reports when it is ready.
Work = tuple[Callable[[], object], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Place:
    """A process within its group.

    `addresses`: "host:port" of every worker, except with MPI.
    """

    rank: int
    workers: int
    addresses: Sequence[str]
    devices_per_worker: int
    timeout_seconds: float


@dataclasses.dataclass(frozen=True)
class GroupArm:
    """One way to train in several processes.

    Args:
      start: "local" starts the workers here, "mpi" with mpiexec, "single" only one.
      works: supported suites: "allreduce" sums, "train" steps.
      make_strategy: called in each process, before anything else uses TensorFlow.
      why_left_out: from the number of devices per worker, why it cannot run here.
      by_default: whether it runs when no arms are named.
      is_flat: one process per replica, without a level within hosts.
      prepare: from the request, the arm's name and the place, its work; None: that of
        `processes.work` under the strategy.
      one_process: the single-process arm to which its efficiency refers.
      member: the module that its processes run.
    """

    start: Literal["local", "mpi", "single"]
    works: tuple[str, ...]
    make_strategy: Callable[[Place], tf.distribute.Strategy] | None
    why_left_out: Callable[[int], str | None] = lambda devices_per_worker: None
    by_default: bool = True
    is_flat: bool = False
    prepare: Callable[[Any, str, Place], Work] | None = None
    one_process: str = ONE_PROCESS
    member: str = "benchmarks.bench.processes.member"


def find_mpiexec() -> str | None:
    """Path of mpiexec, on PATH or next to this Python, where wheels install it."""
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    return shutil.which("mpiexec", path=os.pathsep.join(folders))


def _one_device(place: Place) -> tf.distribute.Strategy:
    import tensorflow as tf

    return tf.distribute.get_strategy()


def _stock_multi_worker(place: Place) -> tf.distribute.Strategy:
    import tensorflow as tf

    # Equivalent to TF_CONFIG.
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(place.addresses)}),
        task_type="worker",
        task_id=place.rank,
        rpc_layer="grpc",
    )
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(resolver, options)


def tfdp_over(
    engine: Literal["sockets", "mpi", "tensorflow"], **options: Any
) -> Callable[[Place], tf.distribute.Strategy]:
    """Makes tfdp's strategy with this engine; `options` of `Communication`."""

    def make(place: Place) -> tf.distribute.Strategy:
        import tfdp

        return tfdp.MultiHostDataParallelStrategy(
            tfdp.Cluster(
                workers=place.workers,
                rank=place.rank,
                coordinator=place.addresses[0],
                source="argument",
            ),
            devices_per_host=place.devices_per_worker,
            communication=tfdp.Communication(
                engine=engine, timeout_seconds=place.timeout_seconds, **options
            ),
        )

    return make


def _stock_is_left_out(devices_per_worker: int) -> str | None:
    if devices_per_worker == 1:
        return None
    return "MultiWorkerMirroredStrategy drives one logical CPU per process"


def mpi_is_left_out(devices_per_worker: int) -> str | None:
    """Why MPI arms cannot run here; None: they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'tfdp[mpi]'"
    if find_mpiexec() is None:
        return "mpiexec is neither on PATH nor next to this Python"
    return None


GROUP_ARMS = {
    ONE_PROCESS: GroupArm("single", ("train",), _one_device),
    # Each worker trains its own model: the upper bound of speed.
    NO_EXCHANGE: GroupArm("local", ("train",), _one_device),
    STOCK_MULTI_WORKER: GroupArm(
        "local", BOTH, _stock_multi_worker, _stock_is_left_out
    ),
    "tfdp-sockets": GroupArm("local", BOTH, tfdp_over("sockets")),
    "tfdp-mpi": GroupArm("mpi", BOTH, tfdp_over("mpi"), mpi_is_left_out),
    "tfdp-tensorflow": GroupArm("local", BOTH, tfdp_over("tensorflow")),
}


def own_rows(array: np.ndarray, rank: int, workers: int) -> np.ndarray:
    """One worker's rows of every global batch of `workers` local ones."""
    shape = (BATCHES_IN_MEMORY, workers, LOCAL_BATCH, *array.shape[1:])
    return array.reshape(shape)[:, rank].reshape(-1, *array.shape[1:])
