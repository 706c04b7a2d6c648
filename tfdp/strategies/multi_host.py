"""`MultiHostDataParallelStrategy`: the same script in one process per host."""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private import frames, names
from tfdp.checks import is_whole
from tfdp.cluster import Cluster, find_cluster, progress
from tfdp.data.hosts import agree_on_seed, seed_to_share
from tfdp.data.same_batches import new_dataset_name
from tfdp.errors import ConfigurationError
from tfdp.exchange.choose_engine import choose_engine
from tfdp.exchange.elastic_pipeline import ElasticPipeline
from tfdp.exchange.host_group import HostGroup
from tfdp.exchange.pipeline import GradientPipeline
from tfdp.exchange.two_level import AcrossHostsEngine
from tfdp.exchange.two_level_collectives import TensorFlowAcrossHostsEngine
from tfdp.exchange.two_level_shards import ShardsAcrossHostsEngine
from tfdp.hosts import crash_report
from tfdp.hosts.choose_link import make_link
from tfdp.hosts.elastic_group import ElasticHosts
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.python_calls import let_calls_end_at_exit
from tfdp.plan.communication import (
    Communication,
    checked_communication,
    refuse_compressed_shards,
    refuse_idle_options,
    uncompressed,
)
from tfdp.plan.shards import SHARD_GROUPS, Sharding, sharding_of
from tfdp.strategies.connect_hosts import HostConnection, meet, tried
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.devices import (
    add_waiting_thread,
    find_devices,
    first_devices,
    use_virtual_devices,
)
from tfdp.strategies.elastic import join_elastic_hosts, own_share, refuse_exchange
from tfdp.strategies.hierarchical import HierarchicalAllReduce
from tfdp.strategies.keras_backend import check_keras_backend
from tfdp.strategies.multi_host_extended import MultiHostExtended
from tfdp.strategies.multi_host_loops import LedLoops, override_callbacks
from tfdp.strategies.replica_strategy import ReplicaContextStrategy
from tfdp.strategies.startup_checks import warn_of_unchecked_versions
from tfdp.strategies.worker_settings import refuse_differences, settings_of
from tfdp.tracing.keras_steps import is_predict_step
from tfdp.tracing.run import ReplicaRun

# The engine that carries sums between hosts, as `Communication` and shards ask.


def engine_across(
    link: HostLink,
    devices: tuple[str, ...],
    communication: Communication,
    shards_over_hosts: bool,
    by_collectives: bool,
) -> AcrossHostsEngine:
    """The engine of one host among several.

    Args:
      link: to the others.
      devices: of this host's replicas.
      communication: the strategy's.
      shards_over_hosts: whether hosts hold parts of one another's variables.
      by_collectives: whether TensorFlow's collectives carry the gradients.
    """
    wire_dtype = communication.link_dtype
    if by_collectives:
        hint = choose_engine(devices, communication).hint
        return TensorFlowAcrossHostsEngine(devices, link, hint, wire_dtype)
    engine = ShardsAcrossHostsEngine if shards_over_hosts else AcrossHostsEngine
    return engine(devices, link, wire_dtype)


# The cluster as TensorFlow's own words have it: types of tasks, and their numbers.


def resolver_of(
    cluster: Cluster, hosts: Sequence[str], devices: Sequence[str]
) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
    """A resolver that tells this worker's place, for programs that ask for it.

    Every worker is a task of the type "worker" and its rank the task's number: worker
    0 is the chief, as in TensorFlow's tutorials. Where TF_CONFIG names the cluster, its
    own types, numbers and addresses.

    Args:
      cluster: the workers.
      hosts: where each of them is reached, by rank.
      devices: those of this worker.
    """
    kinds = [tf.DeviceSpec.from_string(device).device_type for device in devices]
    accelerators = {"GPU": kinds.count("GPU")}
    if cluster.source == "TF_CONFIG":
        said = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        spec, task_type, task_id = said.cluster_spec(), said.task_type, said.task_id
    else:
        # Only worker 0 has an address where it can be met; the others have a name.
        addresses = [cluster.coordinator or hosts[0], *hosts[1:]]
        spec = tf.train.ClusterSpec({"worker": addresses})
        task_type, task_id = "worker", cluster.rank
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=task_type, task_id=task_id, num_accelerators=accelerators
    )


# What a strategy of several hosts adds up and joins over all of them.


class SumsOverHosts(ReplicaContextStrategy):
    """Reductions, rows and numbers of samples of all hosts; a mixin."""

    #: The hosts; None for one that is alone, which exchanges nothing.
    _group: HostGroup | None = None
    #: Whether it is known that all hosts get as many rows: not where they train.
    _hosts_are_alike = False

    @property
    def hosts(self) -> int:
        """How many processes make each step together."""
        return 1

    def _reduce_values(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """Reduces over the replicas of all hosts."""
        # The insides add up over hosts, as where TensorFlow asks them (`reduce_to`).
        group = self._group
        is_mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
        if group is None or not is_mean or axis is None:
            return super()._reduce_values(reduce_op, value, axis)
        total = self._reduce_values("SUM", value, axis)
        counts = tf.nest.map_structure(
            lambda v: group.sum(self._local_length(v, axis)), value
        )
        return tf.nest.map_structure(
            lambda t, n: t / tf.cast(n, t.dtype), total, counts
        )

    def gather(self, value: Any, axis: int) -> Any:
        """Joins the values of all replicas by rank; see `tf.distribute.Strategy`."""
        local = super().gather(value, axis)
        group = self._group
        if group is None:
            return local
        return tf.nest.map_structure(lambda t: group.gather(t, axis), local)

    @property
    def _sum_of_logs(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        return None if self._group is None else self._group.sum

    def _local_length(self, value: Any, axis: int) -> tf.Tensor:
        parts = self.experimental_local_results(value)
        return tf.add_n([tf.cast(tf.shape(part)[axis], tf.int64) for part in parts])

    def _complete_run(self, run: ReplicaRun) -> None:
        """Counts the samples of all hosts, in cross-replica context."""
        # Where hosts train apart, the others' samples do not matter.
        if self._group is None or run.is_local:
            return
        run.replicas = self.num_replicas_in_sync
        if run.counts is not None:
            run.spans_hosts, run.hosts_are_alike = True, self._hosts_are_alike
            total = tf.cast(run.total, tf.int32)
            run.total = self._group.sum(total, "number of samples")

    def _of_all_hosts(self, vector: tf.Tensor) -> tf.Tensor:
        return vector if self._group is None else self._group.gather(vector)

    def _complete_result(self, fn: Callable, result: Any) -> Any:
        """All hosts' rows where Keras is about to join those of this host."""
        group = self._group
        if group is None or not is_predict_step(fn):
            return result
        return tf.nest.map_structure(lambda v: self._all_rows(v, group), result)

    def _all_rows(self, value: Any, group: HostGroup) -> Any:
        parts = self.experimental_local_results(value)
        if parts[0].shape.rank == 0:
            return value
        rows = group.gather(tf.concat(parts, axis=0))
        if len(parts) == 1:
            return rows
        return names.PerReplica((rows, *(part[:0] for part in parts[1:])))


class MultiHostDataParallelStrategy(SumsOverHosts, DataParallelStrategy):
    """Trains one model on the devices of several processes, one process per host.

    With H hosts of D replicas each, N = H D, every step computes what one device
    would on the whole global batch; see `DataParallelStrategy`. Every host runs the
    same script. Each takes its rows of every global batch; gradients are summed
    within the host first, and one sum per host crosses the network.

    Args:
      cluster: the workers; None takes what the environment says (`tfdp launch`,
        TF_CONFIG, Slurm, Kubernetes, MPI, torchrun).
      devices_per_host: replicas of this process: None for all GPUs, or the logical
        CPUs; a number splits the CPU where there is no GPU. The same on all hosts.
      communication: how replicas and hosts exchange tensors; None for the defaults.
      shard: see `DataParallelStrategy`.
      shard_group: who shares the shards: "all" replicas of all hosts, which then need
        each other to read a variable as a whole (to save it, too); or those of each
        "host", so that every host has all shards and the network carries what it
        carries without.
      shard_min_bytes: see `DataParallelStrategy`.
      offload: see `DataParallelStrategy`.
      draws_per_replica: see `DataParallelStrategy`.

    Raises:
      ConfigurationError: when nothing names a cluster, when an argument is not as
        above or cannot act on so many hosts (docs/options.md), or when the workers
        were given different ones; it says which worker has what.
      DeviceError: when there are fewer GPUs than `devices_per_host`.
      CollectiveError: when the workers do not come together in
        `communication.timeout_seconds`; it names who is missing.

    Cost: per step and host 2 n (H - 1) / H bytes on the wire for n bytes of
    gradients, and one exchange of a number.

    ```python
    import tfdp

    cluster = tfdp.Cluster(workers=1, rank=0, coordinator=None, source="argument")
    strategy = tfdp.MultiHostDataParallelStrategy(cluster)
    print(strategy.num_replicas_in_sync)
    ```
    """

    shard_groups = SHARD_GROUPS

    def __init__(
        self,
        cluster: Cluster | None = None,
        *,
        devices_per_host: int | None = None,
        communication: Communication | None = None,
        shard: str | int | Sharding = "none",
        shard_group: str = "all",
        shard_min_bytes: int = 32 * 1024,
        offload: str = "none",
        draws_per_replica: bool = True,
    ):
        check_keras_backend()
        warn_of_unchecked_versions()
        found = cluster if cluster is not None else find_cluster()
        if not isinstance(found, Cluster):
            raise ConfigurationError(
                "MultiHostDataParallelStrategy found no cluster: neither tfdp launch, "
                "TF_CONFIG, Slurm, Kubernetes, MPI nor torchrun has set its variables. "
                "Start the script with `tfdp launch --workers 2 script.py`, or pass a "
                f"tfdp.Cluster. Received: {cluster!r}."
            )
        self.cluster = found
        if found.workers > 1:
            crash_report.listen()
        sharding = sharding_of(
            shard, group=shard_group, min_bytes=shard_min_bytes, offload=offload
        )
        self._process = os.getpid()
        self._synchronization = HostConnection()
        #: This host among others that may die and come back (`min_hosts`).
        self.living: ElasticHosts | None = None
        if devices_per_host is None:
            devices_per_host = found.devices_per_worker
        self._requested_devices = devices_per_host
        communication = checked_communication(communication)
        refuse_idle_options(communication, found.workers)
        self._compares_hosts = communication.compare_hosts
        try:
            super().__init__(
                self._own_devices(communication, sharding),
                communication=communication,
                shard=sharding,
                draws_per_replica=draws_per_replica,
                alone=True,  # the others are known, and met below
            )
            self._cluster_resolver = resolver_of(
                found,
                ["localhost"] * found.workers
                if self._group is None
                else self._group.link.hosts,
                self.extended.worker_devices,
            )
        except BaseException:
            # The others then hear that this worker will not come.
            self.close()
            raise

    def _make_cross_device_ops(
        self, communication: Communication
    ) -> HierarchicalAllReduce:
        communication = uncompressed(communication)
        if self.cluster.workers > 1:
            # It reduces within this host only; what is between hosts is not for it.
            communication = dataclasses.replace(
                communication, engine="auto", min_hosts=None, checksum=False
            )
        return HierarchicalAllReduce(communication)

    def _own_devices(
        self, communication: Communication, sharding: Sharding
    ) -> list[str]:
        count = self._requested_devices
        if count is not None and not is_whole(count, least=1):
            raise ConfigurationError(
                f"devices_per_host must be an int of at least 1. Received: {count!r}."
            )
        if not tf.config.list_physical_devices("GPU") and count is not None:
            use_virtual_devices(count)
        if self.cluster.workers > 1:
            add_waiting_thread()
        is_living = communication.min_hosts is not None
        self._has_fixed_shares = not is_living
        if is_living and (sharding.stage or sharding.offloads):
            raise ConfigurationError(
                "Communication(min_hosts=...) is for hosts that train apart (sync=), "
                "and with shard= replicas of all hosts have to be there. Leave one of "
                "the two out."
            )
        if self.cluster.workers > 1 and self.cluster.source == "tfdp":
            progress.note_strategy()  # from now on it waits for all others
        self._synchronization = meet(self.cluster, communication, sharding)
        self._group = self._synchronization.group
        return first_devices(count, find_devices(), f"devices_per_host={count}")

    def _make_extended(
        self,
        devices: tuple[str, ...],
        communication: Communication,
        cross_device_ops: tf.distribute.CrossDeviceOps,
        draws_per_replica: bool,
    ) -> Any:
        if self.cluster.workers > 1 and communication.min_hosts is not None:
            settings = settings_of(self, devices, communication, draws_per_replica)
            self.living = join_elastic_hosts(self.cluster, communication, settings)
            let_calls_end_at_exit()
            atexit.register(self.close)
        if self.cluster.workers == 1 or self.living is not None:
            extended = super()._make_extended(
                devices, communication, cross_device_ops, draws_per_replica
            )
            extended.first_draw = self.cluster.rank * len(devices)
            return extended
        self._refuse_idle_shards(devices, communication)
        group = self._group or HostGroup(make_link(self.cluster, communication))
        self._group = group
        let_calls_end_at_exit()
        # The others then hear that this script has ended, and need not wait for it.
        atexit.register(self.close)
        refuse_differences(
            group.link, settings_of(self, devices, communication, draws_per_replica)
        )
        # Shuffles of `fit` are alike on all hosts: each takes its part of them.
        agree_on_seed(self.from_chief(seed_to_share(), "seed"))
        is_by_name = communication.engine == "tensorflow"
        self._synchronization = tried(self._synchronization, devices, is_by_name)
        return self._extended_over(
            group, devices, communication, cross_device_ops, draws_per_replica
        )

    def _refuse_idle_shards(
        self, devices: tuple[str, ...], communication: Communication
    ) -> None:
        is_alone = self.shard_group == "host" and len(devices) == 1
        if self._sharding.stage and is_alone and not self._sharding.offloads:
            raise ConfigurationError(
                "shard_group='host' shards over the replicas of a host, and this host "
                "has one. Give every process several devices (devices_per_host=4, or "
                "tfdp launch --devices-per-worker 4), or use shard_group='all'."
            )
        refuse_compressed_shards(communication, self.shard, self.hosts)

    def _extended_over(
        self,
        group: HostGroup,
        devices: tuple[str, ...],
        communication: Communication,
        cross_device_ops: tf.distribute.CrossDeviceOps,
        draws_per_replica: bool,
    ) -> MultiHostExtended:
        """The inside of a strategy of hosts that have met."""
        self._engine = engine_across(
            group.link,
            devices,
            communication,
            self.shards_over_hosts,
            by_collectives=self._synchronization.by_collectives,
        )
        group.use(self._engine)
        self._pipeline = GradientPipeline(self._engine, communication)
        return MultiHostExtended(
            self,
            devices,
            self._pipeline,
            cross_device_ops,
            draws_per_replica=draws_per_replica,
            sharding=self._sharding,
            first_rank=self.cluster.rank * len(devices),
            first_host_value=self.from_chief,
            group=group,
        )

    def pipeline_of(
        self, pipeline: GradientPipeline, communication: Communication
    ) -> GradientPipeline:
        """What moves tensors between replicas, with the meetings of living hosts."""
        if self.living is None:
            return super().pipeline_of(pipeline, communication)
        return ElasticPipeline(pipeline.engine, communication, self.living)

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """This worker's `task_type` and `task_id`, as TensorFlow's programs ask."""
        return self._cluster_resolver

    @property
    def hosts(self) -> int:
        """How many processes make each step together."""
        return 1 if self.living is not None else self.cluster.workers

    @property
    def _hosts_of_batch(self) -> int:
        return self.cluster.workers

    @property
    def _notes(self) -> tuple[str, ...]:
        return self._synchronization.notes

    @property
    def shard_group(self) -> str:
        """Who shares the shards: "all" replicas, or those of each "host"."""
        return self._sharding.group

    @property
    def shards_over_hosts(self) -> bool:
        """Whether nobody has all of the model: the hosts share its shards."""
        is_sharded = bool(self._sharding.stage) and self._group is not None
        return is_sharded and self.shard_group == "all"

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which writes files."""
        return self.cluster.rank == 0

    @property
    def _replicas(self) -> int:
        return self.hosts * super()._replicas

    @property
    def link(self) -> HostLink | None:
        """To the other hosts; None where there are none."""
        return None if self._group is None else self._group.link

    def barrier(self, label: str = "barrier") -> None:
        """Waits until every host has come here."""
        if self.living is not None:
            refuse_exchange(label)
        if self._group is not None:
            self._group.barrier(label)

    def close(self) -> None:
        """Says goodbye to the other hosts; the process may then end or go on alone."""
        if self._process != os.getpid():
            return  # after a fork the connections are still those of the parent
        if self._group is not None:
            self._group.close()
        if self.living is not None:
            self.living.close()
        atexit.unregister(self.close)

    def _part_of_host(self, dataset: Any) -> Any:
        """This host's rows of every global batch."""
        if self.living is not None:
            override_callbacks(self, frames.fit_of_caller())
            return own_share(dataset, self.cluster, self.living)
        if self._loops is None or not isinstance(dataset, tf.data.Dataset):
            return dataset
        return self._loops.part_of_host(dataset)

    @property
    def _loops(self) -> LedLoops | None:
        """Those that all hosts run together; None where this one is alone."""
        link = self.link
        return None if link is None else LedLoops(self, link, self._compares_hosts)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """See `DataParallelStrategy.experimental_distribute_dataset`."""
        distributed = super().experimental_distribute_dataset(dataset, options)
        if self._loops is None or frames.loop_of_caller() is not None:
            return distributed
        return self._loops.noticed(distributed, "a distributed dataset")

    def distribute_datasets_from_function(
        self, dataset_fn: Callable, options: Any = None
    ) -> Any:
        """As in TensorFlow; hosts that run out of data go on with empty batches."""
        if self._group is None and self.living is None:
            return super().distribute_datasets_from_function(dataset_fn, options)
        workers, here = self.cluster.workers, len(self.extended.worker_devices)
        context = tf.distribute.InputContext(workers, self.cluster.rank, workers * here)
        if self._loops is None:
            return super().distribute_datasets_from_function(
                lambda _: dataset_fn(context), options
            )
        loops, name = self._loops, new_dataset_name()
        distributed = super().distribute_datasets_from_function(
            lambda _: loops.part_of_function(dataset_fn(context), name), options
        )
        return loops.noticed(distributed, name)

    def from_chief(self, value: np.ndarray, label: str = "value") -> np.ndarray:
        """Worker 0's array, on every host; see `DataParallelStrategy.from_chief`."""
        if self.living is not None:
            refuse_exchange(label)
        return value if self._group is None else self._group.from_chief(value, label)

    def gather_bytes(self, blob: bytes, label: str) -> list[bytes]:
        """Every worker's `blob`, by rank; see `ReplicaContextStrategy`."""
        if self.living is not None:
            refuse_exchange(label)
        return [blob] if self._group is None else self._group.link.gather(blob, label)
