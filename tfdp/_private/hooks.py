"""Private TensorFlow hooks that tfdp's classes override, and when each is called.

A hook that a new TensorFlow renames would silently never run: see
`tests/devices/test_private_overrides.py`.
"""

from __future__ import annotations

# Hook, which may be called through `super()`: when TensorFlow calls it.
HOOKS = {
    # Extended objects of strategies (`tfdp.strategies`).
    "_batch_gather_to": "a replica gathers the rows of all",
    "_batch_reduce_to": "values are reduced in cross-replica context",
    "_call_for_each_replica": "`strategy.run` starts its replicas",
    "_container_strategy": "the strategy of this extended is read",
    "_create_variable": "a variable is created in the scope",
    "_cross_device_ops": "the reduction object for cross-replica context",
    "_distribute_datasets_from_function": "a function creates input",
    "_experimental_distribute_dataset": "a dataset is distributed",
    "_experimental_distribute_values_from_function": "a function creates values",
    "_get_cross_device_ops": "the reduction object for a value is read",
    "_get_local_replica_id": "a replica's index on this host is read",
    "_get_replica_id_in_sync_group": "a replica's index among all is read",
    "_get_variable_creator_initial_value": "TensorFlow creates a variable's copy",
    "_make_collective_ops_with_fallbacks": "the strategy is created",
    "_num_replicas_in_sync": "the number of TPU cores, as TensorFlow counted it",
    "_replica_ctx_all_reduce": "a replica requests a sum or mean",
    "_replica_ctx_update": "a replica updates a variable",
    "_update": "a variable is updated in cross-replica context",
    "_use_merge_call": "whether replicas synchronize for merge calls is read",
    # Distributed variables (`tfdp.variables`, `tfdp.sharding`).
    "_dense_var_to_tensor": "a variable is converted to a tensor",
    "_export_to_saved_model_graph": "a SavedModel is written",
    "_get": "the component for the current context is read",
    "_get_cross_replica": "a variable is read outside of replicas",
    "_get_replica": "the component of a replica is read",
    "_read_variable_op": "a TPU variable is read",
    "_restore_from_tensors": "a checkpoint is read",
    "_serialize_to_tensors": "a checkpoint is written",
    "_update_cross_replica": "a mirrored variable is assigned to outside of replicas",
    "_update_replica": "a replica assigns to a variable",
    "_values": "the components of a variable",
}
