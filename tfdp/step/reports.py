"""What a model reports: one device's numbers, from what each replica knows.

Keras averages what the replicas' steps return, and its running means count what each
replica brings once, whatever its rows. With n_r of the n rows on replica r:

    a share of the loss (`loss_shares`)     the sum over the replicas
    numbers of the replica's own rows       the sum of n_r / n times them
    a metric's result                       taken anew from the sums of its state

A replica without a row brings nothing, not the mean of nothing, which is no number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.frames import number_counted_by_mean
from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.keras_models import metrics_of_layers, metrics_within, own_values
from tfdp._private.names import DistributedVariable, current_rank
from tfdp.step.local_run import SumOverHosts, summed_over_hosts
from tfdp.tracing.assigned_terms import as_tensors
from tfdp.tracing.loss_shares import Standing, key_of
from tfdp.tracing.loss_suspicions import reported_standing
from tfdp.tracing.row_means import of_values, rows_of, suspect_number, suspect_returned
from tfdp.tracing.run import ReplicaRun, current_run, trace_of

# The shape of a Keras loss of an empty replica in eager mode: it takes no mean.
NO_LOSSES = (0,)


class NotedResults:
    """Which tensors of which replica are the result of which metric."""

    def __init__(self) -> None:
        self._by_key: dict[Any, tuple[tf.Tensor, Any, str | None]] = {}

    def note(self, result: Any, metric: Any) -> None:
        """Notes that `result`, a tensor or a dictionary of them, is of `metric`."""
        parts = result if isinstance(result, dict) else {None: result}
        for name, value in parts.items():
            if tf.is_tensor(value):
                # The tensor is kept, so that its key stays its own.
                self._by_key[key_of(value)] = value, metric, name

    def find(self, value: tf.Tensor) -> tuple[Any, str | None] | None:
        """The metric, and the name of the part, that `value` is the result of."""
        found = self._by_key.get(key_of(value))
        return None if found is None else found[1:]


@contextlib.contextmanager
def overridden_reports(
    model: Any, run: ReplicaRun, made_metrics: Sequence[keras.metrics.Metric]
) -> Iterator[NotedResults]:
    """While this lasts, the means that `model` reports take in the replicas' shares.

    Args:
      model: whose step runs.
      made_metrics: its step may use them, whether the model lists them or not.
    """
    noted = NotedResults()
    with contextlib.ExitStack() as stack:
        if isinstance(model, keras.Model) and run.replicas > 1:
            metrics = _metrics_of(model, made_metrics)
            for metric in {id(one): one for one in metrics}.values():
                if type(metric).__module__.startswith("keras."):
                    # What Keras' own count adds up, and numbers that they are given
                    # are looked at where they are given.
                    own = metric.variables
                    run.numbers_told.update(id(variable.value) for variable in own)
                led = {"result": functools.partial(_result, metric, noted)}
                update = _UPDATES.get(type(metric).update_state)
                if update is not None:
                    led["update_state"] = functools.partial(update, metric, run)
                elif isinstance(metric, keras.metrics.Mean):
                    stack.enter_context(_numbers_by_rows(metric, run))
                stack.enter_context(instance_attributes(metric, led))
        yield noted


def recorded(step: Callable, run: ReplicaRun) -> Callable:
    """`step`, for eager mode: what it makes of its losses' factors is recorded."""

    @functools.wraps(step)
    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        shares = run.shares[trace_of(current_rank())]
        with shares.recording():
            return step(*args, **kwargs)

    return recorded_step


def _metrics_of(
    model: keras.Model, made_metrics: Sequence[keras.metrics.Metric]
) -> Iterator[keras.metrics.Metric]:
    # Before it is compiled a model's list of metrics may fail.
    if not getattr(model, "compiled", False):
        return
    yield from made_metrics
    # Also what a property `metrics` of a program's own leaves out.
    for metric in [*model.metrics, *metrics_of_layers(model)]:
        inner = getattr(metric, "metrics", None)  # those given to `compile`
        for one in [metric] if inner is None else inner:
            yield from metrics_within(one)


def _result(metric: Any, noted: NotedResults) -> Any:
    result = type(metric).result(metric)
    # Some return the variable in which they count.
    result = tf.nest.map_structure(
        lambda part: (
            tf.convert_to_tensor(part) if isinstance(part, keras.Variable) else part
        ),
        result,
    )
    noted.note(result, metric)
    return result


def _update_mean(
    metric: Any, run: ReplicaRun, values: Any, sample_weight: Any = None
) -> Any:
    """`keras.metrics.Mean.update_state` of one replica, as its part of one device's."""
    update = keras.metrics.Mean.update_state.__get__(metric)
    if current_run() is None:  # perhaps another thread, while this one traces
        return update(values, sample_weight=sample_weight)
    rank = current_rank()
    (number,) = as_tensors([values])  # a learning rate is a variable
    number = number if tf.is_tensor(number) else tf.convert_to_tensor(number)
    value = tf.cast(number, metric.dtype)
    if value.shape.rank is None:
        return update(values, sample_weight=sample_weight)
    is_number = not value.shape.rank
    if sample_weight is None and _has_no_rows(value, run, rank):
        value = number = tf.reduce_mean(value)
        is_number = True
    if not is_number and (sample_weight is None or _rank_of(sample_weight)):
        return update(values, sample_weight=sample_weight)  # row by row
    if is_number:
        value = _without_share(metric, run, rank, number, value)
    else:
        size = tf.cast(tf.size(value), value.dtype)
        value = tf.math.divide_no_nan(tf.reduce_sum(value), size)
    share = tf.cast(run.share_of(rank), value.dtype)
    if sample_weight is None:
        sample_weight = share
    value = tf.where(share > 0, value, tf.zeros_like(value))
    return update(value, sample_weight=sample_weight)


def _has_no_rows(value: tf.Tensor, run: ReplicaRun, rank: Any) -> bool:
    """Whether `value` surely has an entry for something else than the batch's rows.

    Its length is known then, where that of the batch is not: parts may be uneven.
    """
    batch = [one for one in run.batches.get(trace_of(rank), ()) if one.shape.rank]
    is_known = bool(value.shape.rank) and value.shape[0] is not None
    return is_known and bool(batch) and all(one.shape[0] is None for one in batch)


def _without_share(
    metric: Any, run: ReplicaRun, rank: Any, number: Any, value: tf.Tensor
) -> tf.Tensor:
    """`value`, which is `number`, as a mean over the replica's own rows."""
    who = f"the metric {metric.name!r} was given"
    standing = reported_standing(run, rank, number, who)
    if standing is Standing.LOCAL:
        suspect_number(run, rank, metric, value, rows_of(run, rank), near=False)
    if standing is not Standing.SHARE:
        return value
    in_group = tf.cast(run.share_in_group(rank), value.dtype)
    return tf.math.divide_no_nan(value, in_group)


@contextlib.contextmanager
def _numbers_by_rows(metric: keras.metrics.Mean, run: ReplicaRun) -> Iterator[None]:
    """While this lasts, a number that `metric` hands on to Keras' mean counts by rows.

    A class of a program's own calls `Mean.update_state` by the class, so that it is led
    where it adds to what it counts in.
    """

    def add_to_total(value: Any, *args: Any, **options: Any) -> Any:
        number = number_counted_by_mean()
        if number is not None and current_run() is not None:
            rank = current_rank()
            share = tf.cast(run.share_of(rank), value.dtype)
            value = _without_share(metric, run, rank, number, value)
            value = tf.where(share > 0, value * share, tf.zeros_like(value))
        return type(metric.total).assign_add(metric.total, value, *args, **options)

    def add_to_count(value: Any, *args: Any, **options: Any) -> Any:
        number = number_counted_by_mean()
        if number is not None and current_run() is not None:
            value = tf.cast(run.share_of(current_rank()), number.dtype)
        return type(metric.count).assign_add(metric.count, value, *args, **options)

    with (
        instance_attributes(metric.total, {"assign_add": add_to_total}),
        instance_attributes(metric.count, {"assign_add": add_to_count}),
    ):
        yield


def _update_wrapped(
    metric: Any, run: ReplicaRun, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """`MeanMetricWrapper.update_state`: a number of all rows counts by its rows."""
    values = None
    if sample_weight is None and current_run() is not None:
        values = own_values(metric, y_true, y_pred)
    if values is not None:
        if not values.shape.rank:
            near = {key_of(one) for one in (y_true, y_pred) if tf.is_tensor(one)}
            rows = of_values(near)
            suspect_number(run, current_rank(), metric, values, rows, near=True)
        return _update_mean(metric, run, values)
    update = keras.metrics.MeanMetricWrapper.update_state.__get__(metric)
    return update(y_true, y_pred, sample_weight)


# By Keras' own, so that a class of a program's own is left as it is.
_UPDATES: dict[Any, Callable[..., Any]] = {
    keras.metrics.Mean.update_state: _update_mean,
    keras.metrics.MeanMetricWrapper.update_state: _update_wrapped,
}


def _rank_of(weights: Any) -> int | None:
    return tf.convert_to_tensor(weights).shape.rank


def whole_logs(
    logs: Any,
    run: ReplicaRun,
    noted: NotedResults,
    parts_of: Callable[[Any], Sequence[Any]],
    sum_over_hosts: SumOverHosts | None,
) -> Any:
    """What a step returned on each replica, as one device would have returned it.

    Args:
      logs: nested per-replica values, in cross-replica context.
      run: the run that they are of, and `noted` the results of metrics in it.
      parts_of: the values of this host's replicas.
      sum_over_hosts: adds a vector up; None: there is one host.

    Returns:
      The same structure with plain numbers, but for what is no number.
    """
    leaves = [_read(leaf) for leaf in tf.nest.flatten(logs)]
    sums: dict[Any, tf.Tensor] = {}
    types: dict[int, tf.DType] = {}
    derived: dict[int, Derivation] = {}
    for place, leaf in enumerate(leaves):
        # A step may return a variable: each replica's is what it holds by now.
        parts = [_read(part) for part in parts_of(leaf)]
        derivation = _derivation(parts, run, noted)
        if derivation is not None:
            derived[place] = derivation
            for result in derivation.results:
                for variable in noted.find(result)[0].variables:  # type: ignore[index]
                    if id(variable) not in sums:
                        sums[id(variable)] = _sum(_copies(variable))
        elif _are_numbers(parts, run):
            sums[place] = _sum([_bring(part, run, r) for r, part in enumerate(parts)])
            types[place] = parts[0].dtype
    if sum_over_hosts is not None:
        sums = summed_over_hosts(sums, sum_over_hosts)
    for place in range(len(leaves)):
        if place in sums:
            leaves[place] = _of_type(sums[place], types[place])
        elif place in derived:
            results = derived[place].results
            wholes = [_whole_result(result, sums, noted) for result in results]
            leaves[place] = derived[place].of(wholes)
    return tf.nest.pack_sequence_as(logs, leaves)


def _read(value: Any) -> Any:
    """What a variable holds; a step may return a learning rate, or a counter."""
    if isinstance(value, keras.Variable):
        return tf.convert_to_tensor(value.value)
    is_variable = isinstance(value, tf.Variable)
    is_of_replicas = isinstance(value, tf.distribute.DistributedValues)
    return value.read_value() if is_variable and not is_of_replicas else value


def _derivation(
    parts: Sequence[Any], run: ReplicaRun, noted: NotedResults
) -> Derivation | None:
    """How what a step returned comes from results of metrics alone."""

    def is_result(tensor: tf.Tensor) -> bool:
        found = noted.find(tensor)
        return found is not None and all(map(_is_summed, found[0].variables))

    if not tf.is_tensor(parts[0]):
        return None
    if is_result(parts[0]):  # in eager mode, too, where nothing is told of the others
        return Derivation(parts[0], (parts[0],), ())
    derivation = derivation_of(parts[0], is_result)
    if isinstance(derivation, DerivedReport):
        run.suspicions.add(
            "a number is returned that was made of a metric's result and of something "
            "else. Each replica's is made of its own, and their mean is reported: "
            "return the two by themselves"
        )
        return None
    return derivation


def _whole_result(
    result: tf.Tensor, sums: dict[Any, tf.Tensor], noted: NotedResults
) -> tf.Tensor:
    """The result over all replicas in the place of one replica's."""
    metric, name = noted.find(result)  # type: ignore[misc]
    whole = metric.stateless_result([sums[id(v)] for v in metric.variables])
    return whole if name is None else whole[name]


def _is_summed(variable: keras.Variable) -> bool:
    value = variable.value
    return (
        isinstance(value, DistributedVariable)
        and value.aggregation == tf.VariableAggregation.SUM
    )


def _copies(variable: keras.Variable) -> list[tf.Tensor]:
    return [copy.read_value() for copy in variable.value.values]


def _are_numbers(parts: Sequence[Any], run: ReplicaRun) -> bool:
    # One value for all replicas is nobody's own.
    is_own = len(parts) == (run.replicas if run.counts is None else len(run.counts))
    if not is_own or not all(isinstance(p, tf.Tensor) for p in parts):
        return False
    if not all(p.dtype.is_floating or p.dtype.is_integer for p in parts):
        return False
    ranks = {p.shape.rank for p in parts if tuple(p.shape) != NO_LOSSES}
    has_none = any(tuple(p.shape) == NO_LOSSES for p in parts)
    # Keras leaves single losses of rows out only where it makes a number of them.
    return len(ranks) == 1 and None not in ranks and (ranks == {0} or not has_none)


def _bring(value: tf.Tensor, run: ReplicaRun, rank: int) -> tf.Tensor:
    """What a replica's number adds to the number of the whole batch."""
    if tuple(value.shape) == NO_LOSSES:
        return tf.zeros([], value.dtype)
    if reported_standing(run, rank, value, "the step returned") is Standing.SHARE:
        own = run.own_part(rank, value)
        return (
            own * tf.cast(run.share_of_group(rank), own.dtype) if run.is_local else own
        )
    suspect_returned(run, rank, value)
    if value.dtype.is_integer:
        value = tf.cast(value, tf.float64)  # so that what all have alike stays whole
        share = run.share_of(rank, tf.float64)
    else:
        share = tf.cast(run.share_of(rank), value.dtype)
    return tf.where(share > 0, value * share, tf.zeros_like(value))


def _of_type(number: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The mean of whole numbers as a whole number, as one device would report it."""
    return tf.cast(tf.round(number), dtype) if dtype.is_integer else number


def _sum(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


# What a step computes from results of metrics: perplexity, F1, a sum of two.
#
# On one device such a number is computed from the results over all rows. A replica has
# its own metrics' results, and a mean of what it computes of them is another number:
# the mean of exponentials is no exponential of a mean. So the operations between the
# results and the number are done once more, with the results over all replicas.


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


class DerivedReport:
    """A number that is made of results and of something else, such as a loss."""


def derivation_of(
    value: tf.Tensor, is_result: Callable[[tf.Tensor], bool]
) -> Derivation | DerivedReport | None:
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
        return DerivedReport()
    return Derivation(value, tuple(results.values()), tuple(operations.values()))


def _can_be_done_again(operation: tf.Operation) -> bool:
    """Whether it gives the same from the same inputs, and needs nothing besides."""
    if operation.type == "Const":
        return True
    calls = any(attribute.HasField("func") for attribute in _attributes(operation))
    return bool(operation.inputs) and not operation.op_def.is_stateful and not calls


def _attributes(operation: tf.Operation) -> Sequence:
    return list(operation.node_def.attr.values())
