"""The private hooks of TensorFlow that tfdp's own classes override, and when each runs.

A strategy's inside and its variables extend TensorFlow's classes, which call these
methods on themselves. A hook that a new TensorFlow renames would never run, without a
word: `tests/devices/test_private_overrides.py` holds each class against this table and
against the class that it extends.
"""

from __future__ import annotations

__all__ = ["HOOKS"]

# What is overridden, and called through `super()`: when TensorFlow calls it.
HOOKS = {
    # The insides of strategies (`tfdp.strategies`).
    "_batch_gather_to": "a replica asks for the rows of all",
    "_batch_reduce_to": "values are reduced in cross-replica context",
    "_call_for_each_replica": "`strategy.run` starts its replicas",
    "_container_strategy": "the strategy that this is the inside of is asked for",
    "_create_variable": "a variable is made under the scope",
    "_cross_device_ops": "what reduces in cross-replica context, as it was given",
    "_distribute_datasets_from_function": "input is made by a function",
    "_experimental_distribute_dataset": "a dataset is distributed",
    "_experimental_distribute_values_from_function": "values are made by a function",
    "_get_cross_device_ops": "what reduces a certain value is asked for",
    "_get_local_replica_id": "a replica's place on this host is asked for",
    "_get_replica_id_in_sync_group": "a replica's place among all is asked for",
    "_get_variable_creator_initial_value": "TensorFlow makes a variable's copy",
    "_make_collective_ops_with_fallbacks": "the strategy is made",
    "_num_replicas_in_sync": "the number of TPU cores, as TensorFlow counted it",
    "_replica_ctx_all_reduce": "a replica asks for a sum or mean",
    "_replica_ctx_update": "a replica updates a variable",
    "_update": "a variable is updated in cross-replica context",
    "_use_merge_call": "whether replicas stop for each other is asked",
    # Distributed variables (`tfdp.variables`, `tfdp.sharding`).
    "_dense_var_to_tensor": "a variable is made a tensor of",
    "_export_to_saved_model_graph": "a SavedModel is written",
    "_get": "the component that is meant here is asked for",
    "_get_cross_replica": "a variable is read outside of replicas",
    "_get_replica": "the component of a replica is asked for",
    "_read_variable_op": "a TPU variable is read",
    "_restore_from_tensors": "a checkpoint is read",
    "_serialize_to_tensors": "a checkpoint is written",
    "_update_cross_replica": "a mirrored variable is assigned to outside of replicas",
    "_update_replica": "a replica assigns to a variable",
    "_values": "the components of a variable",
}
