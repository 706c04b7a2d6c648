"""Registers what the core says about tensors, so that the analysis need not infer it.

Exchanges register their results, loss functions the factors that they scale by, and the
tape which number a gradient is of. An entry lives as long as its graph.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfdp._private.step_ops import order_of
from tfdp.lint.values import OF_ALL, Value
from tfdp.seams.replace import note_on


class GradientOf(NamedTuple):
    """A gradient of the sum of `targets`, each times its entry of `weights` if there
    are any; by a tensor `source`, or by the weight with this `handle`."""

    targets: tuple[tf.Tensor, ...]
    source: tf.Tensor | None
    handle: tf.Tensor | None
    weights: tuple[tf.Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[tf.Tensor, ...]:
        source = () if self.source is None else (self.source,)
        return (*self.targets, *self.weights, *source)


class ShareOf(NamedTuple):
    """A replica's share of a mean of values, which are made of these tensors."""

    made_of: tuple[tf.Tensor, ...]


#: A value; a tensor with the same value; or how it was computed.
Statement: TypeAlias = Value | tf.Tensor | GradientOf | ShareOf

#: With the graph, by handles' names: what a replica has stored, in order.
STORED = "_tfdp_stored"
# With the graph, by tensors' names: a statement has tensors of the graph, which would
# keep it alive elsewhere.
STATEMENTS = "_tfdp_statements"
_lock = threading.Lock()


def register(tensors: Any, statement: Statement, *, again: bool = True) -> None:
    """States what tensors of graphs are; with `again`, instead of what was stated."""
    for tensor in tf.nest.flatten(tensors, expand_composites=True):
        if is_of_graph(tensor):
            with _lock:
                stated = getattr(tensor.graph, STATEMENTS, None)
                if stated is None:
                    stated = {}
                    note_on(tensor.graph, STATEMENTS, stated)
                if again or tensor.name not in stated:
                    stated[tensor.name] = statement


def note_stored(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
    """`value`, noted as what later reads of a replica's `variable` here will give."""
    if not is_of_graph(value):
        return value
    marked = tf.identity(value)  # built when it is stored, maybe long after `value`
    graph = marked.graph
    stored = getattr(graph, STORED, None)
    if stored is None:
        stored = {}
        note_on(graph, STORED, stored)
    stored.setdefault(graph.capture(variable.handle).name, []).append(marked)
    return marked


def stored_before(read: tf.Operation) -> tf.Tensor | None:
    """The tensor that a replica stored last before this read, in the same graph."""
    stored = getattr(read.graph, STORED, {}).get(read.inputs[0].name, ())
    before = [one for one in stored if order_of(one.op) < order_of(read)]
    return before[-1] if before else None


def register_exchanged(tensors: Any) -> Any:
    """`tensors`, registered as the results of an exchange between all replicas."""
    register(tensors, OF_ALL)
    return tensors


def registered(graph: Any) -> Mapping[str, Statement]:
    """The statements about tensors of a graph so far, by their names."""
    return getattr(graph, STATEMENTS, None) or {}


def key_of(tensor: tf.Tensor) -> Any:
    """Identifies a tensor among all of the trace."""
    is_eager = isinstance(tensor, tf.__internal__.EagerTensor)
    return id(tensor) if is_eager else (id(tensor.graph), tensor.name)


def is_of_graph(value: Any) -> bool:
    """Whether a value is a tensor of a graph."""
    is_eager = isinstance(value, tf.__internal__.EagerTensor)
    return isinstance(value, tf.Tensor) and not is_eager
