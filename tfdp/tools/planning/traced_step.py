"""The user's own training step under a strategy, traced once and not run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import (
    build_as_declared,
    large_variables_left_empty,
)
from tfdp.errors import ConfigurationError
from tfdp.layers.rematerialization import remat as recompute
from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding
from tfdp.sharding.updates import host_of
from tfdp.step.jit import take_over_jit
from tfdp.step.repeated_rows import takes_sums_alike
from tfdp.step.table_rows import Table, tables_of
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.devices import find_devices
from tfdp.tools.planning.any_rows import AnyRows, NotOfRows, rows_to_trace
from tfdp.tools.planning.batch import Batch, batch_of
from tfdp.tools.planning.hosts_in_thought import HostOfMany
from tfdp.tools.planning.step_graph import StepGraph, StoredVariable
from tfdp.tools.planning.trace import read_graph

__all__ = ["TracedModel", "builder_of"]

# Of larger weights, and slots of an optimizer, nobody asks for the numbers.
LEAST_EMPTY_BYTES = 2**20


def builder_of(model: Any) -> Callable[[], keras.Model]:
    """A function that makes a model like `model`, compiled.

    Args:
      model: such a function, or a compiled model that Keras can make again.

    Raises:
      ConfigurationError: when it is neither.
    """
    if isinstance(model, keras.Model):
        if getattr(model, "optimizer", None) is None:
            raise ConfigurationError(
                f"The model {model.name!r} is not compiled: what its optimizer keeps "
                "is a large part of the memory. Call model.compile(optimizer, loss)."
            )
        return lambda: _made_again(model)
    if callable(model):
        return model
    raise ConfigurationError(
        "model must be a compiled Keras model, or a function that makes one. "
        f"Received: {type(model).__name__}."
    )


def _made_again(model: keras.Model) -> keras.Model:
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
    return again


class TracedModel:
    """A model under a strategy of its own, whose step can be traced for any batch.

    Args:
      build: makes the compiled model.
      devices: one per replica.
      batch: what the caller knows of a batch.
      remat: whether blocks of layers compute their forward pass twice; a text says
        which blocks, as `tfdp.remat` takes it.
      sharding: what is sharded, and by whom.
      communication: as a strategy takes it.
      hosts: that train together, each on as many devices.
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
        # The rows of the one trace, its graph, and lengths that are not of a batch.
        self._for_all: tuple[int, Any, set[int]] | None = None
        self._must_be_alone = False
        self._hosts = hosts
        self._communication = communication
        self._host_device = ""
        if sharding.offloads:
            [first, *_] = find_devices(devices)
            self._host_device = host_of(first)
        self._strategy: DataParallelStrategy
        if hosts > 1:
            self._strategy = HostOfMany(devices, hosts, communication, sharding)
        else:
            alone = dataclasses.replace(sharding, group="all")
            self._strategy = DataParallelStrategy(
                devices, alone=True, communication=communication, shard=alone
            )
        with self._strategy.scope(), large_variables_left_empty(LEAST_EMPTY_BYTES):
            self.model = build()
        is_model = isinstance(self.model, keras.Model)
        if not is_model or getattr(self.model, "optimizer", None) is None:
            raise ConfigurationError(
                "The function must return a compiled Keras model. It returned: "
                f"{type(self.model).__name__}."
            )
        self.batch: Batch = batch_of(batch, self.model)
        #: Whether XLA would compile what each replica computes; here it is not.
        self.is_compiled = take_over_jit(self.model)
        #: Whether the step would run op by op; here it is a graph.
        self.is_eager = bool(self.model.run_eagerly)
        if remat:
            recompute(self.model, "each" if remat is True else str(remat))

    def graph_of(self, local_rows: int, *, of_any: bool = False) -> StepGraph:
        """The step of all replicas on batches of `local_rows` each.

        Args:
          local_rows: at least 1.
          of_any: whether other numbers will be asked about: they share one trace where
            they can. A single row does not: what has one is broadcast.
        """
        if of_any and local_rows > 1 and not self._must_be_alone:
            try:
                return self._from_one(local_rows)
            except Exception:
                # A length that is no multiple of the rows, or a model that does not
                # take so many: each number of rows gets a trace of its own.
                self._must_be_alone, self._for_all = True, None
        return self._read(self._traced(local_rows), local_rows)

    @property
    def shares_a_trace(self) -> bool:
        """Whether one trace has stood for several numbers of rows."""
        return self._for_all is not None

    def _from_one(self, local_rows: int) -> StepGraph:
        if self._for_all is None:
            shapes = [spec.shape.as_list() for spec in tf.nest.flatten(self.batch.like)]
            fixed = {size for shape in shapes for size in shape}
            weights = {size for v in self.model.weights for size in v.shape}
            row_bytes = self.batch.row_bytes * self.replicas
            rows = rows_to_trace(fixed, weights, row_bytes)
            if rows is None:
                raise NotOfRows("no number of rows divides no other length")
            self._for_all = rows, self._traced(rows), fixed | weights
        traced_rows, graph, fixed = self._for_all
        return self._read(graph, local_rows, AnyRows(traced_rows, local_rows, fixed))

    def _traced(self, local_rows: int) -> Any:
        zeros = self.batch.zeros(local_rows)
        with self._strategy.scope(), large_variables_left_empty(LEAST_EMPTY_BYTES):
            build_as_declared(self.model, zeros)

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
    def trainable_bytes(self) -> int:
        """Of the trainable weights, whole."""
        return sum(_bytes_of(v) for v in self.model.trainable_variables)

    @property
    def tables(self) -> list[tuple[Table, bool]]:
        """Those whose gradients are rows, and whether rows of one word are added."""
        asked = self._communication or Communication()
        adds_rows = asked.repeated_rows == "sum" or takes_sums_alike(
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
                    add(own, part)
        for variable in graph.variables:
            for own in getattr(variable, "values", (variable,)):
                add(own, "state")
        return found


def _bytes_of(variable: Any) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
