"""Every private TensorFlow and Keras name that tfdp uses, and what for.

When a new TensorFlow or Keras version moves one of them, this file and the tests in
`tests/devices/test_framework_contract.py` say so first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# What Keras keeps for each thread: the open name scopes; the open scope of autocasting.
from keras.src.backend.common import global_state as keras_state
from keras.src.backend.common.variables import get_autocast_scope

# What the loss is divided by for the replicas, taken back.
from keras.src.losses.loss import unscale_loss_for_distribution

# What AutoGraph calls as it is, and looks through to the functions that it is given.
from tensorflow.python.autograph.impl.api import autograph_artifact

# A dataset whose elements are those of another one.
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset

# Which devices values lie on, and how per-device results become one value.
from tensorflow.python.distribute import cross_device_ops as _cross_device_ops
from tensorflow.python.distribute import distribute_utils as _distribute_utils

# What stands for no strategy.
# Which replica's component an update in cross-replica context is about.
from tensorflow.python.distribute.distribute_lib import (
    UpdateContext,
    _DefaultDistributionStrategy,
)
from tensorflow.python.distribute.distribute_utils import select_replica

# The device-set of a strategy with mirrored variables: our base class.
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

# Per-replica values, and variables with one component per replica.
from tensorflow.python.distribute.values import (
    DistributedVariable,
    Mirrored,
    MirroredVariable,
    PerReplica,
    SyncOnReadVariable,
)

# The seed that `tf.random.set_seed` was given; the setter is public, the getter is not.
from tensorflow.python.eager import context as eager_context

# The open gradient tapes: what they do not see, and what they are told.
from tensorflow.python.eager.record import (
    VariableWatcher,
    record_operation,
    stop_recording,
)
from tensorflow.python.eager.record import could_possibly_record as is_recording
from tensorflow.python.eager.tape import variable_accessed
from tensorflow.python.framework.device_spec import DeviceSpecV2 as DeviceSpec

# What a dataset says of None; public, as `tf.NoneTensorSpec`, from 2.21 on.
from tensorflow.python.framework.none_tensor import NoneTensorSpec

# Whether a graph is compiled by XLA.
from tensorflow.python.ops import control_flow_util as _control_flow_util

# Graphs of the bodies of loops: an exchange between replicas cannot sit in one.
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
)

# A variable of one device, whatever strategy's scope it is made in; and one that holds
# nothing.
from tensorflow.python.ops.resource_variable_ops import (
    ResourceVariable,
    UninitializedVariable,
)

# Whether a SavedModel is being written, whose functions are traced once more for it.
from tensorflow.python.saved_model.save_context import in_save_context

__all__ = [
    "CHECKED_VERSIONS",
    "DeviceSpec",
    "DistributedVariable",
    "MirroredExtended",
    "MirroredVariable",
    "NoneTensorSpec",
    "PerReplica",
    "SyncOnReadVariable",
    "UnaryUnchangedStructureDataset",
    "UninitializedVariable",
    "UpdateContext",
    "VariableWatcher",
    "autograph_artifact",
    "common_devices",
    "count_in_graph",
    "current_rank",
    "eager_context",
    "get_autocast_scope",
    "global_seed",
    "graphs_inside",
    "in_compiled_function",
    "in_save_context",
    "is_branch_graph",
    "is_default_strategy",
    "is_loop_graph",
    "is_of_whole",
    "is_recording",
    "keras_state",
    "make_counter",
    "make_note",
    "make_token",
    "note_in_graph",
    "outermost_function_graph",
    "operations_of",
    "own_copy",
    "put_global_seed",
    "record_operation",
    "regroup_mirrored",
    "run_independently",
    "select_replica",
    "stages_of",
    "stop_recording",
    "time_in_graph",
    "unscale_loss_for_distribution",
    "variable_accessed",
    "variant_of",
    "whole_of",
    "with_host_datasets",
]

# The versions whose sources these names were read in and run with.
CHECKED_VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1"}


def common_devices(
    value_destination_pairs: Sequence[tuple[Any, Any]],
) -> tuple[str, ...] | None:
    """The strategy's devices, when all values lie on them and are wanted there.

    Arguments of a function have no device of their own yet, so the strategy whose
    cross-replica context this is says which devices its replicas have. None when the
    values are other than one per replica, or are wanted elsewhere.
    """
    if not _cross_device_ops._all_devices_match(value_destination_pairs):
        return None
    devices = tuple(tf.distribute.get_strategy().extended.worker_devices)
    for value, _ in value_destination_pairs:
        if not isinstance(value, PerReplica) or len(value.values) != len(devices):
            return None
    return devices


def regroup_mirrored(parts: Sequence[Any]) -> Any:
    """One mirrored value from one equal part per replica."""
    return _distribute_utils.regroup(tuple(parts), wrap_class=Mirrored)


def current_rank() -> Any:
    """This replica's rank, in a replica context.

    A Python integer where each replica's graph is built on its own; a scalar int32
    tensor where one graph serves all of them, as on TPU.
    """
    rank = tf.distribute.get_replica_context()._replica_id
    if tf.is_tensor(rank) and tf.get_static_value(rank) is None:
        return rank
    return int(rank)


def own_copy(variable: Any, rank: Any) -> Any:
    """The copy of a distributed `variable` that the replica `rank` updates.

    Where one graph serves all replicas the variable itself stands for it.
    """
    return variable._get_replica(rank) if isinstance(rank, int) else variable


def whole_of(component: Any) -> Any:
    """The distributed variable that `component` is one device's part of; None: none."""
    container = getattr(component, "_distributed_container", None)
    return None if container is None else container()


def is_of_whole(handle: Any) -> bool:
    """Whether a handle is of one device's part of a distributed variable.

    Of one that a step has made its variable knows, and the handle does not.
    """
    owner = getattr(handle, "_parent_trackable", None)
    parts = (handle, owner() if owner is not None else None)
    return any(whole_of(part) is not None for part in parts)


def is_default_strategy(strategy: tf.distribute.Strategy) -> bool:
    """Whether this is what `tf.distribute.get_strategy()` says outside of any scope."""
    return isinstance(strategy, _DefaultDistributionStrategy)


def global_seed() -> int | None:
    """What `tf.random.set_seed` was given; None when it was not called."""
    return eager_context.global_seed()


def put_global_seed(seed: int | None) -> None:
    """Sets what `global_seed` returns, and nothing else.

    `tf.random.set_seed` would also begin the draws of unseeded operations anew.
    """
    eager_context.context()._seed = seed


def variant_of(dataset: tf.data.Dataset) -> tf.Tensor:
    """The tensor that is the dataset."""
    return dataset._variant_tensor


def stages_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """`dataset` and all that it reads, each once."""
    todo, seen = [dataset], set()
    while todo:
        stage = todo.pop()
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            todo += stage._inputs()


def operations_of(dataset: tf.data.Dataset) -> Iterator[str]:
    """The types of the operations in the functions that `dataset` itself calls."""
    for wrapper in dataset._functions():
        graph = wrapper.function.graph
        # Not by their definitions, which hold a copy of each constant.
        for inner in (graph, *(f.graph for f in graph._functions.values())):
            yield from (op.type for op in inner.get_operations())


def with_host_datasets(
    distributed: Any, change: Callable[[tf.data.Dataset], tf.data.Dataset]
) -> Any:
    """A distributed dataset whose iterators read `change(dataset)` of each host's."""
    # The attribute differs between datasets and functions that make them.
    for name in ("_cloned_datasets", "_datasets"):
        if hasattr(distributed, name):
            setattr(distributed, name, [change(d) for d in getattr(distributed, name)])
    return distributed


def make_token(device: str) -> tf.Variable:
    """A resource that belongs to `device` alone; its value is never used."""
    with tf.init_scope(), tf.device(device):
        return ResourceVariable(0.0, trainable=False)


def make_counter() -> tf.Variable:
    """A whole number that graphs count in."""
    return make_note(0, tf.int64)


def make_note(value: Any, dtype: tf.DType, *, any_shape: bool = False) -> tf.Variable:
    """A variable of this process, and of no strategy, that graphs leave notes in."""
    shape = tf.TensorShape(None) if any_shape else None
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(value, dtype=dtype, trainable=False, shape=shape)


def count_in_graph(counter: tf.Variable, amount: tf.Tensor) -> None:
    """Adds `amount` to `counter` whenever the graph runs that is being built."""
    with tf.device("CPU:0"):
        op = tf.raw_ops.AssignAddVariableOp(resource=counter.handle, value=amount)
    if op is not None:
        # Adding takes no order: nothing need wait for it, nor it for anything.
        run_independently(op)


def note_in_graph(note: tf.Variable, value: tf.Tensor) -> None:
    """Puts `value` into `note` whenever the graph runs that is being built."""
    with tf.device("CPU:0"):
        op = tf.raw_ops.AssignVariableOp(resource=note.handle, value=value)
    if op is not None:
        run_independently(op)  # as in `count_in_graph`


def time_in_graph(after: Sequence[tf.Tensor]) -> tf.Tensor:
    """Seconds since 1970 when all of `after` were there, in the running graph."""
    with tf.device("CPU:0"), tf.control_dependencies(after):
        now = tf.timestamp()
    run_independently(now.op)
    return now


def run_independently(op: tf.Operation) -> None:
    """Frees `op` from the order that automatic control dependencies would impose.

    TensorFlow chains stateful ops in program order ACROSS devices. A replica's
    exchange would wait for the previous replica's, which waits for this one: a
    deadlock. The op still runs before the function returns.
    """
    _stay_unclustered(op)
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    if manager is not None:
        manager.run_independently(op)


def _stay_unclustered(op: tf.Operation) -> None:
    """Frees the graph that `op` runs in from XLA's automatic clustering.

    A cluster starts when all of its inputs are there. TensorFlow puts operations before
    and after an exchange into one, where no edge of the graph says that the second ones
    wait for another replica: both replicas would wait forever. TensorFlow clusters no
    graph with an operation that has this attribute.
    """
    op._set_attr("_XlaAlreadyClustered", tf.compat.v1.AttrValue(b=True))


def in_compiled_function() -> bool:
    """Whether the graph being built goes to XLA as a whole (`jit_compile=True`)."""
    graph = tf.compat.v1.get_default_graph()
    return bool(_control_flow_util.GraphOrParentsInXlaContext(graph))


def graphs_inside(outer: Any) -> list[Any]:
    """The graphs being built between `outer` (left out) and the innermost one."""
    graphs = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not outer:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs


def outermost_function_graph() -> Any:
    """The outermost graph of a function that is being built; None: there is none."""
    graphs = [graph for graph in graphs_inside(None) if hasattr(graph, "outer_graph")]
    return graphs[-1] if graphs else None


def is_loop_graph(graph: Any) -> bool:
    """Whether `graph` is the body or the condition of a `tf.while_loop`."""
    return isinstance(graph, (WhileBodyFuncGraph, WhileCondFuncGraph))


def is_branch_graph(graph: Any) -> bool:
    """Whether `graph` is a branch of a `tf.cond`."""
    return isinstance(graph, CondBranchFuncGraph)
