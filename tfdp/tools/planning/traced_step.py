"""The user's training step under a strategy: traced once, never run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp import DataParallelStrategy
from tfdp import remat as recompute
from tfdp._private.keras_models import (
    build_as_declared,
    given_losses,
    large_variables_left_empty,
    take_over_jit,
    updates_all_variables,
)
from tfdp.chain.table_rows import sums_repeated_rows, tables_of
from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError
from tfdp.losses import ON_ALL_ROWS, on_all_rows
from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding
from tfdp.strategies.absent_hosts import AbsentHosts
from tfdp.tools.planning.any_rows import AnyRows, UnclearLength, rows_to_trace
from tfdp.tools.planning.step_graph import StepGraph, StoredVariable
from tfdp.tools.planning.trace import read_graph
from tfdp.tools.testing.model_parts import layers_of

# Larger weights and optimizer slots are left without values: only shapes are needed.
LEAST_EMPTY_BYTES = 2**20


def builder_of(model: Any) -> Callable[[], keras.Model]:
    """Returns a function that makes a compiled model like `model`."""
    if isinstance(model, keras.Model):
        if getattr(model, "optimizer", None) is None:
            raise ConfigurationError(
                f"The model {model.name!r} is not compiled: its optimizer's slots are "
                "a large part of the memory. Call model.compile(optimizer, loss)."
            )
        return lambda: _clone(model)
    if callable(model):
        return model
    raise ConfigurationError(
        "model must be a compiled Keras model, or a function that makes one. "
        f"Received: {type(model).__name__}."
    )


def _clone(model: keras.Model) -> keras.Model:
    try:
        again = type(model).from_config(model.get_config())
        again.compile_from_config(model.get_compile_config())
    except Exception as error:
        raise ConfigurationError(
            f"Keras cannot make the model {model.name!r} again from its configuration: "
            f"{error}. Give a function that builds and compiles it, "
            "plan(build_model, batch)."
        ) from error
    if getattr(again, "optimizer", None) is None:
        raise ConfigurationError(
            f"Keras cannot compile the model {model.name!r} again from its "
            "configuration. Give a function that builds and compiles it."
        )
    if model in ON_ALL_ROWS:
        on_all_rows(again)
    return again


class TracedModel:
    """A model under its own strategy, traced without values; arguments as in `plan`.

    `devices`: one per replica of a host, the same on each of `hosts`.
    """

    def __init__(
        self,
        build: Callable[[], keras.Model],
        devices: list[str],
        batch: Any,
        *,
        remat: bool | str,
        sharding: Sharding,
        communication: Communication | None = None,
        hosts: int = 1,
    ):
        self.replicas = len(devices)
        #: Rows of the shared trace, its graph, and lengths independent of the batch.
        self.shared_trace: tuple[int, Any, set[int]] | None = None
        self._traces_each = False
        self._hosts = hosts
        self._communication = communication
        self._host_device = "/device:CPU:0" if sharding.offloads else ""
        self._strategy: DataParallelStrategy
        if hosts > 1:
            self._strategy = AbsentHosts(devices, hosts, communication, sharding)
        else:
            alone = dataclasses.replace(sharding, group="all")
            self._strategy = DataParallelStrategy(
                devices, alone=True, communication=communication, shard=alone
            )
            # As under `auto_strategy`: a `sync` between hosts does nothing here.
            self._strategy.idle_options = {}
        with self._strategy.scope(), large_variables_left_empty(LEAST_EMPTY_BYTES):
            self.model = build()
        is_model = isinstance(self.model, keras.Model)
        if not is_model or getattr(self.model, "optimizer", None) is None:
            kind = "a model that is not compiled, " if is_model else ""
            raise ConfigurationError(
                "The function must return a compiled Keras model. It returned: "
                f"{kind}{type(self.model).__name__}."
            )
        self.batch: BatchRows = batch_of(batch, self.model)
        # What the model requested; here XLA and eager mode are off.
        self.is_compiled = take_over_jit(self.model)
        self.is_eager = bool(self.model.run_eagerly)
        #: Whether `build` called `tfdp.remat` itself.
        self.is_rematerialized = any(
            getattr(layer, "is_rematerialized", False)
            for layer in layers_of(self.model)
        )
        if remat:
            recompute(self.model, "each" if remat is True else str(remat))

    def graph_of(self, local_rows: int, *, of_any: bool = False) -> StepGraph:
        """The step of all replicas on `local_rows` (at least 1) each.

        `of_any`: share one trace among row counts where possible. A single row gets its
        own: length-1 dimensions are broadcast.
        """
        if of_any and local_rows > 1 and not self._traces_each:
            try:
                return self._from_one(local_rows)
            except Exception:
                # A length that is no multiple of the rows, or a model that rejects the
                # traced row count: trace each count separately.
                self._traces_each, self.shared_trace = True, None
        return self._read(self._traced(local_rows), local_rows)

    def _from_one(self, local_rows: int) -> StepGraph:
        if self.shared_trace is None:
            shapes = [spec.shape.as_list() for spec in tf.nest.flatten(self.batch.like)]
            fixed = {size for shape in shapes for size in shape}
            weights = {size for v in self.model.weights for size in v.shape}
            row_bytes = self.batch.row_bytes * self.replicas
            rows = rows_to_trace(fixed, weights, row_bytes)
            if rows is None:
                raise UnclearLength("every number of rows divides another length")
            self.shared_trace = rows, self._traced(rows), fixed | weights
        traced_rows, graph, fixed = self.shared_trace
        return self._read(graph, local_rows, AnyRows(traced_rows, local_rows, fixed))

    def _traced(self, local_rows: int) -> Any:
        zeros = self.batch.zeros(local_rows)
        with self._strategy.scope(), large_variables_left_empty(LEAST_EMPTY_BYTES):
            try:
                build_as_declared(self.model, zeros)
            except Exception:
                # Its own train_step may call the model on something else than a batch,
                # and builds it while it is traced.
                if updates_all_variables(self.model):
                    raise

        def part_of(context: Any) -> Any:
            return tf.nest.map_structure(tf.constant, zeros)

        batch = self._strategy.experimental_distribute_values_from_function(part_of)

        @tf.function(autograph=False)
        def step(batch: Any) -> Any:
            return self._strategy.run(self.model.train_step, args=(batch,))

        return step.get_concrete_function(batch).graph

    def _read(
        self, graph: Any, local_rows: int, rows: AnyRows | None = None
    ) -> StepGraph:
        batch_bytes = self.batch.row_bytes * local_rows * self.replicas
        return read_graph(
            graph,
            self._variables(graph),
            batch_bytes,
            {tuple(v.shape) for v in self.model.trainable_variables},
            self._hosts,
            self._host_device,
            rows,
        )

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The options of the model that the traced step leaves out, and why."""
        return self._strategy.idle_lines

    @property
    def sees_all_rows(self) -> bool:
        """Whether losses and metrics are computed on the rows of all replicas."""
        return self.model in ON_ALL_ROWS

    @property
    def gathered_row_bytes(self) -> int:
        """Bytes of a row that all replicas receive for losses and metrics."""
        return ON_ALL_ROWS.get(self.model, 0)

    @property
    def trainable_bytes(self) -> int:
        return sum(_bytes_of(v) for v in self.model.trainable_variables)

    @property
    def owned_bytes(self) -> int:
        """Bytes of the weights that one replica each updates whole."""
        return sum(
            _bytes_of(variable)
            for variable in self.model.trainable_variables
            if getattr(variable.value, "owner", None) is not None
        )

    @property
    def tables(self) -> list[tuple[Any, bool]]:
        """Embedding tables with sparse gradients, and whether equal rows are summed."""
        communication = self._communication or Communication()
        adds_rows = communication.repeated_rows == "sum" or sums_repeated_rows(
            self.model.optimizer
        )
        return [
            (dataclasses.replace(table, variable=None), adds_rows)
            for table in tables_of(self.model)
        ]

    def _variables(self, graph: Any) -> dict[int, tuple[int, StoredVariable]]:
        found: dict[int, tuple[int, StoredVariable]] = {}

        def add(variable: Any, part: str) -> None:
            if id(variable.handle) not in found:
                here = self._host_device
                on_host = bool(here) and variable.device.endswith(here)
                stored = StoredVariable(_bytes_of(variable), part, on_host)
                found[id(variable.handle)] = (len(found), stored)

        groups = (self.model.weights, self.model.optimizer.variables)
        for part, group in zip(("weights", "slots"), groups, strict=True):
            for variable in group:
                for own in getattr(variable.value, "values", (variable.value,)):
                    add(getattr(own, "flat", own), part)  # many packed ones: one buffer
        for variable in graph.variables:
            for own in getattr(variable, "values", (variable,)):
                add(own, "state")
        return found


def _bytes_of(variable: Any) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


FORMS = (
    "a number of rows of the global batch, for a functional or sequential model; "
    "arrays, (x, y), of one global batch; or a dataset's element_spec of one"
)

# Many TensorFlow kernels index a dimension with 32 bits.
MOST_ROWS = 2**31 - 1


class BatchRows:
    """The row structure of a batch (`like`: TensorSpecs without rows), and its rows."""

    def __init__(self, like: Any, rows: int):
        self.like = like
        self.rows = rows

    def zeros(self, rows: int) -> Any:
        """A batch of `rows` rows of zeros and empty strings."""
        return tf.nest.map_structure(
            lambda spec: (
                # Keras builds no model from NumPy's object arrays.
                tf.fill((rows, *spec.shape), "")
                if spec.dtype == tf.string
                else np.zeros((rows, *spec.shape), spec.dtype.as_numpy_dtype)
            ),
            self.like,
        )

    @property
    def row_bytes(self) -> int:
        return sum(
            int(np.prod(spec.shape)) * spec.dtype.size
            for spec in tf.nest.flatten(self.like)
        )


def batch_of(batch: Any, model: keras.Model) -> BatchRows:
    """Converts the `batch` argument of `plan`."""
    if is_whole(batch, least=1):
        if batch > MOST_ROWS:
            raise ConfigurationError(
                f"batch must be at most {MOST_ROWS:,} rows. Received: {batch}."
            )
        return BatchRows(_rows_of_model(model), batch)
    if isinstance(batch, bool | int | float | str) or batch is None:
        raise ConfigurationError(f"batch must be {FORMS}. Received: {batch!r}.")
    if isinstance(batch, list):
        batch = tuple(batch)
    specs = tf.nest.map_structure(_spec_of, batch)
    rows = {spec.shape[0] for spec in tf.nest.flatten(specs) if spec.shape.rank}
    if len(rows) != 1 or None in rows:
        raise ConfigurationError(
            "All parts of a batch must have the same, fixed number of rows: "
            f"batch(n, drop_remainder=True). Received: {specs}."
        )
    like = tf.nest.map_structure(
        lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), specs
    )
    return BatchRows(_closed(like), rows.pop())


def _spec_of(part: Any) -> tf.TensorSpec:
    if isinstance(part, tf.TensorSpec):
        return part
    if hasattr(part, "shape") and hasattr(part, "dtype"):
        return tf.TensorSpec(part.shape, part.dtype)
    raise ConfigurationError(f"batch must be {FORMS}. Received in it: {part!r}.")


def _closed(like: Any) -> Any:
    for spec in tf.nest.flatten(like):
        if not spec.shape.is_fully_defined():
            raise ConfigurationError(
                "The memory of a step depends on every length in its batch. Received "
                f"a part of shape {spec.shape}: give arrays, or an element_spec, whose "
                "lengths are those of the largest batch."
            )
    return like


def _rows_of_model(model: keras.Model) -> Any:
    """Inputs as the model declares them, and targets as its loss takes them."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ConfigurationError(
            f"The model {model.name!r} does not declare its inputs (it is neither "
            "functional nor a Sequential with an Input), so a number of rows is not "
            f"enough. Give batch as {FORMS}."
        )
    # Keras' own structure: a list, a dictionary or one tensor.
    structure = getattr(model, "input", inputs)
    if isinstance(structure, list) and len(structure) == 1:
        [structure] = structure
    x = tf.nest.map_structure(
        lambda part: tf.TensorSpec(part.shape[1:], part.dtype), structure
    )
    losses = [str(getattr(loss, "name", loss)) for loss in given_losses(model)]
    targets = [
        _target_of(output, losses[place % len(losses)] if losses else "")
        for place, output in enumerate(model.outputs)
    ]
    y = targets[0] if len(targets) == 1 else tuple(targets)
    return _closed((x, y))


def _target_of(output: Any, loss: str) -> tf.TensorSpec:
    if "sparse" in loss:
        return tf.TensorSpec(output.shape[1:-1], tf.int32)
    return tf.TensorSpec(output.shape[1:], tf.float32)
