"""Every private TensorFlow and Keras name that tfdp uses, and its purpose.

`tests/devices/test_framework_contract.py` checks each.
"""

# ruff: noqa: F401 (imported for other modules)
from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state as keras_state
from keras.src.backend.common.variables import get_autocast_scope
from keras.src.losses import loss as keras_losses

# Marks functions that AutoGraph does not convert, but their arguments.
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset
from tensorflow.python.distribute import cross_device_ops as _cross_device_ops
from tensorflow.python.distribute import distribute_lib as _distribute_lib
from tensorflow.python.distribute import distribute_utils as _distribute_utils
from tensorflow.python.distribute.distribute_lib import (
    UpdateContext,
    _DefaultDistributionStrategy,
)
from tensorflow.python.distribute.distribute_utils import select_replica
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import (
    DistributedVariable,
    Mirrored,
    MirroredVariable,
    PerReplica,
    SyncOnReadVariable,
)

# The global seed: the setter is public, the getter is not.
from tensorflow.python.eager import context as runtime_context
from tensorflow.python.eager.record import (
    VariableWatcher,
    record_operation,
    stop_recording,
)
from tensorflow.python.eager.record import could_possibly_record as is_recording
from tensorflow.python.eager.tape import variable_accessed
from tensorflow.python.framework.device_spec import DeviceSpecV2 as DeviceSpec

# The element spec of None; public as `tf.NoneTensorSpec` from 2.21 on.
from tensorflow.python.framework.none_tensor import NoneTensorSpec

# The gradients that `tf.custom_gradient` registers for the ops of a graph.
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
)
from tensorflow.python.ops.resource_variable_ops import (
    ResourceVariable,
    UninitializedVariable,
)
from tensorflow.python.saved_model.save_context import in_save_context

from tfdp.seams.replace import replace


def common_devices(
    value_destination_pairs: Sequence[tuple[Any, Any]],
) -> tuple[str, ...] | None:
    """The strategy's devices if all values lie on them and are wanted there; else None.

    Arguments of a function have no device yet: the strategy of this cross-replica
    context decides. None unless each value has one component per replica.
    """
    if not _cross_device_ops._all_devices_match(value_destination_pairs):
        return None
    devices = tuple(tf.distribute.get_strategy().extended.worker_devices)
    for value, _ in value_destination_pairs:
        if not isinstance(value, PerReplica) or len(value.values) != len(devices):
            return None
    return devices


def regroup_mirrored(parts: Sequence[Any]) -> Any:
    """One mirrored value from one equal component per replica."""
    return _distribute_utils.regroup(tuple(parts), wrap_class=Mirrored)


def current_rank() -> Any:
    """This replica's rank, in a replica context.

    A Python integer, or a scalar int32 tensor if one graph serves all replicas (TPU).
    """
    rank = tf.distribute.get_replica_context()._replica_id
    if tf.is_tensor(rank) and tf.get_static_value(rank) is None:
        return rank
    return int(rank)


def own_copy(variable: Any, rank: Any) -> Any:
    """The component of a distributed `variable` that the replica `rank` updates.

    The variable itself if one graph serves all replicas.
    """
    return variable._get_replica(rank) if isinstance(rank, int) else variable


def whole_of(component: Any) -> Any:
    """The distributed variable of a component, or None."""
    container = getattr(component, "_distributed_container", None)
    return None if container is None else container()


def replicas_of(strategy: Any) -> int:
    """`num_replicas_in_sync`; a program that reads that in a step scales by it."""
    own = getattr(strategy, "_replicas", None)
    return int(strategy.num_replicas_in_sync if own is None else own)


def is_of_whole(handle: Any) -> bool:
    """Whether a handle belongs to a component of a distributed variable.

    For variables created in a step only the variable stores this, not the handle.
    """
    owner = getattr(handle, "_parent_trackable", None)
    parts = (handle, owner() if owner is not None else None)
    return any(whole_of(part) is not None for part in parts)


def is_default_strategy(strategy: tf.distribute.Strategy) -> bool:
    """Whether this is what `tf.distribute.get_strategy()` returns outside of scopes."""
    return isinstance(strategy, _DefaultDistributionStrategy)


def global_seed() -> int | None:
    """The seed given to `tf.random.set_seed`, or None."""
    return runtime_context.global_seed()


def put_global_seed(seed: int | None) -> None:
    """Sets what `global_seed` returns, and nothing else.

    `tf.random.set_seed` would also restart the draws of unseeded operations.
    """
    runtime_context.context()._seed = seed


def variant_of(dataset: tf.data.Dataset) -> tf.Tensor:
    """The dataset's variant tensor."""
    return dataset._variant_tensor


def stages_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """`dataset` and all its upstream stages, each once."""
    todo, seen = [dataset], set()
    while todo:
        stage = todo.pop()
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            todo += stage._inputs()


def inputs_of(stage: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """The stages that a stage reads."""
    return stage._inputs()  # type: ignore[no-any-return]


def repeats_of(stage: tf.data.Dataset) -> int | None:
    """How often a `repeat` reads its input; -1: forever; None: unknown."""
    count = tf.get_static_value(stage._count)
    return None if count is None else int(count)


def datasets_of_hosts(distributed: Any) -> list[tf.data.Dataset]:
    """The datasets that a distributed dataset reads here; [] for other objects."""
    # The attribute of datasets, and of functions that make them.
    for name in ("_cloned_datasets", "_datasets"):
        if hasattr(distributed, name):
            return list(getattr(distributed, name))
    return []


def graphs_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    """The graphs of the functions that `dataset` itself calls."""
    for wrapper in dataset._functions():
        yield wrapper.function.graph


def captured_datasets(dataset: tf.data.Dataset) -> Iterator[tf.Tensor]:
    """The variant tensors that functions of `dataset` take from outside."""
    for wrapper in dataset._functions():
        yield from (
            t for t in wrapper.function.captured_inputs if t.dtype == tf.variant
        )


def operations_of(dataset: tf.data.Dataset) -> Iterator[str]:
    """The op types in the functions that `dataset` itself calls."""
    for wrapper in dataset._functions():
        graph = wrapper.function.graph
        # Not from their definitions, which copy each constant.
        for inner in (graph, *(f.graph for f in graph._functions.values())):
            yield from (op.type for op in inner.get_operations())


def with_host_datasets(
    distributed: Any, change: Callable[[tf.data.Dataset], tf.data.Dataset]
) -> Any:
    """Makes iterators of a distributed dataset read `change(dataset)` per host."""
    # The attribute of datasets, and of functions that make them.
    for name in ("_cloned_datasets", "_datasets"):
        if hasattr(distributed, name):
            replace(distributed, name, [change(d) for d in getattr(distributed, name)])
    return distributed


def make_token(device: str) -> tf.Variable:
    """A resource of one `device`; its value is unused."""
    with tf.init_scope(), tf.device(device):
        return ResourceVariable(0.0, trainable=False)


def make_counter() -> tf.Variable:
    """An integer that graphs increment."""
    return make_note(0, tf.int64)


def make_note(value: Any, dtype: tf.DType, *, any_shape: bool = False) -> tf.Variable:
    """A variable outside of all strategies that graphs write to."""
    shape = tf.TensorShape(None) if any_shape else None
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(value, dtype=dtype, trainable=False, shape=shape)


def count_in_graph(counter: tf.Variable, amount: tf.Tensor) -> None:
    """Adds `amount` to `counter` in each run of the current graph."""
    with tf.device("CPU:0"):
        op = tf.raw_ops.AssignAddVariableOp(resource=counter.handle, value=amount)
    if op is not None:
        # Addition commutes: no ordering is needed.
        run_independently(op)


def note_in_graph(note: tf.Variable, value: tf.Tensor) -> None:
    """Stores `value` in `note` in each run of the current graph."""
    with tf.device("CPU:0"):
        op = tf.raw_ops.AssignVariableOp(resource=note.handle, value=value)
    if op is not None:
        run_independently(op)  # as in `count_in_graph`


def time_in_graph(after: Sequence[tf.Tensor]) -> tf.Tensor:
    """Seconds since 1970 when all of `after` are computed, in each run of the graph."""
    with tf.device("CPU:0"), tf.control_dependencies(after):
        now = tf.timestamp()
    run_unordered(now)
    return now


def run_unordered(tensor: tf.Tensor) -> None:
    """`run_independently` of the op of a tensor, which it has in graphs."""
    if tf.is_symbolic_tensor(tensor):
        run_independently(tensor.op)


def run_independently(op: tf.Operation) -> None:
    """Exempts `op` from automatic control dependencies.

    TensorFlow chains stateful ops in program order ACROSS devices: a replica's exchange
    would wait for the previous replica's, which waits for this one, a deadlock. The op
    still runs before the function returns.
    """
    _stay_unclustered(op)
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    if manager is not None:
        manager.run_independently(op)


def _stay_unclustered(op: tf.Operation) -> None:
    """Exempts the graph of `op` from XLA's automatic clustering.

    A cluster starts when all its inputs exist. It may combine ops before and after an
    exchange, since no edge shows that the latter wait for another replica: both
    replicas would wait forever. No graph with this attribute is clustered.
    """
    op._set_attr("_XlaAlreadyClustered", tf.compat.v1.AttrValue(b=True))


class _AsOneDevice(_distribute_lib._DefaultReplicaThreadMode):
    """The default strategy, in a thread that has entered another one."""


@contextlib.contextmanager
def as_one_device(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Leaves `strategy`, which the thread may have entered, within the context.

    Every replica gets a copy of a variable that is created meanwhile. TensorFlow's
    public names enter strategies only.
    """

    def in_scope(next_creator: Callable, **given: Any) -> Any:
        if not is_one_device():
            return next_creator(**given)  # one of the copies
        with strategy.scope():
            return strategy.extended._create_variable(next_creator, **given)

    graph = tf.compat.v1.get_default_graph()
    creators, graph._variable_creator_stack = graph._variable_creator_stack, ()
    _distribute_lib._push_per_thread_mode(_AsOneDevice())
    try:
        with tf.variable_creator_scope(in_scope):
            yield
    finally:
        _distribute_lib._pop_per_thread_mode()
        graph._variable_creator_stack = creators


def is_one_device() -> bool:
    """Whether the thread runs a step of a strategy on one device."""
    return isinstance(_distribute_lib._get_per_thread_mode(), _AsOneDevice)


def in_compiled_function() -> bool:
    """Whether XLA compiles the whole current graph (`jit_compile=True`)."""
    graph = tf.compat.v1.get_default_graph()
    return bool(_control_flow_util.GraphOrParentsInXlaContext(graph))


def graphs_inside(outer: Any) -> list[Any]:
    """The graphs being built inside `outer`, innermost first."""
    graphs = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not outer:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs


def outermost_function_graph() -> Any:
    """The outermost function graph being built, or None."""
    graphs = [graph for graph in graphs_inside(None) if hasattr(graph, "outer_graph")]
    return graphs[-1] if graphs else None


def is_loop_graph(graph: Any) -> bool:
    """Whether `graph` is the body or condition of a `tf.while_loop`."""
    return isinstance(graph, (WhileBodyFuncGraph, WhileCondFuncGraph))


def is_in_vectorized_loop() -> bool:
    """Whether ops built now are of an iteration of `tf.vectorized_map` or of a tape's
    `jacobian`, which TensorFlow turns into ops for all iterations.

    TensorFlow names them so (`pfor` of its parallel_for), and tells it nowhere else.
    """
    scopes = tf.compat.v1.get_default_graph().get_name_scope().split("/")
    return any(re.fullmatch(r"loop_body(_\d+)?", scope) for scope in scopes)


def is_branch_graph(graph: Any) -> bool:
    """Whether `graph` is a branch of a `tf.cond`."""
    return isinstance(graph, CondBranchFuncGraph)


def module_of_gradient(op: tf.Operation) -> str:
    """The module whose function is the custom gradient of an op; "": it has none."""
    try:
        function = gradient_registry.lookup(op.get_attr("_gradient_op_type"))
        for name in ("tape_grad_fn", "grad_fn"):  # one within the other
            function = inspect.getclosurevars(function).nonlocals[name]
    except (ValueError, LookupError, TypeError):
        return ""
    return str(getattr(function, "__module__", ""))
