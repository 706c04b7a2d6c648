"""A TPU strategy on logical CPUs: TensorFlow's TPU code, with another last step.

What is TensorFlow's own here: `TPUExtended` with its variables, input and
`strategy.run`, up to `tpu.replicate`, which would turn one traced function into a
program for all cores. What stands in: that call traces the function once, as on a TPU
(in a `TPUReplicateContext`, the rank a tensor, one handle for all copies of a
variable), and calls what came out once on each logical CPU; and the sum over cores goes
through queues. `merge_call` raises, and so does a batch of unknown size.

With `compiled=True` XLA compiles each replica's call, as it does on a TPU; a CPU has no
XLA kernel for the sum over cores, which then changes nothing: the numbers are right for
one replica only.

What it is not: the TPU's runtime, memory, compiler and arithmetic are not there.
"""

import contextlib
import functools
import types
from unittest import mock

import tensorflow as tf
from tensorflow.python.distribute import tpu_strategy
from tensorflow.python.ops import control_flow_util_v2
from tensorflow.python.tpu import tpu_replication

import tfdp
from tests.support.queue_exchange import QueueExchange
from tfdp.exchange.tpu import CrossReplica
from tfdp.strategies.tpu import TPUDataParallelExtended


class Assignment:
    """Replica r's only core is logical CPU r."""

    num_cores_per_replica = 1

    def __init__(self, replicas):
        self.num_replicas = replicas

    def tpu_device(self, replica, logical_core=0, job=None):
        return device_name(replica)

    def host_device(self, replica, logical_core=0, job=None):
        return device_name(0)


class Resolver:
    """Says what a resolver of `replicas` cores on one host would."""

    def __init__(self, replicas):
        self.replicas = replicas

    def get_tpu_system_metadata(self):
        name = "/job:localhost/replica:0/task:0/device:TPU:{}"
        return types.SimpleNamespace(
            num_cores=self.replicas,
            num_hosts=1,
            num_of_cores_per_host=self.replicas,
            devices=[
                types.SimpleNamespace(name=name.format(i)) for i in range(self.replicas)
            ],
        )


def device_name(replica):
    return f"/job:localhost/replica:0/task:0/device:CPU:{replica}"


class NoExchange:
    """In the place of `CrossReplicaOps` where XLA has no exchange: the same shapes."""

    def __init__(self, replicas):
        self.replicas = replicas

    def sum(self, tensor):
        return tf.identity(tensor)

    def scatter_sum(self, rows, rank):
        return tf.gather(rows, rank)

    def gather(self, row):
        return tf.tile(row[tf.newaxis], [self.replicas, 1])


class SharedTrace(tpu_replication.TPUReplicateContext):
    """The context of the one trace; remembers the copies behind each handle."""

    def __init__(self, replicas):
        super().__init__("stand_in", replicas, pivot=None)
        self.copies = {}

    def get_replicated_var_handle(
        self, name, handle_id, vars_, is_mirrored=False, is_packed=False
    ):
        handle = self._replicated_vars.get(handle_id)
        if handle is None:
            _, graph = tpu_replication._enclosing_tpu_context_and_graph()
            handle = self.capture_own(graph, [variable.handle for variable in vars_])
            self._replicated_vars[handle_id] = handle
        return handle

    def capture_own(self, graph, handles):
        """A handle for the trace, which is `handles[r]` when replica r is called."""
        with tf.init_scope():
            # A tensor of its own: the same handle may have several meanings.
            own = tf.identity(handles[0])
        self.copies[id(own)] = handles
        return graph.capture(own)

    def AddOp(self, op):  # noqa: N802 (TensorFlow's name)
        """Leaves the op as it is: the CPU would refuse the mark of a TPU program."""
        if op.type.endswith("PyFunc"):
            raise NotImplementedError("A TPU program cannot call Python.")

    def RequiresUniqueFunctionRetracing(self):  # noqa: N802
        return True


set_lowering = control_flow_util_v2.maybe_set_lowering_attr


def lower(op, lower_using_switch_merge=None):
    """Opens conditionals and loops, which an `XLAControlFlowContext` leaves closed.

    A closed one has all its inputs on one device, and queues are on the first.
    """
    wanted = lower_using_switch_merge
    set_lowering(op, True if wanted is None else wanted)


def trace_once(computation, inputs, compiled):
    """Traces `computation` for the shapes of replica 0.

    Returns:
      The concrete function, its outputs' structure, and the variables' copies.
    """
    flat = [tf.nest.flatten(part, expand_composites=True) for part in inputs]
    tensors = [i for i, value in enumerate(flat[0]) if tf.is_tensor(value)]
    for place in tensors:
        for part in flat:
            if not part[place].shape.is_fully_defined():
                raise ValueError(
                    f"TPU programs need static shapes; {part[place].shape} is not."
                )
            if part[place].shape != flat[0][place].shape:
                raise ValueError("Replicas have batches of different shape.")
    context = SharedTrace(len(inputs))
    structure = []

    @tf.function(autograph=False)
    def body(*arguments):
        values = list(flat[0])
        for place, argument in zip(tensors, arguments, strict=True):
            values[place] = argument
        graph = tf.compat.v1.get_default_graph()
        graph._set_control_flow_context(context)
        try:
            result = computation(
                *tf.nest.pack_sequence_as(inputs[0], values, expand_composites=True)
            )
            structure.append(result)
            # Values that the step only hands through (None, numbers) become tensors.
            return [
                tf.identity(value)
                for value in tf.nest.flatten(result)
                if value is not None and not isinstance(value, tf.Operation)
            ]
        finally:
            graph._set_control_flow_context(None)

    specifications = [
        tf.TensorSpec(flat[0][place].shape, flat[0][place].dtype) for place in tensors
    ]
    lowering = set_lowering if compiled else lower
    with mock.patch.object(control_flow_util_v2, "maybe_set_lowering_attr", lowering):
        concrete = body.get_concrete_function(*specifications)
    arguments = [[part[place] for place in tensors] for part in flat]
    return types.SimpleNamespace(
        function=concrete,
        arguments=arguments,
        structure=structure[-1],
        copies=context.copies,
    )


def call_with(function, captured, *arguments):
    return function._call_flat(list(arguments), captured)


def replicate(computation, inputs, *, compiled=False, **options):
    """In the place of `tpu.replicate`: one trace, called once on each CPU."""
    traced = trace_once(computation, inputs, compiled)
    TRACES.append(traced)
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    outputs = []
    for replica, arguments in enumerate(traced.arguments):
        captured = [
            traced.copies[id(capture)][replica]
            if id(capture) in traced.copies
            else capture
            for capture in traced.function.captured_inputs
        ]
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        call = functools.partial(call_with, traced.function, captured)
        if compiled:
            call = tf.function(call, jit_compile=True, autograph=False)
        with tf.device(device_name(replica)):
            result = call(*arguments)
        for op in graph.get_operations()[before:]:
            if op.type.endswith("PartitionedCall"):
                manager.run_independently(op)
        flat = iter(tf.nest.flatten(result))
        outputs.append(
            [
                next(flat)
                for value in tf.nest.flatten(traced.structure)
                if value is not None and not isinstance(value, tf.Operation)
            ]
        )
    return outputs


# The traces of the last runs, for tests that look at them.
TRACES = []


def refuse_merge_call(*args, **kwargs):
    raise RuntimeError("merge_call within a TPU replica")


@contextlib.contextmanager
def stand_in_for_replicate(compiled):
    stand_in = functools.partial(replicate, compiled=compiled)
    with (
        mock.patch.object(tpu_strategy.tpu, "replicate", stand_in),
        mock.patch.object(
            tpu_strategy._TPUReplicaContext, "merge_call", refuse_merge_call
        ),
    ):
        yield


class StandInStrategy(tfdp.TPUDataParallelStrategy):
    """`TPUDataParallelStrategy` on the first N logical CPUs."""

    def __init__(self, replicas, compiled=False, **options):
        self.replicas_wanted = replicas
        self.compiled = compiled
        super().__init__(**options)
        # Copies behind one handle are what a TPU has; CPUs have a handle for each.
        self._enable_packed_variable_in_eager_mode = False

    def _make_extended(self, tpu):
        exchange = NoExchange if self.compiled else QueueExchange
        wire_dtype = self.given["wire_dtype"]
        return TPUDataParallelExtended(
            self,
            Resolver(self.replicas_wanted),
            lambda replicas: CrossReplica(replicas, exchange(replicas), wire_dtype),
            device_assignment=Assignment(self.replicas_wanted),
        )

    def _run(self, *given):
        with stand_in_for_replicate(self.compiled):
            return super()._run(*given)
