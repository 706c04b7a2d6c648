"""The arms of several processes: how each is started and what trains in it.

Adding an arm is adding a row to `GROUP_ARMS`. TensorFlow is imported inside the
functions, so that the names can be listed and checked without it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = [
    "GROUP_ARMS",
    "NO_EXCHANGE",
    "NO_SUMS",
    "ONE_PROCESS",
    "GroupArm",
    "Place",
    "find_mpiexec",
    "one_process_arm",
    "without_sums",
]

ONE_PROCESS = "one-process"
NO_EXCHANGE = "no-exchange"
STOCK_MULTI_WORKER = "stock-multi-worker"
NO_SUMS = "-no-sums"
TORCH_PREFIX = "torch-"
SMALL_BUCKET_BYTES = 1 << 20
BOTH = ("allreduce", "train")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process stands in its group.

    Args:
      rank, workers: of this process, and how many there are.
      addresses: "host:port" of every worker; MPI's workers find each other by MPI.
      devices_per_worker: logical CPUs of each.
      timeout_seconds: how long a worker waits for the others.
    """

    rank: int
    workers: int
    addresses: tuple[str, ...]
    devices_per_worker: int
    timeout_seconds: float


@dataclasses.dataclass(frozen=True)
class GroupArm:
    """One way to train in several processes.

    Args:
      start: "local" starts the workers here, "mpi" through mpiexec, "single" only one.
      works: what it can do: "allreduce" sums, "train" steps.
      make_strategy: called in each process, before anything else uses TensorFlow;
        None for arms of PyTorch.
      why_left_out: from the number of devices per worker, the reason not to run it
        here; None when it can run.
      by_default: whether it runs when no arms are named.
      is_flat: one process per replica, with no level within the hosts.
      may_move: not bound to one core, as a process with several replicas should not be.
      coarseness: what its sums may lose of a number, as a share of the largest one of
        its tensor; 0 for arms that add what they are given.
    """

    start: Literal["local", "mpi", "single"]
    works: tuple[str, ...]
    make_strategy: Callable[[Place], tf.distribute.Strategy] | None
    why_left_out: Callable[[int], str | None] = lambda devices_per_worker: None
    by_default: bool = True
    is_flat: bool = False
    may_move: bool = False
    coarseness: float = 0.0


def find_mpiexec() -> str | None:
    """Path of mpiexec, on PATH or beside this Python, where wheels put it."""
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    return shutil.which("mpiexec", path=os.pathsep.join(folders))


def _one_device(place: Place) -> tf.distribute.Strategy:
    import tensorflow as tf

    return tf.distribute.get_strategy()


def _stock_multi_worker(place: Place) -> tf.distribute.Strategy:
    import tensorflow as tf

    # What TF_CONFIG would say.
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


def _tfdp(engine: Literal["sockets", "mpi", "tensorflow"], **options: Any) -> Callable:
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


def _compressed_arm(
    method: str, works: tuple[str, ...], coarseness: float = 0.0, **options: Any
) -> GroupArm:
    """Gradients in fewer bytes between hosts, by a method of `tfdp.compression`."""

    def make(place: Place) -> tf.distribute.Strategy:
        from tfdp import compression

        chosen = getattr(compression, method)(**options)
        return _tfdp("sockets", compression=chosen)(place)

    return GroupArm("local", works, make, by_default=False, coarseness=coarseness)


def _without_overlap(make: Callable) -> Callable:
    """Strategies whose exchanges wait for the whole of backprop."""

    def make_waiting(place: Place) -> tf.distribute.Strategy:
        import tensorflow as tf

        strategy = make(place)
        reducer = strategy.extended.reducer
        all_reduce = reducer.all_reduce

        def after_all(values: Any, rank: int, **options: Any) -> Any:
            # The models here have no sparse gradients.
            with tf.control_dependencies(values):
                return all_reduce([tf.identity(v) for v in values], rank, **options)

        reducer.all_reduce = after_all
        return strategy

    return make_waiting


def _in_process(place: Place) -> tf.distribute.Strategy:
    import tfdp

    devices = tfdp.use_virtual_devices(place.devices_per_worker)
    return tfdp.DataParallelStrategy(devices)


def _without_sums(make: Callable) -> Callable:
    """Strategies whose replicas keep their own gradients: a step but for the sums."""
    return lambda place: without_sums(make(place))


def without_sums(strategy: Any) -> Any:
    """`strategy`, whose replicas keep their own gradients from now on."""

    def keep(values: Sequence[Any], rank: int, **options: Any) -> list[Any]:
        return list(values)

    strategy.extended.reducer.all_reduce = keep
    return strategy


def _stock_is_left_out(devices_per_worker: int) -> str | None:
    if devices_per_worker == 1:
        return None
    return "MultiWorkerMirroredStrategy drives one logical CPU per process"


def _mpi_is_left_out(devices_per_worker: int) -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'tfdp[mpi]'"
    if find_mpiexec() is None:
        return "mpiexec is neither on PATH nor beside this Python"
    return None


def _torch_is_left_out(devices_per_worker: int) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install 'tfdp[bench-torch]'"
    if devices_per_worker == 1:
        return None
    return "PyTorch has one replica per process"


def one_process_arm(arm: str) -> str:
    """The arm of one process whose speed the efficiency of `arm` is measured by.

    >>> one_process_arm("tfdp-mpi")
    'one-process'
    """
    return TORCH_ONE_PROCESS if arm.startswith(TORCH_PREFIX) else ONE_PROCESS


TORCH_ONE_PROCESS = f"{TORCH_PREFIX}one-process"

GROUP_ARMS = {
    ONE_PROCESS: GroupArm("single", ("train",), _one_device),
    # As many models as workers: no exchange can be faster than none.
    NO_EXCHANGE: GroupArm("local", ("train",), _one_device),
    STOCK_MULTI_WORKER: GroupArm(
        "local", BOTH, _stock_multi_worker, _stock_is_left_out
    ),
    "tfdp-sockets": GroupArm("local", BOTH, _tfdp("sockets")),
    "tfdp-mpi": GroupArm("mpi", BOTH, _tfdp("mpi"), _mpi_is_left_out),
    "tfdp-tensorflow": GroupArm("local", BOTH, _tfdp("tensorflow")),
    TORCH_ONE_PROCESS: GroupArm("single", ("train",), None, _torch_is_left_out),
    "torch-gloo": GroupArm("local", BOTH, None, _torch_is_left_out),
    "tfdp-sockets-no-overlap": GroupArm(
        "local", ("train",), _without_overlap(_tfdp("sockets"))
    ),
    "tfdp-sockets-small-buckets": GroupArm(
        "local",
        ("train",),
        _tfdp("sockets", bucket_bytes=SMALL_BUCKET_BYTES),
        by_default=False,
    ),
    "tfdp-sockets-bfloat16": GroupArm(
        "local",
        BOTH,
        _tfdp("sockets", wire_dtype="bfloat16"),
        by_default=False,
        coarseness=2.0**-7,  # rounded once by each host, and the sum once more
    ),
    "tfdp-sockets-float16": GroupArm(
        "local", ("train",), _tfdp("sockets", wire_dtype="float16"), by_default=False
    ),
    "tfdp-mpi-bfloat16": GroupArm(
        "mpi",
        ("train",),
        _tfdp("mpi", wire_dtype="bfloat16"),
        _mpi_is_left_out,
        by_default=False,
    ),
    # Of 127 steps each number is off by half of one at most.
    "tfdp-sockets-int8": _compressed_arm("Int8", BOTH, coarseness=1 / 127),
    "tfdp-sockets-sign": _compressed_arm("SignSGD", ("train",)),
    "tfdp-sockets-top-k": _compressed_arm("TopK", ("train",), ratio=0.01),
    "tfdp-sockets-power-sgd": _compressed_arm(
        "PowerSGD", ("train",), rank=1, start_step=0
    ),
    "torch-gloo-float16": GroupArm(
        "local", ("train",), None, _torch_is_left_out, by_default=False
    ),
    "torch-gloo-power-sgd": GroupArm(
        "local", ("train",), None, _torch_is_left_out, by_default=False
    ),
    "tfdp-in-process": GroupArm(
        "single", BOTH, _in_process, by_default=False, may_move=True
    ),
    f"tfdp-in-process{NO_SUMS}": GroupArm(
        "single",
        ("train",),
        _without_sums(_in_process),
        by_default=False,
        may_move=True,
    ),
    f"tfdp-sockets{NO_SUMS}": GroupArm(
        "local", ("train",), _without_sums(_tfdp("sockets")), by_default=False
    ),
    "tfdp-sockets-flat": GroupArm(
        "local", BOTH, _tfdp("sockets"), by_default=False, is_flat=True
    ),
    "torch-gloo-flat": GroupArm(
        "local", BOTH, None, _torch_is_left_out, by_default=False, is_flat=True
    ),
}
