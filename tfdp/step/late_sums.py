"""Updates by the gradients of earlier steps: `sync.Delayed`, `sync.BoundedStaleness`.

In the step with number c a host

    begins    the sum over the hosts of W_h g_h, of W_h (the weight of its batch), and
              of the state of its layers, by rows; the learning rate is the first host's
    takes     sums of earlier steps, in their order (`LateQueue.take_due`)
    updates   once by each: g = sum of W_h g_h / sum of W_h, at the learning rate that
              came with it

All hosts take the same sums in the same order, so weights after k updates have the same
bits on all, whenever a program sets the learning rate. Gradients travel without their
loss scale: the sum gets that of its update.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.names import own_copy
from tfdp._private.optimizer_hooks import rate_variable, variable_index
from tfdp.chain.buffers import addend
from tfdp.chain.reduction import Reduction, scale_when_summed
from tfdp.errors import ConfigurationError
from tfdp.exchange.late_exchange import AsyncExchange, SumsAtOnce
from tfdp.hosts.late_queue import LateQueue
from tfdp.hosts.python_calls import counted
from tfdp.step.find_optimizers import innermost_optimizers
from tfdp.step.local_step import LocalLook
from tfdp.step.local_training import LocalTraining
from tfdp.step.loop_ends import call_at_loops
from tfdp.sync.late import LateSums
from tfdp.tracing.step import current_step
from tfdp.variables.local_view import LocalView
from tfdp.variables.own_values import OfRanks

Update = Callable[[list[Any], list[Any]], None]
#: Places of the arrays of a step besides gradients and the state of layers.
WEIGHT, ROWS = -1, -2
#: In a checkpoint, the place of the number of sums.
COUNT = -3
#: The place of the first learning rate; those of others follow downwards.
RATE = -4


class LateUpdates(LocalTraining):
    """The late updates of one optimizer.

    Args:
      variables: those that the optimizer updates.
      update: makes the update by given gradients of these variables.
    """

    def __init__(
        self,
        sync: LateSums,
        strategy: tf.distribute.Strategy,
        variables: Sequence[Any],
        *,
        group_size: int,
        optimizer: Optimizer,
        update: Update,
    ):
        super().__init__(strategy, group_size, optimizer)
        self.sync = sync
        self._strategy, self._update = strategy, update
        self._variables = list(variables)
        self._late: AsyncExchange | SumsAtOnce = self._reducer.transport.late
        if self._late is None:
            self._late = SumsAtOnce(self._reducer)
        self._queue = LateQueue(
            self._late.sums,
            steps=sync.steps,
            takes_early=sync.takes_early,
            most=sync.updates_a_step,
        )
        self._specs: dict[int, tf.TensorSpec] = {}
        self._in_flight = _InFlight(self._queue, sync.steps)
        self.values.stored.on_the_way = [self._in_flight]
        for place, variable in enumerate(self._variables):
            self._add_place(place, variable.shape, _wide(variable.value.dtype))
            variable.value.before_change = self._before_change
        for place in (WEIGHT, ROWS):
            self._add_place(place, (), tf.float32)
        #: By place: the variables of learning rates; a schedule follows the updates.
        self._rates: dict[int, LocalView] = {}
        for leaf in innermost_optimizers(optimizer):
            rate = rate_variable(leaf)
            if isinstance(rate, LocalView):
                self._rates[RATE - len(self._rates)] = rate
        for place, rate in self._rates.items():
            self._add_place(place, (), _wide(rate.dtype))
        #: By replica, while a step is traced: the start of its sum, and its places.
        self._begun: dict[int, tuple[tf.Tensor, list[int]]] = {}
        self._places = list(range(len(self._variables)))
        call_at_loops(self)

    def _add_place(self, place: int, shape: Any, dtype: tf.DType) -> None:
        self._specs[place] = tf.TensorSpec(shape, dtype)
        self._in_flight.add(place, self._specs[place])

    def _make_room_for(self, variable: LocalView) -> None:
        place = self._places_of_state[-1]
        self._add_place(place, variable.shape, _wide(variable.dtype))

    @property
    def _places_of_state(self) -> list[int]:
        first = len(self._variables)
        return list(range(first, first + len(self._layer_state)))

    def reduced(self, own: Reduction, weight: tf.Tensor | None) -> list[Any]:
        """Begins the sum of these gradients; returns them as they are."""
        step, rank = own.step, own.rank
        if step.guard is not None:
            raise ConfigurationError(
                "NaNGuard skips the update of the batch that is not finite, and with "
                f"sync={self.sync!r} that update is made some steps later, by all "
                "hosts. Leave the callback out, or sync."
            )
        self._refuse_second_update(step, rank, "sum of gradients")
        self._take_state(step, rank)
        scale, parts = self._scale(), []
        for gradient in own.gradients:
            part = tf.convert_to_tensor(gradient)
            part = tf.cast(part, _wide(part.dtype))
            if scale is not None:
                part /= tf.cast(scale, part.dtype)
            if weight is not None:
                part *= tf.cast(weight, part.dtype)
            parts.append(part)
        # The sum of a loss that is a sum has the weight 0: it is not divided.
        own_weight = tf.zeros([]) if weight is None else weight / step.group_size
        rows = tf.cast(step.count_of(rank), tf.float32)
        if weight is not None and getattr(self._optimizer, "accumulate_steps", 1) > 1:
            rows = own_weight  # that of all micro-steps
        state = [
            addend(v.local_copy(rank).read_value(), rows) for v in self._layer_state
        ]
        state = [tf.cast(value, _wide(value.dtype)) for value in state]
        places = [variable_index(self._optimizer, one) for one in own.variables]
        self._places = [*places, WEIGHT, ROWS, *self._rates, *self._places_of_state]
        begin = functools.partial(self._begin, tuple(self._places))
        counts = [tf.cast(own_weight, tf.float32), rows]
        sent = [*parts, *counts, *self._rates_to_send(rank), *state]
        self._begun[rank] = self._late.hand_over(begin, sent, rank), places
        return own.gradients

    def _rates_to_send(self, rank: int) -> list[tf.Tensor]:
        """The learning rates, of which the first replica of all hosts sends its own."""
        now = [own_copy(rate, rank).read_value() for rate in self._rates.values()]
        now = [tf.cast(value, _wide(value.dtype)) for value in now]
        is_first = self._strategy.extended.first_rank + rank == 0
        return now if is_first else [tf.zeros_like(value) for value in now]

    def _begin(self, places: Sequence[int], *arrays: np.ndarray) -> None:
        self._in_flight.settle()
        self._queue.begin(places, arrays)

    def around(self, reduction: Reduction, update: Callable[[], Any]) -> None:
        """Makes the updates that are due, by the sums of earlier steps."""
        begun, places = self._begun.pop(reduction.rank)
        count = self._late.decide(self._queue.take_due, begun, reduction.rank)
        at = [i for i, one in enumerate(reduction.gradients) if one is not None]
        most = self.sync.updates_a_step
        self._updates(
            reduction, update, dict(zip(at, places, strict=True)), count, most
        )

    def _updates(
        self,
        reduction: Reduction,
        update: Callable[[], Any],
        places: dict[int, int],
        count: tf.Tensor,
        most: int,
    ) -> None:
        """Calls `update` `count` times; `places`: those of the sums, by gradient."""
        given, rank = list(reduction.gradients), reduction.rank
        for number in range(most):
            once = functools.partial(
                self._update_once, reduction, update, places, number
            )
            tf.cond(count > number, once, lambda: tf.constant(False))
            reduction.gradients[:] = given
        for variable in self._layer_state:
            outer = variable.outer_copy(rank).read_value()
            variable.local_copy(rank).assign(outer)

    def _update_once(
        self,
        reduction: Reduction,
        update: Callable[[], Any],
        places: dict[int, int],
        number: int,
    ) -> tf.Tensor:
        state = self._places_of_state
        wanted = [*places.values(), WEIGHT, ROWS, *self._rates, *state]
        sums = self._taken(number, wanted)
        weight, rows, scale = sums[WEIGHT], sums[ROWS], self._scale()
        for at, place in places.items():
            total = sums[place]
            divisor = tf.where(weight > 0, weight, tf.ones([]))
            mean = total / tf.cast(divisor, total.dtype)
            if scale is not None:
                mean *= tf.cast(scale, mean.dtype)
            reduction.gradients[at] = tf.cast(mean, reduction.variables[at].dtype)
        with self._at_rates(sums, reduction.rank):
            update()
        for variable, place in zip(self._layer_state, state, strict=True):
            total = sums[place]
            mean = tf.math.divide_no_nan(total, tf.cast(rows, total.dtype))
            outer = variable.outer_copy(reduction.rank)
            kept = outer.read_value()
            outer.assign(tf.where(rows > 0, tf.cast(mean, outer.dtype), kept))
        return tf.constant(True)

    @contextlib.contextmanager
    def _at_rates(self, sums: dict[int, tf.Tensor], rank: int) -> Iterator[None]:
        """Sets learning rates to those of the gradients' step within the context."""
        kept = []
        for place, rate in self._rates.items():
            own = own_copy(rate, rank)
            kept.append((own, own.read_value()))
            own.assign(tf.cast(sums[place], own.dtype))
        yield
        for own, value in kept:
            own.assign(value)

    def _taken(self, number: int, places: Sequence[int]) -> dict[int, tf.Tensor]:
        """A sum that was taken; zeros where a step had no such gradient."""
        specs = [self._specs[place] for place in places]
        queue = self._queue

        def arrays() -> list[np.ndarray]:
            sums = queue.taken(number)
            return [
                sums[place]
                if place in sums
                else np.zeros(spec.shape, spec.dtype.as_numpy_dtype)
                for place, spec in zip(places, specs, strict=True)
            ]

        types = [spec.dtype for spec in specs]
        with tf.device("CPU:0"):
            found = tf.numpy_function(counted(arrays), [], types)
        return {
            place: tf.ensure_shape(value, spec.shape)
            for place, value, spec in zip(places, found, specs, strict=True)
        }

    def _scale(self) -> tf.Tensor | None:
        """The loss scale of the gradients that the optimizer gets now; None for 1."""
        scale = scale_when_summed(self._optimizer)
        return None if scale is None else tf.convert_to_tensor(scale)

    def apply_in_flight(self) -> None:
        """Makes all updates that are left, between steps."""
        self._in_flight.settle()
        while len(self._queue):
            self._apply_oldest()

    @functools.cached_property
    def _apply_oldest(self) -> Callable[[], Any]:
        """The graph that makes one update."""
        return tf.function(self._apply_on_replicas).get_concrete_function()

    def _apply_on_replicas(self) -> None:
        def update_on_replica() -> None:
            step, rank = current_step()  # type: ignore[misc]
            count = self._late.decide(self._queue.take_oldest, tf.constant(True), rank)
            own: list[Any] = [None] * len(self._variables)
            reduction = Reduction(own, self._variables, step, rank, self._optimizer)
            update = functools.partial(self._update, own, self._variables)
            first = len(self._variables)
            places = {place: place for place in self._places if 0 <= place < first}
            self._updates(reduction, update, places, count, 1)

        self._strategy.run(LocalLook(update_on_replica))

    def end_epoch(self) -> None:
        self.apply_in_flight()

    def make_equal(self) -> None:
        """Makes all updates that are left if hosts may have made different ones."""
        if self.sync.takes_early:
            self.apply_in_flight()

    def _before_change(self) -> None:
        """Makes, on all hosts, the updates that some hosts may have made; called before
        a program assigns to a weight."""
        while self.sync.takes_early and len(self._queue):
            self._apply_oldest()


class _InFlight(tf.Module):
    """A queue as a checkpoint holds it: the number of sums, and their arrays."""

    def __init__(self, queue: LateQueue, steps: int):
        super().__init__(name="late_sums")
        self._queue, self._steps = queue, steps
        self._restored: dict[int, np.ndarray] = {}
        self.kept: list[OfRanks] = []
        self.add(COUNT, tf.TensorSpec([], tf.int64))

    def add(self, place: int, spec: tf.TensorSpec) -> None:
        read = functools.partial(self._read, place, spec)
        write = functools.partial(self._restored.__setitem__, place)
        shape = spec.shape if place == COUNT else [self._steps, *spec.shape]
        self.kept.append(_Stored(tf.TensorSpec(shape, spec.dtype), read, write))

    def _read(self, place: int, spec: tf.TensorSpec) -> np.ndarray:
        # A reader restores one array after the other, and reads others in between.
        if place in self._restored:
            return self._restored[place]
        if place == COUNT:
            return np.array(len(self._queue), np.int64)
        return self._queue.rows(place, spec.shape.as_list(), spec.dtype.as_numpy_dtype)

    def settle(self) -> None:
        """Lets the queue continue with what was restored, if anything was."""
        count = self._restored.pop(COUNT, None)
        if count is not None:
            self._queue.restore(int(count), dict(self._restored))
        self._restored.clear()


class _Stored(OfRanks):
    """An array in host memory that a checkpoint treats as a variable."""

    def __init__(
        self,
        spec: tf.TensorSpec,
        read: Callable[[], np.ndarray],
        write: Callable[[np.ndarray], None],
    ):
        super().__init__(spec.shape, (), spec.dtype, is_identical=True)
        self._spec, self._read, self._write = spec, read, write

    @property
    def copies(self) -> list[Any]:
        return [self._spec]

    def rows(self) -> tf.Tensor:
        return tf.constant(self._read()[None])

    def assign_rows(self, rows: Any) -> None:
        self._write(np.array(rows[0]))

    def _restore_from_tensors(
        self, restored_tensors: dict[str, tf.Tensor]
    ) -> tf.Operation:
        stored = restored_tensors["of_ranks"]
        if stored.shape[1:] != self._spec.shape:
            raise ConfigurationError(
                f"The file holds sums under way of the shape {stored.shape[1:]}, and "
                f"this optimizer keeps {self._spec.shape}: the file is of another "
                "sync=... or another optimizer. Resume with the same, or read the file "
                "into a model that is not compiled."
            )
        self.assign_rows(stored.numpy())
        return tf.no_op()


def _wide(dtype: tf.DType) -> tf.DType:
    """The type in which values of `dtype` are added."""
    return tf.float32 if dtype.size < 4 else dtype
