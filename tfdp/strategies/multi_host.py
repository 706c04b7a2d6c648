"""`MultiHostDataParallelStrategy`: one process per host, all running one script."""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdp._private import frames, keras_calls, names
from tfdp.cluster import Cluster, crash_report, find_cluster, progress
from tfdp.cluster.helper_process import is_helper, note_joined
from tfdp.data.hosts import agree_on_seed, seed_to_share
from tfdp.data.same_batches import new_dataset_name
from tfdp.errors import ConfigurationError
from tfdp.exchange.choose_engine import choose_engine
from tfdp.exchange.elastic_pipeline import ElasticPipeline
from tfdp.exchange.host_group import HostGroup
from tfdp.exchange.in_process import InProcess
from tfdp.exchange.levels import Levels
from tfdp.exchange.over_collectives import LevelsOverCollectives
from tfdp.exchange.over_link import OverLink
from tfdp.exchange.reducer import Reducer
from tfdp.hosts.elastic_group import ElasticHosts
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.python_calls import let_calls_end_at_exit
from tfdp.plan.communication import Communication, checked_communication
from tfdp.plan.options import HOSTS, Given, options_of, refuse_options
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.plan.topology import Topology
from tfdp.strategies.connect_hosts import HostConnection, connect_hosts, with_trial
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
from tfdp.strategies.multi_host_loops import HostLoops, override_callbacks
from tfdp.strategies.startup_checks import check_versions
from tfdp.strategies.worker_settings import refuse_differences, settings_of
from tfdp.tracing.keras_steps import is_predict_step
from tfdp.tracing.step import Step

if TYPE_CHECKING:
    from keras.distribution import LayoutMap, ModelParallel

    from tfdp.step.row_shares import RowShares


class MultiHostDataParallelStrategy(DataParallelStrategy):
    """Trains one model on the devices of several processes, one process per host.

    With H hosts of D replicas each, N = H D, every step computes what one device
    would on the whole global batch; see `DataParallelStrategy`. Every host runs the
    same script and takes its rows of every global batch. Gradients are summed within
    the host first, and one sum per host crosses the network.

    Args:
      cluster: the workers; None finds them in the environment (`tfdp launch`,
        TF_CONFIG, Slurm, Kubernetes, MPI, torchrun).
      devices_per_host: replicas of this process: None for all GPUs, or the logical
        CPUs; a number splits the CPU if there is no GPU. The same on all hosts.
      communication: see `auto_strategy`.
      shard: see `auto_strategy`.
      shard_group: see `auto_strategy`.
      shard_min_bytes: see `auto_strategy`.
      offload: see `auto_strategy`.
      layout: see `auto_strategy`.
      draws_per_replica: see `auto_strategy`.
      balance: see `auto_strategy`, and docs/stragglers.md.

    Raises:
      ConfigurationError: without a cluster; for an argument that is bad or has no
        effect on several hosts (docs/options.md); or if the workers' arguments differ,
        naming the differences.
      DeviceError: if there are fewer GPUs than `devices_per_host`.
      CollectiveError: if workers do not connect within
        `communication.timeout_seconds`, naming them.

    Cost: per step and host 2 n (H - 1) / H bytes on the wire for n bytes of
    gradients, and one exchange of a number.

    ```python
    import tfdp

    cluster = tfdp.Cluster(workers=1, rank=0, coordinator=None, source="argument")
    strategy = tfdp.MultiHostDataParallelStrategy(cluster)
    print(strategy.num_replicas_in_sync)
    ```
    """

    #: The hosts; None for a single one, which exchanges nothing.
    _group: HostGroup | None = None
    #: Whether all hosts surely get equally many rows: not in training.
    _hosts_are_alike = False
    #: Whether this process only helps a worker, and is none itself.
    is_helper = False
    #: With `balance`: the stage that decides which rows each host takes.
    _row_shares: RowShares | None = None

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
        layout: LayoutMap | ModelParallel | None = None,
        draws_per_replica: bool = True,
        balance: str | None = None,
    ):
        check_keras_backend()
        check_versions()
        found = self.cluster = _found_cluster(cluster)
        self.is_helper = not _joins(found)
        sharding = sharding_of(
            shard, group=shard_group, min_bytes=shard_min_bytes, offload=offload
        )
        communication = checked_communication(communication, layout)
        others: dict[str, Any] = {"layout": layout, "balance": balance}
        others["devices_per_host"] = devices_per_host
        others["draws_per_replica"] = draws_per_replica
        options = options_of(communication, sharding, **others)
        self.given = Given(HOSTS, found.workers, options)
        refuse_options(self.given)
        self.balance = balance
        self.has_fixed_shares = communication.min_hosts is None and balance is None
        self._compares_hosts = communication.compare_hosts
        self._process = os.getpid()
        self._count = devices_per_host or found.devices_per_worker
        if self._count is not None and not tf.config.list_physical_devices("GPU"):
            use_virtual_devices(self._count)
        self._connection = HostConnection()
        #: This host among elastic hosts (`min_hosts`).
        self.elastic_hosts: ElasticHosts | None = None
        try:
            if found.workers == 1 or self.is_helper:
                devices = self._find_devices()
            else:
                devices = self.connect(communication)
                refuse_options(dataclasses.replace(self.given, devices=len(devices)))
            self._extend(devices, communication)
            self._cluster_resolver = _make_resolver(
                found,
                ["localhost"] * found.workers
                if self._group is None
                else self._group.link.hosts,
                self.extended.worker_devices,
            )
            self._row_shares = self._make_row_shares()
        except BaseException:
            # Tells the others that this worker will not come.
            self.close()
            raise

    def connect(self, communication: Communication) -> tuple[str, ...]:
        """Connects to the other hosts; returns this host's devices.

        The devices are found, and TensorFlow so started, in between: NCCL needs its
        rendezvous before, and a trial after it.
        """
        add_waiting_thread()
        if self.cluster.source == "tfdp":
            progress.note_strategy()  # waits for all others from now on
        if communication.min_hosts is None:
            self._connection = connect_hosts(self.cluster, communication, self.given)
            self._group = self._connection.group
        devices = self._find_devices()
        settings = settings_of(self.given, len(devices))
        if self._group is None:
            self.elastic_hosts = join_elastic_hosts(
                self.cluster, communication, settings
            )
        let_calls_end_at_exit()
        # Tells the others that this script has ended, so that they do not wait.
        atexit.register(self.close)
        if self._group is not None:
            refuse_differences(self._group.link, settings)
            # Shuffles of `fit` have the same order on all hosts: each takes its part.
            agree_on_seed(self.from_chief(seed_to_share(), "seed"))
            is_by_name = communication.engine == "tensorflow"
            self._connection = with_trial(self._connection, devices, is_by_name)
        return devices

    def _find_devices(self) -> tuple[str, ...]:
        request = f"devices_per_host={self._count}"
        return tuple(first_devices(self._count, find_devices(), request))

    def _make_extended(
        self,
        devices: tuple[str, ...],
        communication: Communication,
        cross_device_ops: HierarchicalAllReduce,
    ) -> Any:
        if self._group is None:
            extended = super()._make_extended(devices, communication, cross_device_ops)
            extended.first_draw = self.cluster.rank * len(devices)
            return extended
        group = self._group
        levels = self._make_levels(group.link, devices, communication)
        group.use(levels)
        return MultiHostExtended(
            self,
            devices,
            Reducer(levels, communication),
            cross_device_ops,
            first_rank=self.cluster.rank * len(devices),
            first_host_value=self.from_chief,
            group=group,
        )

    def _make_levels(
        self, link: HostLink, devices: tuple[str, ...], communication: Communication
    ) -> Levels:
        wire_dtype = communication.link_dtype
        inner = InProcess(devices, Topology(1, len(devices)))
        outer = OverLink(devices[0], link, wire_dtype)
        if self._connection.by_collectives:
            hint = choose_engine(devices, communication).hint
            return LevelsOverCollectives(inner, outer, hint)
        return Levels(inner, outer, shards_over_hosts=self.shards_over_hosts)

    def reducer_within(self, outside: Reducer, communication: Communication) -> Reducer:
        if self.elastic_hosts is None:
            return super().reducer_within(outside, communication)
        return ElasticPipeline(outside.transport, communication, self.elastic_hosts)

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """This worker's `task_type` and `task_id`, as in TensorFlow."""
        return self._cluster_resolver

    @property
    def hosts(self) -> int:
        return 1 if self.elastic_hosts is not None else self.cluster.workers

    @property
    def _notes(self) -> tuple[str, ...]:
        return self._connection.notes

    @property
    def shards_over_hosts(self) -> bool:
        """Whether the hosts share the model's shards, so that no host has all."""
        return self.given.has_shards_of_all and self._group is not None

    @property
    def _replicas(self) -> int:
        return self.hosts * super()._replicas

    @property
    def link(self) -> HostLink | None:
        """The connection to the other hosts; None if there are none."""
        return None if self._group is None else self._group.link

    def barrier(self, label: str = "barrier") -> None:
        """Waits until every host has called it, at most `timeout_seconds`.

        Raises:
          ConfigurationError: with `Communication(min_hosts=...)`.
          CollectiveError: a host did not come, or makes another call (`label`).
        """
        if self.elastic_hosts is not None:
            refuse_exchange(label)
        if self._group is not None:
            self._group.barrier(label)

    def close(self) -> None:
        """Disconnects from the other hosts; the process may then end or continue."""
        if self._process != os.getpid():
            return  # after a fork the connections belong to the parent
        if self._group is not None:
            self._group.close()
        if self.elastic_hosts is not None:
            self.elastic_hosts.close()
        atexit.unregister(self.close)

    def _refuse_in_helper(self) -> None:
        if self.is_helper:
            raise ConfigurationError(
                f"This process is a helper of worker {self.cluster.rank} of "
                f"{self.cluster.workers}: multiprocessing started it, and the worker "
                "itself takes part in the training. Train in the worker. To use a "
                "model here, load it outside of the scope, or in the scope of a "
                "tfdp.DataParallelStrategy(alone=True)."
            )

    def _part_of_host(self, dataset: Any) -> Any:
        self._refuse_in_helper()
        if self.elastic_hosts is not None:
            override_callbacks(self, frames.fit_of_caller())
            return own_share(dataset, self.cluster, self.elastic_hosts)
        if self._loops is None or not isinstance(dataset, tf.data.Dataset):
            return dataset
        return self._loops.part_of_host(dataset)

    def _make_row_shares(self) -> RowShares | None:
        if self.balance is None or self.is_helper:
            return None
        from tfdp.step.row_shares import RowShares

        return RowShares(self)

    def _over_replicas(self, dataset: Any, options: Any) -> Any:
        if self._row_shares is None:
            return super()._over_replicas(dataset, options)
        return self._row_shares.distributed(dataset, options)

    def split_batch(self, batch: Any) -> list[Any]:
        """Splits a global batch into the parts of this host's replicas (`balance`)."""
        if self._row_shares is None:
            raise ConfigurationError("Only with balance='speed' hosts split batches.")
        return self._row_shares.split(batch)

    def shared_state(self) -> list[tuple[str, str]]:
        """Names and values of the strategy's own state, the same on all hosts."""
        if self._row_shares is None:
            return []
        return [("the hosts' shares of a batch", str(self._row_shares.shares))]

    @property
    def _loops(self) -> HostLoops | None:
        link = self.link
        return None if link is None else HostLoops(self, link, self._compares_hosts)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        distributed = super().experimental_distribute_dataset(dataset, options)
        if self._loops is None or keras_calls.loop_of_caller() is not None:
            return distributed
        return self._loops.watched(distributed, "a distributed dataset")

    def distribute_datasets_from_function(
        self, dataset_fn: Callable, options: Any = None
    ) -> Any:
        """Does as in TensorFlow; hosts without data continue with empty batches."""
        self._refuse_in_helper()
        if self._row_shares is not None:
            self._row_shares.refuse("here each host reads batches of its own")
        if self._group is None and self.elastic_hosts is None:
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
        return loops.watched(distributed, name)

    def from_chief(self, value: np.ndarray, label: str = "value") -> np.ndarray:
        """The first host's array, on every host; all of them must call it.

        Args:
          value: an array of one shape and type on all hosts; only the first one's
            numbers count.
          label: what it is, for errors; the same on all hosts.

        Raises: as `barrier`.

        Cost: the first host sends the array to each other host.
        """
        if self.elastic_hosts is not None:
            refuse_exchange(label)
        return value if self._group is None else self._group.from_chief(value, label)

    def gather_bytes(self, blob: bytes, label: str) -> list[bytes]:
        """Every host's `blob`, by rank, on every host; all of them must call it.

        Args:
          blob: of any length up to 2 GiB.
          label: what it is, for errors; the same on all hosts.

        Raises: as `barrier`.

        Cost: every host receives the blobs of all.
        """
        if self.elastic_hosts is not None:
            refuse_exchange(label)
        return [blob] if self._group is None else self._group.link.gather(blob, label)

    def _reduce_values(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        # Without an axis, or for a sum, `extended.reduce_to` sums over hosts.
        group = self._group
        is_mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
        if group is None or not is_mean or axis is None:
            return super()._reduce_values(reduce_op, value, axis)
        total = self._reduce_values("SUM", value, axis)
        rows = tf.nest.map_structure(
            lambda v: group.sum(self._local_length(v, axis)), value
        )
        return tf.nest.map_structure(lambda t, n: t / tf.cast(n, t.dtype), total, rows)

    def gather(self, value: Any, axis: int) -> Any:
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

    def _complete_batch(self, step: Step) -> None:
        self._refuse_in_helper()
        if self._row_shares is not None:
            self._row_shares.attach(step)
        # In local training, the samples of other hosts do not matter.
        if self._group is None or step.is_local:
            return
        step.replicas = self.num_replicas_in_sync
        if step.batch.counts is not None:
            total = tf.cast(step.batch.total, tf.int32)
            step.batch = dataclasses.replace(
                step.batch,
                total=self._group.sum(total, "number of samples"),
                spans_hosts=True,
                hosts_are_equal=self._hosts_are_alike,
            )

    def _of_all_hosts(self, vector: tf.Tensor) -> tf.Tensor:
        return vector if self._group is None else self._group.gather(vector)

    def _complete_result(self, fn: Callable, result: Any) -> Any:
        """All hosts' rows, before Keras joins those of this host."""
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


def _found_cluster(given: Cluster | None) -> Cluster:
    found = given if given is not None else find_cluster()
    if not isinstance(found, Cluster):
        raise ConfigurationError(
            "MultiHostDataParallelStrategy found no cluster: neither tfdp launch, "
            "TF_CONFIG, Slurm, Kubernetes, MPI nor torchrun has set its variables. "
            "Start the script with `tfdp launch --workers 2 script.py`, or pass a "
            f"tfdp.Cluster. Received: {given!r}."
        )
    return found


def _joins(cluster: Cluster) -> bool:
    """Whether this process takes part in the cluster, as far as it has others."""
    if cluster.workers > 1:
        if is_helper(cluster):
            return False
        note_joined(cluster)
        crash_report.listen()
    return True


def _make_resolver(
    cluster: Cluster, hosts: Sequence[str], devices: Sequence[str]
) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
    """This worker's position in the cluster, as a TensorFlow resolver.

    Every worker is a task "worker", with its rank as the index, as in TensorFlow's
    tutorials, unless TF_CONFIG says otherwise. `hosts`: their addresses, by rank.
    """
    kinds = [tf.DeviceSpec.from_string(device).device_type for device in devices]
    accelerators = {"GPU": kinds.count("GPU")}
    if cluster.source == "TF_CONFIG":
        found = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        spec, task_type, task_id = found.cluster_spec(), found.task_type, found.task_id
    else:
        # Only worker 0 has an address; the others have a name.
        addresses = [cluster.coordinator or hosts[0], *hosts[1:]]
        spec = tf.train.ClusterSpec({"worker": addresses})
        task_type, task_id = "worker", cluster.rank
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=task_type, task_id=task_id, num_accelerators=accelerators
    )
