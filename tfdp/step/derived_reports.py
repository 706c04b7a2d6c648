"""What a step computes from results of metrics: perplexity, F1, a sum of two.

On one device such a number is computed from the results over all rows. A replica has
its own metrics' results, and a mean of what it computes of them is another number: the
mean of exponentials is no exponential of a mean. So the operations between the results
and the number are done once more, with the results over all replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

__all__ = ["Derivation", "Mixture", "derivation_of"]


@dataclasses.dataclass(frozen=True)
class Derivation:
    """How a number of a graph comes from results of metrics.

    Args:
      value: the number.
      results: what it is computed from.
      operations: those in between, and constants.
    """

    value: tf.Tensor
    results: tuple[tf.Tensor, ...]
    operations: tuple[tf.Operation, ...]

    def of(self, results: Sequence[tf.Tensor]) -> tf.Tensor:
        """The number that other `results`, in the same order, make."""
        if not self.operations:
            return results[0]  # it is a result
        graph_def = tf.compat.v1.GraphDef()
        # Without it operations are read as TensorFlow's first version meant them.
        graph_def.versions.producer = tf.version.GRAPH_DEF_VERSION
        for operation in self.operations:
            node = graph_def.node.add()
            node.CopyFrom(operation.node_def)
            # A replica's place, and whom it waits for, are its own.
            node.device = ""
            node.attr.pop("_class", None)
            data = [name for name in node.input if not name.startswith("^")]
            node.ClearField("input")
            node.input.extend(data)
        named = {
            own.name: tf.cast(other, own.dtype)
            for own, other in zip(self.results, results, strict=True)
        }
        (value,) = tf.graph_util.import_graph_def(
            graph_def, named, return_elements=[self.value.name], name="derived"
        )
        return value


class Mixture:
    """A number that is made of results and of something else, such as a loss."""


def derivation_of(
    value: tf.Tensor, is_result: Callable[[tf.Tensor], bool]
) -> Derivation | Mixture | None:
    """How `value` comes from results of metrics; None: it does not, or nobody can tell.

    Args:
      value: of a step.
      is_result: tells the results of metrics.
    """
    if isinstance(value, tf.__internal__.EagerTensor):
        return None
    results: dict[str, tf.Tensor] = {}
    operations: dict[str, tf.Operation] = {}
    is_of_results_alone = True
    todo = [value]
    while todo:
        tensor = todo.pop()
        if is_result(tensor):
            results[tensor.name] = tensor
            continue
        operation = tensor.op
        if operation.name in operations:
            continue
        operations[operation.name] = operation
        todo += operation.inputs
        is_of_results_alone = is_of_results_alone and _can_be_done_again(operation)
    if not results:
        return None
    if not is_of_results_alone:
        return Mixture()
    return Derivation(value, tuple(results.values()), tuple(operations.values()))


def _can_be_done_again(operation: tf.Operation) -> bool:
    """Whether it gives the same from the same inputs, and needs nothing besides."""
    if operation.type == "Const":
        return True
    calls = any(attribute.HasField("func") for attribute in _attributes(operation))
    return bool(operation.inputs) and not operation.op_def.is_stateful and not calls


def _attributes(operation: tf.Operation) -> Sequence:
    return list(operation.node_def.attr.values())
