"""Finds where a number that is not finite came from, by recomputing the batch.

The step of a skipped batch runs again, in a graph of its own, with the current weights,
which are those from before that step. It examines, in order of computation: weights and
the optimizer's state, the batch, the outputs of layers (innermost first), the result of
`compute_loss`, and gradients before they are summed over the replicas. Nothing is
updated, and what the step stores is restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.keras_models import layers_within
from tfdp._private.names import current_rank
from tfdp._private.optimizer_hooks import variables_built_with
from tfdp.errors import LocalMeanWarning, LocalStateWarning
from tfdp.exchange.sparse import values_of
from tfdp.seams.replace import instance_attributes, replace
from tfdp.step.find_optimizers import optimizers_of
from tfdp.step.local_step import LocalLook
from tfdp.variables.local_view import copies_of

# The numbers of nothing.
NONE = np.zeros([0, 4], np.int64)


@dataclasses.dataclass(frozen=True)
class NotFinite:
    """Something that is not finite on one replica, by its global rank.

    `kind` is "weight", "input", "layer", "loss" or "gradient", or "unknown" when the
    batch could not be recomputed; `name` that of the variable, the part of the batch or
    the layer, or the reason of an "unknown". `row` is the first such row of this
    replica's part of the batch; None: it has no rows.
    """

    rank: int
    kind: str
    name: str
    nans: int = 0
    infinities: int = 0
    numbers: int = 0
    row: int | None = None


def find_not_finite(
    model: keras.Model, batches: Sequence[Any] | None, first_rank: int
) -> list[NotFinite]:
    """Finds what is not finite on each replica, in the order of computation: the first
    layer, and all gradients.

    Args:
      model: the model of the step.
      batches: each replica's arguments of the step, (args, kwargs), None for a replica
        that skipped nothing; None: they were not kept.
      first_rank: that of this process's first replica.
    """
    findings = weights_not_finite(model, first_rank)
    if findings:
        return findings
    if batches is None:
        reason = "its batch was padded to a fixed size (pad_batches)"
        return [NotFinite(first_rank, "unknown", reason)]
    strategy = model.distribute_strategy
    ranks = range(len(strategy.extended.worker_devices))
    looks = [_Look(first_rank + rank) for rank in ranks]
    bad = [one for one in zip(looks, batches, strict=True) if one[1] is not None]
    if not bad:
        return [NotFinite(first_rank, "unknown", "no replica has kept its batch")]
    for look, (args, _) in bad:
        for name, part in _named_parts(args):
            look.at("input", name, part, has_rows=True)
    # The step runs on all replicas; results of the others are ignored.
    given = [bad[0][1] if batch is None else batch for batch in batches]
    try:
        with _as_it_was(model), _examining(model, looks):
            _run_again(model, strategy, given, looks)
    except Exception as error:  # a custom step may raise anything
        # Keras' messages start with the location, then the error.
        lines = [line for line in str(error).splitlines() if line.strip()][:2]
        words = f"{type(error).__name__}: {' '.join(lines)}"
        bad[0][0].findings.append(NotFinite(bad[0][0].rank, "unknown", words))
    return [finding for look, _ in bad for finding in look.findings]


def weights_not_finite(model: keras.Model, first_rank: int) -> list[NotFinite]:
    """The weights, and the optimizer's state, that are not finite on some replica."""
    looks = []
    for rank in range(len(model.distribute_strategy.extended.worker_devices)):
        look = _Look(first_rank + rank)
        for name, copy in state_of_replica(model, rank):
            look.at("weight", name, copy.read_value())
        looks += look.findings
    return looks


def state_of_replica(
    model: keras.Model, rank: int
) -> Iterator[tuple[str, tf.Variable]]:
    """Weights and the optimizer's state in the copies of a replica of this process."""
    states = [owner.variables for owner in optimizers_of(model)]
    for variable in itertools.chain(model.weights, *states):
        stored, local = copies_of(variable.value)
        if stored:
            yield variable.path, (local or stored)[rank]


class _Look:
    """The findings of one replica, by its global rank."""

    def __init__(self, rank: int):
        self.rank = rank
        self.findings: list[NotFinite] = []
        #: The replica's graph, and what it examines: kind and name, and its numbers.
        self.graph: tf.Graph | None = None
        self._examined: list[tuple[str, str]] = []
        self._numbers: list[tf.Tensor] = []

    def at(self, kind: str, name: str, value: Any, *, has_rows: bool = False) -> None:
        """Examines a tensor, outside of graphs."""
        numbers = _numbers_of(value, has_rows=has_rows)
        if numbers is not None:
            self._add(kind, name, numbers.numpy())

    def examine(
        self, kind: str, name: str, value: Any, *, has_rows: bool = False
    ) -> None:
        """Examines a tensor of the graph that is being built, when it runs."""
        if tf.compat.v1.get_default_graph() is not self.graph:
            return  # a loop, a branch, or a function that the model compiles itself
        numbers = _numbers_of(value, has_rows=has_rows)
        if numbers is not None:
            self._examined.append((kind, name))
            self._numbers.append(numbers)

    def numbers(self) -> tf.Tensor:
        """The numbers of all that the graph examines."""
        return tf.stack(self._numbers) if self._numbers else tf.constant(NONE)

    def note(self, numbers: np.ndarray) -> None:
        """Adds what a run of the graph has found: of all layers the first."""
        for (kind, name), found in zip(self._examined, numbers, strict=True):
            if kind != "layer" or not any(one.kind == kind for one in self.findings):
                self._add(kind, name, found)

    def _add(self, kind: str, name: str, numbers: np.ndarray) -> None:
        nans, infinities, size, row = map(int, numbers)
        if nans or infinities:
            at_row = None if row < 0 else row
            found = NotFinite(self.rank, kind, name, nans, infinities, size, at_row)
            self.findings.append(found)


def _numbers_of(value: Any, *, has_rows: bool) -> tf.Tensor | None:
    """NaNs, infinities, all numbers, and the first row with one, or -1; None: none."""
    parts = values_of(value)
    if isinstance(parts, tf.RaggedTensor):
        parts = parts.flat_values
    elif isinstance(parts, tf.SparseTensor):
        parts = parts.values
    value, has_rows = parts, has_rows and parts is value
    if not tf.is_tensor(value) or not value.dtype.is_floating:
        return None
    row = tf.constant(-1, tf.int64)
    if has_rows and value.shape.rank:
        row = tf.reduce_min(tf.where(~tf.math.is_finite(value))[:, 0])
    nans = tf.math.count_nonzero(tf.math.is_nan(value))
    infinities = tf.math.count_nonzero(tf.math.is_inf(value))
    return tf.stack([nans, infinities, tf.size(value, tf.int64), row])


def _examining_methods(optimizer: Any, looks: Sequence[_Look]) -> dict[str, Callable]:
    """Method overrides for an optimizer: examine gradients, update nothing."""

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        look = looks[current_rank()]
        variables = trainable_variables or variables_built_with(optimizer)
        for gradient, variable in zip(grads, variables, strict=False):
            if gradient is not None:
                look.examine("gradient", variable.path, gradient)

    def apply_gradients(grads_and_vars: Any, **more: Any) -> None:
        apply(*zip(*grads_and_vars, strict=True))

    return {"apply": apply, "apply_gradients": apply_gradients}


def _run_again(
    model: keras.Model, strategy: Any, batches: Sequence[Any], looks: Sequence[_Look]
) -> None:
    owned = optimizers_of(model)
    # Including those that a model holds in an object of its own.
    every = strategy.extended.made_optimizers.together_with(owned)
    examining = [(o, _examining_methods(o, looks)) for o in every]
    structure, first_rank = batches[0], looks[0].rank
    flat = [tf.nest.flatten(batch, expand_composites=True) for batch in batches]

    def distributed(column: Sequence[tf.Tensor]) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: column[context.replica_id_in_sync_group - first_rank]
        )

    def again(parts: list[Any]) -> tf.Tensor:
        for optimizer, methods in examining:
            # On top of this step's overrides, with which they are removed.
            for name, method in methods.items():
                replace(optimizer, name, method)
        arguments = tf.nest.pack_sequence_as(structure, parts, expand_composites=True)
        args, kwargs = arguments
        look = looks[current_rank()]
        look.graph = tf.compat.v1.get_default_graph()
        model.train_step(*args, **kwargs)
        return look.numbers()

    with contextlib.ExitStack() as stack:
        for optimizer, methods in examining:
            stack.enter_context(instance_attributes(optimizer, methods))
        is_local = any(getattr(o, "sync", None) is not None for o in owned)
        values = [distributed(column) for column in zip(*flat, strict=True)]
        # What the step itself would warn of, it has.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", LocalMeanWarning)
        warnings.simplefilter("ignore", LocalStateWarning)
        found = strategy.run(LocalLook(again) if is_local else again, args=(values,))
    results = strategy.experimental_local_results(found)
    for look, numbers in zip(looks, results, strict=True):
        look.note(numbers.numpy())


def _named_parts(args: Any) -> Iterator[tuple[str, Any]]:
    if len(args) != 1:
        parts = {f"argument {place}": part for place, part in enumerate(args)}
    else:
        names = ("x", "y", "sample_weight")
        given = keras.utils.unpack_x_y_sample_weight(*args)
        parts = dict(zip(names, given, strict=True))
    for name, part in parts.items():
        for path, leaf in keras.tree.flatten_with_path(part):
            where = "".join(f"[{key!r}]" for key in path)
            if leaf is not None:
                yield name + where, leaf


@contextlib.contextmanager
def _examining(model: keras.Model, looks: Sequence[_Look]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for layer in layers_within(model):
            if layer is not model:
                call = {"call": _examined(layer.call, layer, looks)}
                stack.enter_context(instance_attributes(layer, call))
        compute = model.compute_loss

        @functools.wraps(compute)
        def examined_loss(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            if loss is not None:
                look, value = looks[current_rank()], tf.convert_to_tensor(loss)
                look.examine("loss", "the loss", value)
            return loss

        of_model = {"compute_loss": examined_loss}
        stack.enter_context(instance_attributes(model, of_model))
        yield


def _examined(call: Callable, layer: Any, looks: Sequence[_Look]) -> Callable:
    @functools.wraps(call)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        for output in tf.nest.flatten(outputs):
            looks[current_rank()].examine("layer", layer.path, output, has_rows=True)
        return outputs

    return looked_at


@contextlib.contextmanager
def _as_it_was(model: keras.Model) -> Iterator[None]:
    """Restores on exit what a step stores, averages of weights included."""
    copies: list[tf.Variable] = []
    for variable in [*model.variables, *model.metrics_variables]:
        copies += itertools.chain(*copies_of(variable.value))
    before = [copy.read_value() for copy in copies]
    try:
        yield
    finally:
        for copy, value in zip(copies, before, strict=True):
            copy.assign(value)
