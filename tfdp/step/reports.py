"""Reports one device's numbers from what each replica has.

Keras averages the replicas' results and counts each running mean once per replica,
independent of rows. Instead, with n_r of the n rows on replica r: the sum over replicas
of shares of the loss (`loss_shares`); the sum of n_r / n times numbers of own rows;
metrics recomputed from the sums of their state. A replica without rows contributes
nothing, instead of the mean of nothing, NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import metrics_of_layers, metrics_within, own_values
from tfdp._private.names import DistributedVariable, current_rank
from tfdp.lint.op_kinds import is_constant
from tfdp.lint.registry import is_of_graph, key_of
from tfdp.seams.replace import Override, instead, replace_for_good
from tfdp.step.local_step import SumOverHosts, summed_over_hosts
from tfdp.tracing.keras_steps import as_tensors
from tfdp.tracing.loss_checks import (
    reported_standing,
    warn_about_number,
    warn_about_returned,
)
from tfdp.tracing.loss_shares import Standing
from tfdp.tracing.step import Step, current_step
from tfdp.tracing.stored_state import MetricNotes

# The shape of a Keras loss of an empty replica in eager mode, where Keras does not
# reduce it.
NO_LOSSES = (0,)


class NotedResults:
    """Maps tensors to the metrics that they are the results of."""

    def __init__(self) -> None:
        self._by_key: dict[Any, tuple[tf.Tensor, Any, str | None]] = {}

    def note(self, result: Any, metric: Any) -> None:
        parts = result if isinstance(result, dict) else {None: result}
        for name, value in parts.items():
            if tf.is_tensor(value):
                # Keeps the tensor, so that its key stays unique.
                self._by_key[key_of(value)] = value, metric, name

    def find(self, value: tf.Tensor) -> tuple[Any, str | None] | None:
        """The metric, and the name of the part, that `value` is the result of."""
        found = self._by_key.get(key_of(value))
        return None if found is None else found[1:]


def report_overrides(
    model: Any,
    step: Step,
    made_metrics: Sequence[keras.metrics.Metric],
    noted: NotedResults,
) -> Iterator[Override]:
    """Overrides that make means of `model` weight the replicas' numbers by their rows;
    `noted` gets the results of its metrics."""
    if not isinstance(model, keras.Model) or step.replicas == 1:
        return
    metrics = _metrics_of(model, made_metrics)
    for metric in {id(one): one for one in metrics}.values():
        if type(metric).__module__.startswith("keras."):
            # Keras' own counts are exact; numbers for them are checked when they are
            # passed.
            own = metric.variables
            step.of(MetricNotes).checked.update(id(variable.value) for variable in own)
        step.of(MetricNotes).weighted_means.add(id(metric))
        result = functools.partial(_result, metric, noted)
        yield Override(metric, "result", instead(result))


def _metrics_of(
    model: keras.Model, made_metrics: Sequence[keras.metrics.Metric]
) -> Iterator[keras.metrics.Metric]:
    # The list of metrics of a model may fail before it is compiled.
    if not getattr(model, "compiled", False):
        return
    yield from made_metrics
    # Including metrics that a user's own `metrics` property leaves out.
    for metric in [*model.metrics, *metrics_of_layers(model)]:
        inner = getattr(metric, "metrics", None)  # those given to `compile`
        for one in [metric] if inner is None else inner:
            yield from metrics_within(one)


def _result(metric: Any, noted: NotedResults) -> Any:
    result = type(metric).result(metric)

    # Some metrics return the variable in which they count.
    def value(part: Any) -> Any:
        return tf.convert_to_tensor(part) if isinstance(part, keras.Variable) else part

    result = tf.nest.map_structure(value, result)
    noted.note(result, metric)
    return result


def _of_replica(metric: Any) -> Step | None:
    """The step of the calling replica, if it reports `metric`."""
    found = current_step()  # None in another thread, while this one traces
    if found is None or found[0].here.sees_all_rows:
        return None
    return found[0] if id(metric) in found[0].of(MetricNotes).weighted_means else None


def _weighting_numbers(update_state: Callable[..., Any]) -> Callable[..., Any]:
    """`keras.metrics.Mean.update_state`, in replicas with numbers weighted by rows."""

    @functools.wraps(update_state)
    def update(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        step = _of_replica(metric)
        if step is not None:
            values, sample_weight = _weighted(metric, step, values, sample_weight)
        return update_state(metric, values, sample_weight=sample_weight)

    return update


def _weighted(
    metric: Any, step: Step, values: Any, sample_weight: Any
) -> tuple[Any, Any]:
    """The values and weights to count for `values`; numbers of all rows by rows."""
    rank = current_rank()
    (number,) = as_tensors([values])  # a learning rate is a variable
    number = number if tf.is_tensor(number) else tf.convert_to_tensor(number)
    value = tf.cast(number, metric.dtype)
    if value.shape.rank is None:
        return values, sample_weight
    is_number = not value.shape.rank
    if sample_weight is None and _has_no_rows(value, step, rank):
        value = number = tf.reduce_mean(value)
        is_number = True
    if not is_number and (
        sample_weight is None or tf.convert_to_tensor(sample_weight).shape.rank
    ):
        return values, sample_weight  # row by row
    if is_number:
        value = _without_share(metric, step, rank, number, value)
    else:
        size = tf.cast(tf.size(value), value.dtype)
        value = tf.math.divide_no_nan(tf.reduce_sum(value), size)
    share = tf.cast(step.share_of(rank), value.dtype)
    if sample_weight is None:
        sample_weight = share
    return tf.where(share > 0, value, tf.zeros_like(value)), sample_weight


def _has_no_rows(value: tf.Tensor, step: Step, rank: Any) -> bool:
    """Whether `value` has a static length, and the batch a dynamic one."""
    batch = [one for one in step.trace(rank).batch if one.shape.rank]
    is_known = bool(value.shape.rank) and value.shape[0] is not None
    return is_known and bool(batch) and all(one.shape[0] is None for one in batch)


def _without_share(
    metric: Any, step: Step, rank: Any, number: Any, value: tf.Tensor
) -> tf.Tensor:
    """`value`, which is `number`, as a mean over the replica's own rows."""
    subject = f"the metric {metric.name!r} was given"
    standing = reported_standing(step, rank, number, subject)
    if standing is Standing.LOCAL:
        warn_about_number(step, rank, metric, value)
    if standing is not Standing.SHARE:
        return value
    in_group = tf.cast(step.share_together(rank), value.dtype)
    return tf.math.divide_no_nan(value, in_group)


def _checking_numbers(update_state: Callable[..., Any]) -> Callable[..., Any]:
    """`MeanMetricWrapper.update_state`, in replicas with numbers of functions of the
    program's checked."""

    @functools.wraps(update_state)
    def update(metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step, values = _of_replica(metric), None
        if step is not None and sample_weight is None:
            values = own_values(metric, y_true, y_pred)
        if step is None or values is None:
            return update_state(metric, y_true, y_pred, sample_weight=sample_weight)
        if not values.shape.rank:
            warn_about_number(step, current_rank(), metric, values)
        return keras.metrics.Mean.update_state(metric, values)

    return update


replace_for_good("keras.metrics:Mean", "update_state", _weighting_numbers)
replace_for_good("keras.metrics:MeanMetricWrapper", "update_state", _checking_numbers)


def reduce_logs(
    logs: Any,
    step: Step,
    noted: NotedResults,
    parts_of: Callable[[Any], Sequence[Any]],
    sum_over_hosts: SumOverHosts | None,
) -> Any:
    """Combines what a step returned on each replica into what one device would return.

    Args:
      logs: nested per-replica values, in cross-replica context.
      noted: the results of metrics in the step.
      parts_of: returns the values of this host's replicas.
      sum_over_hosts: sums a vector; None: there is one host.

    In local training hosts do not wait for each other, so the result is this host's.
    """
    if step.is_local and sum_over_hosts is not None:
        _warn_of_own_logs(logs, step, parts_of)
        sum_over_hosts = None
    if step.replicas == 1:
        return logs
    leaves = [_read(leaf) for leaf in tf.nest.flatten(logs)]
    sums: dict[Any, tf.Tensor] = {}
    types: dict[int, tf.DType] = {}
    derived: dict[int, Derivation] = {}
    for place, leaf in enumerate(leaves):
        # A variable stands for each replica's current value.
        parts = [_read(part) for part in parts_of(leaf)]
        derivation = _derivation(parts, step, noted)
        if derivation is not None:
            derived[place] = derivation
            for result in derivation.results:
                for variable in noted.find(result)[0].variables:  # type: ignore[index]
                    if id(variable) not in sums:
                        copies = [one.read_value() for one in variable.value.values]
                        sums[id(variable)] = functools.reduce(operator.add, copies)
        elif _are_numbers(parts, step):
            addends = [
                _contribution(part, step, rank) for rank, part in enumerate(parts)
            ]
            sums[place] = functools.reduce(operator.add, addends)
            types[place] = parts[0].dtype
    if sum_over_hosts is not None:
        sums = summed_over_hosts(sums, sum_over_hosts)
    for place in range(len(leaves)):
        if place in sums:
            # Integers: the mean as an integer, as one device would report it.
            dtype = types[place]
            total = tf.round(sums[place]) if dtype.is_integer else sums[place]
            leaves[place] = tf.cast(total, dtype)
        elif place in derived:
            wholes = []
            for result in derived[place].results:
                metric, name = noted.find(result)  # type: ignore[misc]
                state = [sums[id(variable)] for variable in metric.variables]
                whole = metric.stateless_result(state)
                wholes.append(whole if name is None else whole[name])
            leaves[place] = derived[place].of(wholes)
    return tf.nest.pack_sequence_as(logs, leaves)


def _warn_of_own_logs(
    logs: Any, step: Step, parts_of: Callable[[Any], Sequence[Any]]
) -> None:
    """Warns of numbers of its own rows that a step returns; those of metrics cover all
    hosts when an epoch ends."""
    for leaf in tf.nest.flatten(logs):
        part = _read(parts_of(leaf)[0])
        if is_of_graph(part) and step.analysis(0).value(part).is_of_own_rows:
            step.suspicions.add(
                "a number is returned that depends on the rows of the batch, and with "
                "sync=... hosts do not add it up: the logs of each host have that of "
                "its own rows, so a callback that acts on it may act on one host only. "
                "Count it in a metric (keras.metrics.Mean), whose number at the end of "
                "an epoch covers all hosts",
                "own logs",
            )


def _read(value: Any) -> Any:
    """The value of a variable; a step may return a learning rate, or a counter."""
    if isinstance(value, keras.Variable):
        return tf.convert_to_tensor(value.value)
    is_variable = isinstance(value, tf.Variable)
    is_of_replicas = isinstance(value, tf.distribute.DistributedValues)
    return value.read_value() if is_variable and not is_of_replicas else value


def _derivation(
    parts: Sequence[Any], step: Step, noted: NotedResults
) -> Derivation | None:
    """How a step's result derives from results of metrics only; None: it does not."""

    def is_result(tensor: tf.Tensor) -> bool:
        found, by_sum = noted.find(tensor), tf.VariableAggregation.SUM
        values = [] if found is None else [one.value for one in found[0].variables]
        return found is not None and all(
            isinstance(value, DistributedVariable) and value.aggregation == by_sum
            for value in values
        )

    if not tf.is_tensor(parts[0]):
        return None
    if is_result(parts[0]):
        return Derivation(parts[0], (parts[0],), ())
    derivation = derivation_of(parts[0], is_result)
    if isinstance(derivation, DerivedReport):
        step.suspicions.add(
            "a number is returned that was computed from a metric's result and from "
            "something else. Each replica computes its own, and their mean is "
            "reported: return the two separately"
        )
        return None
    return derivation


def _are_numbers(parts: Sequence[Any], step: Step) -> bool:
    # A single value for all replicas is no replica's own.
    is_own = len(parts) == (
        step.replicas if step.batch.counts is None else len(step.batch.counts)
    )
    if not is_own or not all(isinstance(p, tf.Tensor) for p in parts):
        return False
    if not all(p.dtype.is_floating or p.dtype.is_integer for p in parts):
        return False
    ranks = {p.shape.rank for p in parts if tuple(p.shape) != NO_LOSSES}
    has_none = any(tuple(p.shape) == NO_LOSSES for p in parts)
    # Keras leaves row losses unreduced (NO_LOSSES) only where it reduces others.
    return len(ranks) == 1 and None not in ranks and (ranks == {0} or not has_none)


def _contribution(value: tf.Tensor, step: Step, rank: int) -> tf.Tensor:
    if tuple(value.shape) == NO_LOSSES:
        return tf.zeros([], value.dtype)
    if reported_standing(step, rank, value, "the step returned") is Standing.SHARE:
        own = step.own_part(rank, value)
        if not step.is_local:
            return own
        return own * tf.cast(step.share_of_group(rank), own.dtype)
    warn_about_returned(step, rank, value)
    if value.dtype.is_integer:
        value = tf.cast(value, tf.float64)  # exact for integers equal on all replicas
        share = step.share_of(rank, tf.float64)
    else:
        share = tf.cast(step.share_of(rank), value.dtype)
    return tf.where(share > 0, value * share, tf.zeros_like(value))


@dataclasses.dataclass(frozen=True)
class Derivation:
    """How a number of a graph derives from results of metrics (perplexity, F1, sums),
    by `operations`, constants included.

    The mean of such numbers over replicas is not one device's number, so the ops
    between results and number are repeated with the results over all replicas.
    """

    value: tf.Tensor
    results: tuple[tf.Tensor, ...]
    operations: tuple[tf.Operation, ...]

    def of(self, results: Sequence[tf.Tensor]) -> tf.Tensor:
        """The number for other `results`, in the same order."""
        if not self.operations:
            return results[0]  # it is a result
        graph_def = tf.compat.v1.GraphDef()
        # Without it ops get the semantics of TensorFlow's first version.
        graph_def.versions.producer = tf.version.GRAPH_DEF_VERSION
        for operation in self.operations:
            node = graph_def.node.add()
            node.CopyFrom(operation.node_def)
            # Device, colocation and control inputs are those of one replica.
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


class DerivedReport:
    """A number that depends on results and on something else, such as a loss."""


def derivation_of(
    value: tf.Tensor, is_result: Callable[[tf.Tensor], bool]
) -> Derivation | DerivedReport | None:
    """How `value` derives from results of metrics; None: it does not, or unknown."""
    if not is_of_graph(value):
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
        is_of_results_alone = is_of_results_alone and _is_repeatable(operation)
    if not results:
        return None
    if not is_of_results_alone:
        return DerivedReport()
    return Derivation(value, tuple(results.values()), tuple(operations.values()))


def _is_repeatable(operation: tf.Operation) -> bool:
    """Whether it is a pure function of its inputs."""
    if is_constant(operation):
        return True
    attributes = operation.node_def.attr.values()
    calls = any(attribute.HasField("func") for attribute in attributes)
    return bool(operation.inputs) and not operation.op_def.is_stateful and not calls
