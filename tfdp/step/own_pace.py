"""Training of `sync.Asynchronous`: hosts push gradients, and owners update weights.

In a step a host sums its replicas' gradients, clips them, pushes each owner its part
(`PushLink`), and stores the weights that come back in its local values. Where hosts
meet they join the owners' parts to the outer values.
"""

from __future__ import annotations

import collections
import functools
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.names import own_copy
from tfdp._private.optimizer_hooks import CLIP, by_keras, variable_index
from tfdp.chain.reduction import Reduction
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.exchange.sparse import with_values
from tfdp.hosts.connect import job_secret
from tfdp.hosts.messages import checked_integer, parse_object, read_as
from tfdp.hosts.pushes import MOST_COUNT, SAVE, IndexedRows, Layouts, PushLink
from tfdp.step.find_optimizers import optimizers_of
from tfdp.step.local_training import LocalTraining
from tfdp.step.local_values import LocalValues
from tfdp.step.loop_ends import call_at_loops
from tfdp.step.owned_parts import OwnedParts
from tfdp.sync.asynchronous import Asynchronous
from tfdp.tracing.step import Step
from tfdp.variables.local_view import LocalView


class OwnPace(LocalTraining):
    """The training of the weights of one optimizer, on this host.

    Args:
      variables: those that the optimizer updates.
    """

    def __init__(
        self,
        sync: Asynchronous,
        strategy: tf.distribute.Strategy,
        variables: Sequence[Any],
        *,
        group_size: int,
        optimizer: Optimizer,
    ):
        super().__init__(strategy, group_size, optimizer)
        self.sync = sync
        self.values: WatchedValues = WatchedValues(strategy.extended.worker_devices)
        self._inner = optimizer.inner_optimizer
        self._transport = self._reducer.transport
        self._link, self._cluster = strategy.link, strategy.cluster
        self._variables = list(variables)
        self._weights: list[LocalView] = [one.value for one in self._variables]
        for weight in self._weights:
            self.values.make(weight)
        shapes = [tuple(weight.shape) for weight in self._weights]
        self._layouts = Layouts(shapes, self._link.workers)
        self._owner: OwnedParts | None = None
        self._pushes: PushLink | None = None
        self._is_open = False
        #: The rows of this host since hosts met.
        self._rows = 0.0
        #: State of layers that counts, such as that of random numbers.
        self._counters: list[LocalView] = []
        #: By staleness, the updates of all owners up to the last meeting.
        self.staleness: dict[int, int] = {}
        #: Saves where another host wants to, and is called while this one waits.
        self.save: Callable[[], None] = lambda: None
        self.poll: Callable[[], None] = lambda: None
        #: By replica, while a step is traced: the version, and the weights.
        self._pulled: dict[int, list[tf.Tensor]] = {}
        call_at_loops(self)

    def keep_layer_state(self, variables: Sequence[Any]) -> None:
        super().keep_layer_state(variables)
        known = set(map(id, self._counters))
        self._counters += [
            one
            for one in variables
            if isinstance(one, LocalView)
            and one.dtype.is_integer
            and id(one) not in known
        ]

    def before_step(self, step: Step) -> None:
        if step.guard is not None or step.stages:
            raise ConfigurationError(
                "sync=Asynchronous() does not go with callbacks that look into sums of "
                "gradients (NaNGuard, GradientNoiseScale, AdaScale, Stragglers): no "
                "step has such a sum. Leave them out, or sync."
            )
        self._refuse_outside_of_fit()
        super().before_step(step)

    def _refuse_outside_of_fit(self) -> None:
        if not self._is_open:
            raise ConfigurationError(
                "sync=Asynchronous() trains in model.fit, and this step is outside of "
                "it (train_on_batch, or an optimizer built in a step): hosts meet "
                "where an epoch ends. Call model.fit, or leave out sync."
            )

    def reduced(self, own: Reduction, weight: tf.Tensor | None) -> list[Any]:
        """Pushes the mean gradient of this host's batch, and pulls the weights."""
        rank, gradients = own.rank, own.gradients
        self._refuse_second_update(own.step, rank, "push")
        self.synchronize_layer_state(own.step, rank)
        places = [variable_index(self._optimizer, one) for one in own.variables]
        types = [variable.value.dtype for variable in own.variables]
        rate = tf.convert_to_tensor(self._inner.learning_rate)
        numbers = [tf.cast(rate, tf.float32), own.step.total_together(rank)]
        # TensorFlow keeps functions of its graphs: this training may end before.
        push, are_rows = weakref.WeakMethod(self._push), list(map(_is_rows, gradients))
        self._pulled[rank] = self._transport.late.call_with(
            lambda *arrays: push()(places, are_rows, *arrays),  # type: ignore[misc]
            numbers,
            [_cast(g, dtype) for g, dtype in zip(gradients, types, strict=True)],
            by_keras(self._inner, CLIP),
            [tf.TensorSpec([], tf.int64)]
            + [tf.TensorSpec(weight.shape, weight.dtype) for weight in self._weights],
            rank,
        )
        return gradients

    def _push(
        self,
        places: Sequence[int],
        are_rows: Sequence[bool],
        rate: np.ndarray,
        rows: np.ndarray,
        *arrays: np.ndarray,
    ) -> list[np.ndarray]:
        """Pushes a step's gradients to their owners, on the first replica's thread."""
        self._refuse_outside_of_fit()
        if self.values.were_assigned:
            raise ConfigurationError(
                "Weights were assigned, or restored, within an epoch of a training "
                "with sync=Asynchronous(), in which their owners have newer ones. Do "
                "it before fit, or at the end of an epoch."
            )
        if not np.isfinite(rate):
            raise ConfigurationError(f"The learning rate must be finite, not {rate}.")
        values = iter(arrays)
        gradients: dict[int, np.ndarray | IndexedRows] = {}
        for place, of_rows in zip(places, are_rows, strict=True):
            value = next(values)
            gradients[place] = _in_order(value, next(values)) if of_rows else value
        self._rows += float(rows)
        # Without rows the gradient is none: a push of it would count as an update.
        given = gradients if rows > 0 else {}
        weights = self._pushes.push(float(rate), given)  # type: ignore[union-attr]
        version = self._owner.version  # type: ignore[union-attr]
        return [np.array(version, np.int64), *weights]

    def around(self, reduction: Reduction, update: Callable[[], Any]) -> None:
        """Stores what came back in the place of the update."""
        rank = reduction.rank
        version, *weights = self._pulled.pop(rank)
        for variable, value in zip(self._weights, weights, strict=True):
            variable.local_copy(rank).assign(value)
        iterations = own_copy(self._inner.iterations.value, rank)
        iterations.assign(tf.cast(version, iterations.dtype))

    # Where hosts meet.

    def begin_epoch(self, model: Any) -> None:
        """Makes owners take their parts of the outer values, on all hosts."""
        if not any(one is self._optimizer for one in optimizers_of(model)):
            return
        if self._pushes is None:
            self._connect()
        self._owner.load()  # type: ignore[union-attr]
        self._rows, self.values.were_assigned, self._is_open = 0.0, False, True
        self._pushes.begin()  # type: ignore[union-attr]

    def _connect(self) -> None:
        rank, label = self._link.rank, f"pushes of {self._optimizer.name}"
        self._owner = OwnedParts(self._inner, self._variables, self._layouts, rank)
        self._pushes = PushLink(
            self._link,
            job_secret(self._cluster),
            self._owner,
            self._layouts,
            [weight.dtype.as_numpy_dtype for weight in self._weights],
            label,
            [variable.path for variable in self._variables],
        )
        weakref.finalize(self, self._pushes.close)

    def end_epoch(self) -> None:
        if self._is_open:
            self._meet("end of an epoch")
            self._is_open = False

    def make_equal_to_save(self) -> None:
        """`make_equal` for a save, which hosts at the end of their epoch join."""
        self.make_equal(SAVE)

    def make_equal(self, where: str = "look at the weights within an epoch") -> None:
        if self._is_open:
            self._meet(where)
            self._pushes.begin()  # type: ignore[union-attr]

    def _meet(self, where: str) -> None:
        """Waits for all hosts, and gives them the same state."""
        while self._pushes.meet(where, self.poll):  # type: ignore[union-attr]
            self._share_state()
            self._pushes.begin()  # type: ignore[union-attr]
            self.save()
        self._share_state()

    def _share_state(self) -> None:
        owner = self._owner
        told = self._gather_numbers()
        versions = [one["version"] for one in told]
        if len(set(versions)) > 1:
            raise CollectiveError(
                f"Owners have made different numbers of updates: {versions}. Give all "
                "workers the same model and the same version of tfdp."
            )
        counts: collections.Counter[int] = collections.Counter()
        for one in told:
            counts.update(one["staleness"])
        self.staleness = dict(sorted(counts.items()))
        owner.give_back(self._joined, told[0]["numbers"])  # type: ignore[union-attr]
        self._average_layer_state([one["rows"] for one in told])
        for place, counter in enumerate(self._counters):
            counter.assign(np.max([one["counters"][place] for one in told], axis=0))
        self._rows, self.values.were_assigned = 0.0, False

    def _gather_numbers(self) -> list[dict[str, Any]]:
        owner: Any = self._owner
        counters = [one.numpy().tolist() for one in self._counters]
        own = {
            "version": owner.version,
            "staleness": sorted(owner.staleness.items()),
            "numbers": owner.numbers(),
            "rows": self._rows,
            "counters": counters,
        }
        read = functools.partial(_parsed, own)
        blobs = self._link.gather(json.dumps(own).encode(), "numbers of owners")
        what = "numbers of owners"
        return [read_as(read, blob, rank, what) for rank, blob in enumerate(blobs)]

    def _joined(self, part: np.ndarray, layout: Any) -> np.ndarray:
        ranges = [list(map(layout.bounds, range(layout.parts)))]
        label = f"parts of {layout.elements} elements"
        return self._link.all_gather([part], ranges, label, "host")[0]

    def _average_layer_state(self, rows: Sequence[float]) -> None:
        """The mean of all hosts' moving statistics, by their rows since they met."""
        total = sum(rows)
        if not total:
            return
        share = rows[self._link.rank] / total
        for variable in self._layer_state:
            own = variable.local_copy(0).numpy().astype("float64") * share
            (mean,) = self._link.sum([own], "state of layers", "host")
            variable.assign(tf.cast(mean, variable.dtype))


class WatchedValues(LocalValues):
    """Notes whether outer values were assigned."""

    were_assigned = False

    def note_change(self, rank: int | None = None) -> None:
        self.were_assigned = True
        super().note_change(rank)


def _is_rows(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _cast(gradient: Any, dtype: tf.DType) -> Any:
    return with_values(gradient, lambda v: tf.cast(tf.convert_to_tensor(v), dtype))


def _in_order(values: np.ndarray, indices: np.ndarray) -> IndexedRows:
    """Rows of different indices in ascending order."""
    order = np.argsort(indices, kind="stable")
    flat = values.reshape(len(values), -1)
    return IndexedRows(indices[order].astype(np.int64), flat[order])


def _parsed(own: dict[str, Any], blob: bytes | memoryview) -> dict[str, Any]:
    """The numbers of another host, of the shape of this one's."""
    message = parse_object(bytes(blob))
    pairs = [(_count(value), _count(times)) for value, times in message["staleness"]]
    counters = [np.array(one, np.int64) for one in message["counters"]]
    like = [np.shape(one) for one in own["counters"]]
    if [one.shape for one in counters] != like:
        raise ValueError("other counters")
    numbers = [float(one) for one in message["numbers"]]
    rows = float(message["rows"])
    if len(numbers) != len(own["numbers"]) or not 0 <= rows < float("inf"):
        raise ValueError("other numbers")
    return {
        "version": _count(message["version"]),
        "staleness": dict(pairs),
        "numbers": numbers,
        "rows": rows,
        "counters": counters,
    }


def _count(value: Any) -> int:
    return checked_integer(value, 0, MOST_COUNT)
