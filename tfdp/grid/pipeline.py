"""A pipeline on one host, as placement: a run of layers has an owner in each group.

    replica 0   its rows: stage 0 on device 0, stage 1 on device 1
    replica 1   its rows: stage 0 on device 0, stage 1 on device 1

All replicas are one graph. So the rows of a replica are a micro-batch, and nothing else
of a step changes: losses, metrics, draws and sums are those of the replica.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfdp._private import functional_graphs as graphs
from tfdp._private.first_fit import note_pipeline
from tfdp._private.keras_layers import autocasting_as, stored_value
from tfdp._private.keras_models import (
    layers_within,
    losses_added_in,
    mask_of,
    put_mask,
    state_of,
)
from tfdp._private.names import VariableWatcher, stop_recording
from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError
from tfdp.exchange.send_receive import sum_in_order
from tfdp.grid.stages import (
    Backward,
    StageOfReplica,
    StageUpdates,
    StageVariable,
    stage_updates_of,
)
from tfdp.layers import recompute
from tfdp.layers.all_rows import AllRows
from tfdp.layers.segments import LayerRun, Segment, runs_between, size_of, sizes_of
from tfdp.lint.registry import is_of_graph, register
from tfdp.lint.values import Term, Value
from tfdp.plan.mesh import Mesh
from tfdp.plan.stages import stage_ends
from tfdp.tracing.gradient_exchanges import exchanges_of_gradient
from tfdp.tracing.loss_checks import are_values_of_rows
from tfdp.tracing.loss_shares import Standing
from tfdp.tracing.step import Step, current_step

PIPELINE = "tfdp.pipeline"

AnyModel = TypeVar("AnyModel", bound=keras.Model)


def pipeline(
    model: AnyModel,
    stages: int = 2,
    micro_batches: int = 1,
    cuts: Sequence[str] | None = None,
) -> AnyModel:
    """Makes each device of a group compute one run of layers, for the rows of all.

    The weights of a stage, and their optimizer's state, rest on one device of each
    group of `stages` replicas. There every replica computes the stage with its own
    rows: only activations travel. Call it before the first `fit`.

    Args:
      model: a functional or built sequential model, made in the scope of a strategy of
        one host; changed in place.
      stages: the number of stages, at least 2; it divides the number of replicas.
      micro_batches: in how many parts each replica's rows go through the stages, at
        least 1. `BatchNormalization` then sees parts; `AllRows` is refused.
      cuts: the names of the layers that begin the second and later stages. Default:
        stages of nearly equal estimated work and weights.

    Returns:
      `model`.

    Raises:
      ConfigurationError: for a bad argument, a model without a graph of layers, one
        that was trained or given another graph (`tfdp.remat(policy="segments")`), a
        strategy that cannot lend weights (several hosts, TPUs, `layout=`, `sync=`,
        compression, or an engine other than "in_process").

    Cost: activations travel twice per cut and step. With M = `micro_batches` x replicas
    of a group each device is idle for (P - 1) / (M + P - 1) of a step of P stages.

    Not saved with the model, whose files hold whole weights under their own names: call
    it again after loading, with `keras.models.load_model(path, compile=False)`.

    ```python
    import keras
    import tfdp

    strategy = tfdp.DataParallelStrategy(tfdp.use_virtual_devices(2))
    with strategy.scope():
        layers = [keras.layers.Dense(8, "gelu") for _ in range(4)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model = tfdp.pipeline(model, stages=2)
    ```

    Source: Huang et al. 2019 (GPipe, arXiv 1811.06965).
    """
    for name, value, least in (
        ("stages", stages, 2),
        ("micro_batches", micro_batches, 1),
    ):
        if not is_whole(value, least=least):
            raise ConfigurationError(
                f"{name} must be an integer of at least {least}. Received: {value!r}."
            )
    functional, nodes = _graph_of(model)
    if micro_batches > 1:
        _check_rows(model, functional)
    runs = runs_between(nodes, _ends(nodes, functional, stages, cuts), functional)
    if note_pipeline(runs, micro_batches):
        return model  # `tfdp plan` and `tfdp check` run a script with one device
    mesh = _mesh_of(model.distribute_strategy, stages)
    shards = stage_updates_of(model.distribute_strategy)
    moved: set[int] = set()
    for owner, run in enumerate(runs):
        weights = [v for v in _weights_of(Segment(run)) if id(v) not in moved]
        moved.update(map(id, weights))
        shards.move(weights, mesh, owner)
    made = _Pipeline(functional, nodes, runs, shards, mesh, micro_batches)
    graphs.override_runs(functional, made.run, PIPELINE)
    return model


def _graph_of(model: Any) -> tuple[Any, list[graphs.OperationCall]]:
    """The functional graph of a model, and its calls; refuses others."""
    functional = graphs.functional_of(model) if isinstance(model, keras.Model) else None
    if functional is None or not graphs.is_run_by_keras(model):
        raise ConfigurationError(
            "tfdp.pipeline cuts the graph of a functional model, or of a Sequential "
            f"that is built (keras.Input). Received: {model!r}, which has none, or "
            "overrides call. Cut a functional model within it, or use "
            'shard="parameters".'
        )
    if graphs.is_overridden(functional):
        raise ConfigurationError(
            f"The graph of {model.name!r} is cut already, by tfdp.pipeline or by "
            "tfdp.remat(policy='segments'). Make the model again; with a pipeline use "
            "another policy of tfdp.remat."
        )
    optimizer = getattr(model, "optimizer", None)
    functions = ("train_function", "test_function", "predict_function")
    is_used = any(getattr(model, name, None) is not None for name in functions)
    if is_used or (optimizer is not None and optimizer.built):
        raise ConfigurationError(
            f"The model {model.name!r} was used by fit, evaluate or predict, or its "
            "optimizer is built: their functions and state are for weights on each "
            "device. Call tfdp.pipeline before; then load the weights. A model from a "
            "file, or a clone, has an optimizer that is built: load it with "
            "keras.models.load_model(path, compile=False), call tfdp.pipeline, then "
            "compile. tfdp.callbacks.Checkpoint keeps the optimizer's state."
        )
    return functional, graphs.nodes_of(functional)


def _check_rows(model: keras.Model, functional: Any) -> None:
    """Refuses what parts of the rows cannot compute: outputs without rows, which are
    not joined from those of parts, and layers that are to see all rows."""
    for layer in layers_within(model):
        if isinstance(layer, AllRows):
            raise ConfigurationError(
                f"The layer {layer.name!r} is to see the rows of all replicas, but "
                "tfdp.pipeline(micro_batches=...) gives it parts of them. Use "
                "micro_batches=1, and more replicas."
            )
    if all(len(symbol.shape) and not symbol.shape[0] for symbol in functional.inputs):
        for symbol in functional.outputs:
            if not len(symbol.shape) or symbol.shape[0]:
                raise ConfigurationError(
                    "tfdp.pipeline(micro_batches=...) joins the outputs of parts of "
                    f"the rows, but the output {symbol.name!r} of shape "
                    f"{tuple(symbol.shape)} has no rows. Use micro_batches=1, or "
                    "compute it from an output with rows, after the model."
                )


def _mesh_of(strategy: Any, stages: int) -> Mesh:
    """Groups of `stages` replicas; refuses a strategy that has none."""
    given = getattr(strategy, "given", None)
    if given is None:
        raise ConfigurationError(
            "tfdp.pipeline needs a model that is made in the scope of a strategy of "
            f"tfdp, such as tfdp.DataParallelStrategy. Received one of {strategy!r}."
        )
    refused = [
        n for n in ("layout", "sync", "Communication.compression") if given.has(n)
    ]
    transport = strategy.extended.reducer.transport
    replicas = transport.topology.num_replicas
    why = f"it has {refused[0].rpartition('.')[2]}=" if refused else ""
    if replicas != len(transport.devices):
        why = "it has several hosts, and activations would cross the network"
    elif transport.lend is None:
        why = (
            f"its engine is {transport.name!r}: use Communication(engine='in_process')"
        )
    elif replicas % stages:
        why = f"it has {replicas} replicas, of which {stages} stages make no groups"
    if why:
        raise ConfigurationError(
            f"tfdp.pipeline(stages={stages}) cannot use this strategy: {why}. Use a "
            "strategy of one host with a multiple of that many devices, and no other "
            'axis; or shard="parameters", which works with any number of hosts.'
        )
    return Mesh((replicas // stages, stages), ("data", "stage"), "data")


def _ends(
    nodes: Sequence[graphs.OperationCall],
    functional: Any,
    stages: int,
    cuts: Sequence[str] | None,
) -> list[int]:
    """The last call of each stage."""
    if cuts is not None:
        first: dict[str, int] = {}
        for place, node in enumerate(nodes):
            first.setdefault(node.operation.name, place)
        begins = []
        if isinstance(cuts, list | tuple):
            begins = [first.get(name, 0) for name in cuts if isinstance(name, str)]
        if len(begins) != stages - 1 or sorted({0, *begins}) != [0, *begins]:
            raise ConfigurationError(
                f"cuts must name {stages - 1} layers in the order in which the model "
                "runs them, none of them the first: those that begin stages 2 to "
                f"{stages}. Received: {cuts!r}. Its layers: {', '.join(first)}."
            )
        return [begin - 1 for begin in begins] + [len(nodes) - 1]
    if len(nodes) < stages:
        raise ConfigurationError(
            f"stages must be at most {len(nodes)}, the number of the model's layers. "
            f"Received: {stages}."
        )
    weights = [_elements(node.operation) for node in nodes]
    work = [_work(node.operation, node.gives) for node in nodes]
    of_all = max(sum(weights), 1), max(sum(work), 1.0)
    costs = [w / of_all[0] + n / of_all[1] for w, n in zip(weights, work, strict=True)]
    return stage_ends(costs, sizes_of(nodes, functional)[1], stages)


def _elements(operation: Any) -> int:
    is_layer = isinstance(operation, keras.layers.Layer)
    weights = operation.trainable_variables if is_layer else ()
    return sum(math.prod(weight.shape) for weight in weights)


def _work(operation: Any, gives: Sequence[Any]) -> float:
    """An estimate of the multiplications of one row."""
    inner = (
        graphs.functional_of(operation) if isinstance(operation, keras.Model) else None
    )
    if inner is not None:
        return sum(_work(node.operation, node.gives) for node in graphs.nodes_of(inner))
    size = sum(map(size_of, gives))
    if isinstance(operation, keras.layers.Embedding):
        return size
    features = gives[0].shape[-1] if len(gives[0].shape) else 1
    return size + _elements(operation) * size / max(features or 1, 1)


def _weights_of(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Variables that are trained, or would be if they were not frozen."""
    state = {id(v) for each in layers_within(layer) for v in state_of(each)}
    return [
        v
        for v in layer.variables
        if id(v) not in state and tf.as_dtype(v.dtype).is_floating
    ]


class _Pipeline:
    """The stages of one model."""

    def __init__(
        self,
        functional: Any,
        nodes: Sequence[graphs.OperationCall],
        runs: Sequence[LayerRun],
        shards: StageUpdates,
        mesh: Mesh,
        micro_batches: int,
    ):
        self.functional, self._nodes, self.runs = functional, nodes, runs
        self.shards, self.parts = shards, micro_batches
        self.groups = mesh.groups(["stage"])
        self.layers = [Segment(run) for run in runs]

    def run(self, inputs: list[Any], operation_fn: Callable) -> list[Any]:
        """The model's outputs: Keras' `_run_through_graph`."""
        found = self._in_step(inputs)
        if found is None:  # outside of replicas the whole model is on one device
            values = graphs.values_of(self.functional, inputs)
            graphs.run_nodes(self._nodes, values, operation_fn)
            return graphs.outputs_in(self.functional, values)
        call = _Call(self, *found, operation_fn)
        if self.parts == 1:
            return call.outputs_of(0, inputs)
        rows = _RowParts(inputs, self.parts)
        losses = _LossesOfParts(self.layers)
        outputs = []
        for n in range(self.parts):
            outputs.append(call.outputs_of(n, rows.part(n)))
            losses.take()
        losses.give_whole(rows, *found)
        return rows.joined(outputs)

    def _in_step(self, inputs: Sequence[Any]) -> tuple[Step, int] | None:
        """The step and the calling replica, where replicas can exchange."""
        found, graph = current_step(), tf.compat.v1.get_default_graph()
        in_step = tf.distribute.get_replica_context() is not None
        if found is None or not in_step or not any(map(is_of_graph, inputs)):
            return None
        return found if graph is self.shards.transport.order.run_graph else None


class _Call:
    """One call of the model by one replica."""

    def __init__(
        self, pipeline: _Pipeline, step: Step, rank: int, operation_fn: Callable
    ):
        self._of, self._step, self._rank = pipeline, step, rank
        self._operation_fn = operation_fn
        self._state = step.trace(rank).of(StageOfReplica)
        self._members = pipeline.groups.of(rank)
        #: How many exchanges of others than stages the replica has built so far.
        self._others = self._transport.order.built[rank] - self._state.exchanges
        self._key = id(pipeline), self._members, self._state.calls
        self._state.calls += 1
        self._lent: list[dict[int, list[tf.Tensor]]] = [{} for _ in pipeline.runs]
        if pipeline.parts > 1:
            for place in range(len(pipeline.runs)):
                self._lend(place)

    @property
    def _transport(self) -> Any:
        return self._of.shards.transport

    def _device(self, place: int) -> str:
        return self._transport.devices[self._members[place]]

    def _lend(self, place: int) -> None:
        """Weights of a stage, once for all parts of the replica's rows."""
        stored = map(stored_value, self._of.layers[place].variables)
        with (
            tf.device(self._device(place)),
            self._state.computing(place),
            autocasting_as(None),
        ):
            for variable in stored:
                if isinstance(variable, StageVariable):
                    read = tf.convert_to_tensor(variable)
                    self._lent[place][id(variable)] = _spread(read, self._of.parts)

    def outputs_of(self, part: int, inputs: Sequence[Any]) -> list[Any]:
        """The outputs for a part of the replica's rows."""
        values = graphs.values_of(self._of.functional, inputs)
        for place, run in enumerate(self._of.runs):
            given = [recompute.as_read(values[id(symbol)]) for symbol in run.takes]
            made = self._stage(place, part, given)
            pairs = zip(run.gives, made, strict=True)
            values.update((id(symbol), value) for symbol, value in pairs)
        return graphs.outputs_in(self._of.functional, values)

    def _stage(self, place: int, part: int, given: Sequence[Any]) -> list[Any]:
        """The results of a stage for a part, computed on its owner's device."""
        run, layer, device = self._of.runs[place], self._of.layers[place], self._device
        present = [value for value in given if value is not None]
        lent = {key: copies[part] for key, copies in self._lent[place].items()}
        with tf.device(device(place)), tf.name_scope(f"stage_{place}"):
            with tf.control_dependencies(self._before(place, part)):
                own = list(map(recompute.copy_in_name, given))
            reads = {key: tf.identity(read) for key, read in lent.items()}
            sources = [*(t for t in own if t is not None), *reads.values()]
            with (
                self._state.computing(place, reads),
                VariableWatcher() as watcher,
                tf.GradientTape(persistent=True) as tape,
            ):
                tape.watch([t for t in sources if t.dtype.is_floating])
                made = run.run(own, self._operation_fn)
            with stop_recording():
                outputs = list(map(recompute.copy_in_name, made))
        variables = recompute.own_copies(layer.trainable_variables)
        others = recompute.own_copies(layer.variables)
        variables += recompute.read_besides(watcher, others)
        in_order = exchanges_of_gradient()

        def backward(*upstream: Any) -> list[Any]:
            arrived = [
                (output, gradient)
                for output, gradient in zip(made, upstream, strict=True)
                if gradient is not None and output.dtype.is_floating
            ]
            with in_order(), tf.device(device(place)), self._state.computing(place):
                found = tape.gradient(
                    [output for output, _ in arrived],
                    [*sources, *variables],
                    output_gradients=[gradient for _, gradient in arrived],
                )
            self._note(place, part, found[: len(sources)])
            of_variables = found[len(sources) :]
            return [*found[: len(sources)], *_of_loss(of_variables, layer)]

        recompute.record_gradient(
            outputs, [*present, *lent.values()], variables, backward
        )
        return outputs

    # The order 1F1B: forward of m on stage s waits for backward of m - (P - s).

    def _micro(self, part: int) -> int:
        return self._members.index(self._rank) * self._of.parts + part

    def _before(self, place: int, part: int) -> Sequence[tf.Tensor]:
        """The gradients that the forward pass of a part waits for."""
        # Backward passes of the replica's own parts begin after all forward passes.
        last = self._micro(0) - 1
        earlier = min(self._micro(part) - (len(self._of.runs) - place), last)
        return self._step.of(Backward).get((*self._key, place, earlier), ())

    def _note(self, place: int, part: int, gradients: Sequence[Any]) -> None:
        """Notes the end of a backward pass, if it waits for no other replica."""
        own = [gradient for gradient in gradients if gradient is not None]
        own, self._state.gradients = own + self._state.gradients, []
        built = self._transport.order.built[self._rank]
        if built - self._state.exchanges == self._others:
            key = (*self._key, place, self._micro(part))
            self._step.of(Backward).note(key, own)


def _of_loss(gradients: Sequence[Any], layer: Segment) -> list[Any]:
    """Gradients of a stage's variables, as those of the loss that they are too.

    The stage's own tape has stated that they are gradients of the stage's outputs,
    unless a weight was read once: then they are known to be the owner's part.
    """
    stored = map(stored_value, layer.trainable_variables)
    for gradient, variable in zip(gradients, stored, strict=False):
        if gradient is not None and isinstance(variable, StageVariable):
            register(gradient, Value(terms=frozenset({Term.SHARD})))
    others = len(layer.trainable_variables)
    return [
        *gradients[:others],
        *(g if g is None else tf.identity(g) for g in gradients[others:]),
    ]


def _spread(value: tf.Tensor, copies: int) -> list[tf.Tensor]:
    """The value for each of several readers; their gradients are added where it is."""

    @tf.custom_gradient
    def spread(value: tf.Tensor) -> Any:
        def gradient(*upstream: Any) -> tf.Tensor:
            with tf.device(value.device):
                return sum_in_order(list(map(tf.convert_to_tensor, upstream)))

        return [tf.identity(value) for _ in range(copies)], gradient

    return list(spread(value))


class _LossesOfParts:
    """Losses that layers gave `add_loss` for each part, which count once for all."""

    def __init__(self, layers: Sequence[keras.layers.Layer]):
        within = {id(each): each for layer in layers for each in layers_within(layer)}
        self._lists = list(map(losses_added_in, within.values()))
        self._begins = list(map(len, self._lists))
        self._taken: list[list[list[Any]]] = [[] for _ in self._lists]

    def take(self) -> None:
        """Takes the losses of a part out of the layers."""
        for losses, begin, taken in zip(
            self._lists, self._begins, self._taken, strict=True
        ):
            taken.append(list(losses[begin:]))
            del losses[begin:]

    def give_whole(self, rows: _RowParts, step: Step, rank: int) -> None:
        """Gives layers the losses of all rows of the replica instead."""
        for losses, taken in zip(self._lists, self._taken, strict=True):
            for parts in zip(*taken, strict=True):
                tensors = list(map(tf.convert_to_tensor, parts))
                losses.append(self._whole(tensors, rows, step, rank))

    def _whole(
        self, parts: Sequence[tf.Tensor], rows: _RowParts, step: Step, rank: int
    ) -> tf.Tensor:
        standing = step.trace(rank).shares.standing_of(parts[0])
        if standing is not Standing.LOCAL:
            raise ConfigurationError(
                "With tfdp.pipeline(micro_batches=...) a layer gives add_loss a loss "
                "for each part of the rows: their mean, or a value for each row. It "
                "gave the result of a Keras loss, of tfdp.losses.local_mean or of "
                "local_sum, which is a share of the loss of the batch already. Give "
                "the mean, keras.ops.mean(losses); or use micro_batches=1."
            )
        if parts[0].shape.rank != 0 and are_values_of_rows(step, rank, parts[0], ()):
            return rows.joined([[part] for part in parts])[0]
        shares = rows.shares_in(parts[0].dtype)
        whole = tf.add_n([p * s for p, s in zip(parts, shares, strict=True)])
        register(whole, parts[0])  # a mean over rows, as of each part
        return whole


class _RowParts:
    """The rows of a replica in parts, each of one row at least."""

    def __init__(self, inputs: Sequence[Any], parts: int):
        if not all(isinstance(x, tf.Tensor) and x.shape.rank for x in inputs):
            raise ConfigurationError(
                "tfdp.pipeline(micro_batches=...) cuts dense inputs with rows only. "
                "Use micro_batches=1, and more replicas."
            )
        self._inputs = inputs
        rows = inputs[0].shape[0] or tf.shape(inputs[0])[0]
        #: Whether a part may have no rows: it gets one that is left out of outputs.
        self._may_be_empty = not isinstance(rows, int) or rows < parts
        edges = [place * rows // parts for place in range(parts + 1)]
        self._sizes = [end - begin for begin, end in itertools.pairwise(edges)]
        self._begins = edges[:-1]
        if self._may_be_empty:
            self._begins = [tf.minimum(begin, rows - 1) for begin in edges[:-1]]

    def part(self, place: int) -> list[Any]:
        """The inputs of a part, with masks."""
        begin, size = self._begins[place], self._sizes[place]
        end = begin + (tf.maximum(size, 1) if self._may_be_empty else size)
        parts = []
        for whole in self._inputs:
            mask = mask_of(whole)
            part = whole[begin:end]
            register(part, whole)
            if mask is not None:
                put_mask(part, mask[begin:end])
            parts.append(part)
        return parts

    def shares_in(self, dtype: tf.DType) -> list[Any]:
        """The part of the replica's rows that each part has."""
        if not self._may_be_empty:
            return [size / sum(self._sizes) for size in self._sizes]
        sizes = tf.cast(tf.stack(self._sizes), dtype)
        return tf.unstack(tf.math.divide_no_nan(sizes, tf.reduce_sum(sizes)))

    def joined(self, outputs: Sequence[Sequence[Any]]) -> list[Any]:
        """The outputs of all rows, from those of each part."""
        return [self._join(parts) for parts in zip(*outputs, strict=True)]

    def _join(self, parts: Sequence[Any]) -> Any:
        joined = self._concat(parts)
        masks = list(map(mask_of, parts))
        if masks[0] is not None:
            put_mask(joined, self._concat(masks))
        return joined

    def _concat(self, parts: Sequence[Any]) -> tf.Tensor:
        first = parts[0]
        if self._may_be_empty:
            pairs = zip(parts, self._sizes, strict=True)
            parts = [part[:size] for part, size in pairs]
        joined = tf.concat(parts, axis=0)
        register(joined, first)  # for all that is known of rows, a part is the whole
        return joined
