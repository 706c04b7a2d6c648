"""The cluster as TensorFlow's own words have it: types of tasks, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdp.cluster import Cluster

__all__ = ["resolver_of"]


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
