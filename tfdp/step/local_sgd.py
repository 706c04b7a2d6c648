"""Local SGD for one optimizer: local weights, inner updates, and outer steps.

A training step works on local values (`tfdp.variables.local_view`). The update number,
which is the same on all replicas, decides what an update is:

    up to `start_step`   gradients are summed over all groups, as without `sync`; then
                         the local values, equal everywhere, become the outer ones
    later                gradients are summed within the group only
    every `every`-th     outer step: the outer values move and the local ones restart
                         from there, all at once or one fragment at a time, and with
                         `overlap_steps` that many updates after the exchange began
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.names import own_copy
from tfdp._private.optimizer_hooks import AVERAGE
from tfdp.chain.compression import CompressedExchange, places_taken
from tfdp.chain.groups import AllGroups, Exact
from tfdp.chain.reduction import Reduction, Stage, reduce
from tfdp.exchange.reducer import Reducer
from tfdp.seams.replace import instance_attributes
from tfdp.step.async_means import AsyncMeans
from tfdp.step.elastic_rounds import elastic_rounds
from tfdp.step.local_training import LocalTraining
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.rounds import Sync, fragments_of, synchronization_of
from tfdp.tracing.step import Step
from tfdp.variables.local_view import LocalView


class Rounds(LocalTraining):
    """Local training and outer steps of the replicas that one optimizer updates.

    Args:
      momenta: the outer momentum of each weight; empty for none.
      averages: the moving average of each weight; None, or empty, for none.
      average_momentum: the decay of the averages.
      updates: the update counter, equal on all replicas.
      group_size: replicas per group that steps together.
      optimizer: the owner; it holds the residuals of compressed outer gradients.
    """

    def __init__(
        self,
        sync: Sync,
        strategy: tf.distribute.Strategy,
        weights: Sequence[LocalView],
        *,
        momenta: Sequence[LocalView],
        averages: Sequence[LocalView | None],
        average_momentum: float | None,
        updates: LocalView,
        group_size: int,
        optimizer: Optimizer,
    ):
        super().__init__(strategy, group_size, optimizer)
        self.sync = sync
        self._weights, self._momenta, self._updates = weights, momenta, updates
        self._replicas = strategy.num_replicas_in_sync
        self._is_chief = strategy.is_chief
        method = getattr(sync, "compression", None)
        if method is not None:
            self.compressed = self._reducer.compressed_by(method, sync.across)
        for weight in weights:
            self.values.make(weight)
        sizes = [weight.shape.num_elements() * weight.dtype.size for weight in weights]
        self._fragments = fragments_of(sizes, getattr(sync, "fragments", 1))
        self._overlap_steps = getattr(sync, "overlap_steps", 0)
        self._local_share = getattr(sync, "local_share", 0.0)
        self._averages = OuterAverages(
            weights, averages, average_momentum, self._first_synchronization
        )
        self._in_flight: list[AsyncMeans] = []
        if self._overlap_steps:
            self._make_room(strategy)
        self._elastic = elastic_rounds(strategy, self._state_of_host)
        if isinstance(sync, DiLoCo) and sync.quorum is not None:
            from tfdp.step.quorum_rounds import quorum_rounds

            own = strategy, self._elastic, self._state_of_host, self._skip
            self._elastic = quorum_rounds(sync, *own)

    def before_step(self, step: Step) -> None:
        """Call it outside of replicas."""
        super().before_step(step)
        if self._elastic is not None:
            self._elastic.before_step()
            self._elastic.note_rows(step.total_together(0))

    def _skip(self, updates: tf.Tensor, rank: int) -> None:
        """Counts updates that this host leaves out, for schedules, too."""
        optimizer = self._optimizer
        counters = [self._updates]
        counters += [o.iterations.value for o in (optimizer, optimizer.inner_optimizer)]
        for counter in {id(counter): counter for counter in counters}.values():
            own = own_copy(counter, rank)
            own.assign_add(tf.cast(updates, own.dtype))

    def _make_room(self, strategy: tf.distribute.Strategy) -> None:
        # In-flight values are part of checkpoints.
        devices = strategy.extended.worker_devices
        # With compression TensorFlow encodes and sums, within a step.
        late = self._reducer.transport.late if self.compressed is None else None
        for number in range(len(self._fragments)):
            label = f"outer gradients of fragment {number}"
            in_flight = AsyncMeans(late, devices, self._replicas, label)
            for weight in self._fragment(number)[0]:
                in_flight.grow(weight.shape, weight.dtype)
            self._in_flight.append(in_flight)
        self.values.stored.on_the_way = self._in_flight

    def _make_room_for(self, variable: LocalView) -> None:
        if self._in_flight:
            self._in_flight[-1].grow(variable.shape, variable.dtype)

    def reduced(self, own: Reduction, weight: tf.Tensor | None) -> list[Any]:
        """The gradient of the mean over the replicas that step together.

        Args:
          own: this replica's part of its group's mean gradient. Slices become dense if
            the group has several replicas.
          weight: of the group's mean against other groups'; None: it is a sum.
        """
        rank, gradients = own.rank, own.gradients
        state = self._take_state(own.step, rank)
        start, alone = self.sync.start_step, own.step.group_size == 1
        if not alone:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]

        def parts() -> Reduction:
            return replace(own, gradients=list(gradients), riders=[])

        def within() -> list[Any]:
            if alone:
                return list(gradients)  # slices stay slices
            return self._within_group(state, parts())

        def everywhere() -> list[Any]:
            chain = [AllGroups(state, weight, self._reducer)]
            return reduce(parts(), chain, self._reducer)

        if start == 0:
            return within()
        results = tf.cond(
            self._count(rank) < start,
            lambda: _parts_of(everywhere()),
            lambda: _parts_of(within()),
        )
        return [
            tf.IndexedSlices(*part, gradient.dense_shape)
            if isinstance(gradient, tf.IndexedSlices)
            else part[0]
            for part, gradient in zip(results, gradients, strict=True)
        ]

    def synchronize_layer_state(self, step: Step, rank: int) -> None:
        """See `buffer_synchronization.synchronize_layer_state`; within the group."""
        start = self.sync.start_step
        if not start:
            super().synchronize_layer_state(step, rank)
            return
        state = self._take_state(step, rank)
        if not state:
            return
        no_gradients = Reduction([], [], step, rank, self._optimizer)

        def within() -> tf.Tensor:
            if step.group_size > 1:
                self._within_group(state, no_gradients)
            return tf.constant(True)

        def everywhere() -> tf.Tensor:
            chain = [AllGroups(state, None, self._reducer)]
            reduce(no_gradients, chain, self._reducer)
            return tf.constant(True)

        tf.cond(self._count(rank) < start, everywhere, within)

    def around(self, reduction: Reduction, update: Callable[[], Any]) -> None:
        """The inner update, and the outer steps that are due after it."""
        # Only outer steps average the weights.
        waits = {AVERAGE: lambda variables: None}
        with instance_attributes(reduction.optimizer.inner_optimizer, waits):
            update()
        # All replicas count it, including those that skip this update.
        self._after_update(reduction.step, reduction.rank)

    def _after_update(self, step: Step, rank: int) -> None:
        start = self.sync.start_step
        count = self._count(rank) + 1
        own_copy(self._updates, rank).assign(count)
        if start == 0:
            self._averages.begin(count, rank)

        def in_round() -> tf.Tensor:
            since, overlap = count - start, self._overlap_steps
            fragments = range(len(self._fragments))
            # At most one fragment is due per step, so no exchange waits for another; a
            # second one may complete in the same step without an exchange.
            for number in fragments if overlap else ():
                is_back = self._is_due(number, since - overlap) & (since > overlap)
                finish = functools.partial(self._finish, number, count, rank)
                tf.cond(is_back, finish, lambda: False)
            for number in fragments:
                begin = functools.partial(self._synchronize, number, count, step, rank)
                tf.cond(self._is_due(number, since), begin, lambda: False)
            return tf.constant(True)

        if start == 0:
            in_round()
        else:
            tf.cond(count <= start, lambda: self._publish(count, rank), in_round)

    def _is_due(self, number: int, since: tf.Tensor) -> tf.Tensor:
        every = self.sync.every
        place = synchronization_of(number, len(self._fragments), every)
        return tf.equal(since % every, place)

    def _publish(self, count: tf.Tensor, rank: int) -> tf.Tensor:
        """The local values, which are equal everywhere, become the outer ones."""
        for variable in (*self._weights, *self._layer_state):
            local = variable.local_copy(rank).read_value()
            variable.outer_copy(rank).assign(local)
        return self._averages.move(count, rank, range(len(self._weights)))

    def _synchronize(
        self, number: int, count: tf.Tensor, step: Step, rank: int
    ) -> tf.Tensor:
        fragment, state = self._fragment(number)
        outer = [v.outer_copy(rank).read_value() for v in fragment]
        values = [v.local_copy(rank).read_value() for v in fragment]
        if isinstance(self.sync, DiLoCo):  # averages movements, not weights
            values = [before - now for before, now in zip(outer, values, strict=True)]
        values += [v.local_copy(rank).read_value() for v in state]
        if self._elastic is not None:
            move = functools.partial(self._move, number, count=count, rank=rank)
            return self._elastic.synchronize(count, values, rank, move)
        mean = functools.partial(self._means, number, step, rank)
        if self._overlap_steps:
            return self._in_flight[number].begin(values, rank, mean)
        return self._move(number, mean(values), count, rank)

    def _finish(self, number: int, count: tf.Tensor, rank: int) -> tf.Tensor:
        means = self._in_flight[number].arrived(rank)
        return self._move(number, means, count, rank)

    def _fragment(self, number: int) -> tuple[list[LocalView], list[LocalView]]:
        """Weights of a fragment; the last, which ends a round, also has the buffers."""
        weights = [self._weights[place] for place in self._fragments[number]]
        is_last = number == len(self._fragments) - 1
        return weights, self._layer_state if is_last else []

    def _means(
        self, number: int, step: Step, rank: int, values: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        fragment, _ = self._fragment(number)
        mine, state = values[: len(fragment)], values[len(fragment) :]
        own = Reduction(list(mine), fragment, step, rank, self._optimizer)
        chain: list[Stage] = []
        if self.compressed is not None:
            places = places_taken(self.compressed, own)
            chain = [CompressedExchange(self.compressed, places)] if places else []
        sums = reduce(own, chain, Exact(self._reducer))
        means = [total / self._replicas for total in sums]
        return means + (mean_over_groups(state, self._reducer, rank) if state else [])

    def _move(
        self, number: int, means: Sequence[tf.Tensor], count: tf.Tensor, rank: int
    ) -> tf.Tensor:
        places = self._fragments[number]
        fragment, state = self._fragment(number)
        momenta = [own_copy(self._momenta[p], rank) for p in places if self._momenta]
        weights, after = outer_update(
            self.sync,
            [v.outer_copy(rank).read_value() for v in fragment],
            [momentum.read_value() for momentum in momenta],
            means[: len(fragment)],
        )
        for momentum, value in zip(momenta, after, strict=True):
            momentum.assign(value)
        share = self._local_share
        values = [*weights, *means[len(fragment) :]]
        for variable, value in zip([*fragment, *state], values, strict=True):
            local = variable.local_copy(rank)
            now = local.read_value()
            local.assign(share * now + (1 - share) * value if share else value)
            variable.outer_copy(rank).assign(value)
        return self._averages.move(count, rank, places)

    @property
    def _first_synchronization(self) -> int:
        """The update after which every weight has been synchronized once."""
        return 1 if self.sync.start_step else self.sync.every + self._overlap_steps

    def have_synchronized(self) -> bool:
        """Whether there were outer weights since the start; outside of replicas."""
        return int(self._updates.numpy()) >= self._first_synchronization

    def end_fit(self) -> None:
        """See `LocalTraining`; tells of a round that has not ended."""
        super().end_fit()
        lacking = self.sync.updates_lacking(int(self._updates.numpy()))
        if lacking > self._overlap_steps and self._is_chief:
            first = self.sync.start_step + self._overlap_steps
            sys.stderr.write(
                f"tfdp: This fit ended within a round of {type(self.sync).__name__}: "
                f"evaluate, predict and save lack the last {lacking} updates. The next "
                f"fit goes on with them. Rounds end after {first} + k * "
                f"{self.sync.every} updates (docs/local-sgd.md).\n"
            )

    def _count(self, rank: int) -> tf.Tensor:
        return own_copy(self._updates, rank).read_value()


class OuterAverages:
    """Moves moving averages, if any, towards the outer weights at each outer step.
    After the update `first_synchronization` every weight has been synchronized once."""

    def __init__(
        self,
        weights: Sequence[LocalView],
        averages: Sequence[LocalView | None],
        momentum: float | None,
        first_synchronization: int,
    ):
        self._pairs = dict(enumerate(zip(weights, averages, strict=False)))
        self._momentum = momentum
        self._first_synchronization = first_synchronization

    def begin(self, count: tf.Tensor, rank: int) -> None:
        """Initializes them at the first update (`count` 1): `SwapEMAWeights` would
        evaluate zeros until the first outer step."""
        if self._pairs:
            places = list(self._pairs)
            tf.cond(
                tf.equal(count, 1),
                lambda: self.move(count, rank, places),
                lambda: tf.constant(True),
            )

    def move(self, count: tf.Tensor, rank: int, places: Sequence[int]) -> tf.Tensor:
        """Moves some averages; onto the weights until all were synchronized."""
        for place in places if self._pairs else ():
            weight, average = self._pairs[place]
            if average is not None:
                own = own_copy(average, rank)
                kept = tf.where(
                    count <= self._first_synchronization, 0.0, self._momentum
                )
                kept = tf.cast(kept, own.dtype)
                value = weight.outer_copy(rank).read_value()
                own.assign(kept * own.read_value() + (1 - kept) * value)
        return tf.constant(True)


def _parts_of(gradients: Sequence[Any]) -> list[list[tf.Tensor]]:
    """Lists of tensors for `tf.cond`; slices as their values and indices."""
    return [
        [g.values, g.indices] if isinstance(g, tf.IndexedSlices) else [g]
        for g in gradients
    ]


def mean_over_groups(
    values: Sequence[tf.Tensor], reducer: Reducer, rank: Any
) -> list[tf.Tensor]:
    """The plain mean over all groups, not weighted by rows, as in the papers: the mean
    over replicas, because groups have equal sizes."""
    return reducer.all_reduce(values, rank, mean=True)


def outer_update(
    sync: Sync,
    outer: Sequence[tf.Tensor],
    momenta: Sequence[tf.Tensor],
    means: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The next outer weights and momenta, from the outer weights w_t, the momenta b
    (empty for `LocalSGD`) and the means over groups; equations: `DiLoCo`."""
    if not isinstance(sync, DiLoCo):
        return list(means), []
    rate, mu = sync.outer_learning_rate, sync.outer_momentum
    momenta = [mu * b + d for b, d in zip(momenta, means, strict=True)]
    weights = [
        w - rate * (d + mu * b) for w, d, b in zip(outer, means, momenta, strict=True)
    ]
    return weights, momenta
