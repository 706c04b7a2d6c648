"""The rounds of one optimizer: local weights, their updates, and when they meet.

A training step works on local values (`tfdp.variables.local_view`). What an update is
depends on its number, which is the same on all replicas:

    up to `start_step`     gradients are summed over all groups, as without `sync`; then
                           the local values, alike everywhere, become the outer ones
    later                  gradients are summed within the group, and nothing is sent
    every `every`-th       then the outer values move, and the local ones start again
    of those               from there: all of them, or one fragment after the other;
                           with `overlap_steps` so many updates after the groups met
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.errors import ConfigurationError
from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.reducer import Reducer
from tfdp.step.async_means import AsyncMeans
from tfdp.step.compression import sum_compressed
from tfdp.step.elastic_rounds import elastic_rounds
from tfdp.step.local_run import assign_local, parts_of, share_of_state, times
from tfdp.step.local_values import LocalValues
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.rounds import Sync, fragments_of, synchronization_of
from tfdp.tracing.run import ReplicaRun
from tfdp.variables.local_view import LocalView


class Rounds:
    """Lets the replicas that one optimizer updates train apart, and meet.

    Args:
      sync: when they meet, and how.
      strategy: the optimizer's.
      weights: the variables that it updates.
      momenta: the outer momentum of each; empty for none.
      averages: the moving average of each weight; None, or empty, for none.
      average_momentum: how much of an average stays.
      updates: counts updates, alike on all replicas.
      group_size: how many replicas step together while other groups train apart.
      optimizer: whose they are; holds what compressed outer gradients leave.
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
        optimizer: keras.optimizers.Optimizer,
    ):
        self.sync, self.group_size = sync, group_size
        self._reducer: Reducer = strategy.extended.reducer
        self._weights, self._momenta, self._updates = weights, momenta, updates
        self._optimizer = optimizer
        self._replicas = strategy.num_replicas_in_sync
        method = getattr(sync, "compression", None)
        self.compressed: CompressedSums | None = None
        if method is not None:
            self.compressed = self._reducer.compressed_by(method, sync.across)
        self._layer_state: list[LocalView] = []
        self.values = LocalValues(strategy.extended.worker_devices)
        for weight in weights:
            self.values.make(weight)
        sizes = [weight.shape.num_elements() * weight.dtype.size for weight in weights]
        self._fragments = fragments_of(sizes, getattr(sync, "fragments", 1))
        self._overlap_steps = getattr(sync, "overlap_steps", 0)
        self._local_share = getattr(sync, "local_share", 0.0)
        self._averages = OuterAverages(
            weights, averages, average_momentum, self._first_synchronization
        )
        self._on_the_way: list[AsyncMeans] = []
        if self._overlap_steps:
            self._make_room(strategy)
        #: Where hosts may die and come back; None: they may not.
        self._living = elastic_rounds(sync, strategy, self._state_of_host)

    def _state_of_host(self) -> list[LocalView]:
        """All that a host needs to train on as another one does."""
        own = [variable.value for variable in self._optimizer.variables]
        found = [*self._weights, *self._layer_state]
        found += [variable for variable in own if isinstance(variable, LocalView)]
        return list({id(variable): variable for variable in found}.values())

    def before_step(self) -> None:
        """Outside of replicas."""
        self.values.settle()
        if self._living is not None:
            self._living.before_step()

    def _make_room(self, strategy: tf.distribute.Strategy) -> None:
        """For what is on its way, in checkpoints, too."""
        devices = strategy.extended.worker_devices
        # Encoding and adding up is TensorFlow's work, within a step.
        late = self._reducer.late if self.compressed is None else None
        for number in range(len(self._fragments)):
            label = f"outer gradients of fragment {number}"
            on_the_way = AsyncMeans(late, devices, self._replicas, label)
            for weight in self._fragment(number)[0]:
                on_the_way.grow(weight.shape, weight.dtype)
            self._on_the_way.append(on_the_way)
        self.values.stored.on_the_way = self._on_the_way

    def keep_layer_state(self, variables: Sequence[Any]) -> None:
        """Gives what layers store (moving statistics) local values, too."""
        known = set(map(id, self.values.variables))
        for variable in variables:
            if (
                isinstance(variable, LocalView)
                and id(variable) not in known
                and variable.dtype.is_floating
                and variable.aggregation == tf.VariableAggregation.NONE
            ):
                self.values.make(variable)
                self._layer_state.append(variable)
                if self._on_the_way:
                    self._on_the_way[-1].grow(variable.shape, variable.dtype)

    def reduced(
        self,
        gradients: Sequence[Any],
        weight: tf.Tensor | None,
        run: ReplicaRun,
        rank: int,
    ) -> list[Any]:
        """The gradient of the mean over whoever steps together, for the next update.

        Args:
          gradients: this replica's part of the gradient of its group's mean. Slices of
            embeddings become dense where a group has several replicas.
          weight: what the group's mean weighs beside those of other groups; None: it
            is a sum.
          run: the run.
          rank: the calling replica.
        """
        state = self._take_state(run, rank)
        start, alone = self.sync.start_step, run.group_size == 1
        if not alone:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]

        def within() -> list[Any]:
            if alone:
                return list(gradients)  # slices of embeddings, too, as they are
            self._mean_within(state, run, rank)
            return [self._reducer.sum_within(v, rank) for v in gradients]

        if start == 0:
            return within()
        parts = tf.cond(
            self._count(rank) < start,
            lambda: parts_of(self._everywhere(gradients, weight, state, run, rank)),
            lambda: parts_of(within()),
        )
        return [
            tf.IndexedSlices(*part, gradient.dense_shape)
            if isinstance(gradient, tf.IndexedSlices)
            else part[0]
            for part, gradient in zip(parts, gradients, strict=True)
        ]

    def bring_layers_together(self, run: ReplicaRun, rank: int) -> None:
        """Before gradients are accumulated: what layers store of this batch is that of
        whoever steps together; see `state_means.bring_layers_together`."""
        state = self._take_state(run, rank)
        start = self.sync.start_step
        if not state or (run.group_size == 1 and not start):
            return

        def within() -> tf.Tensor:
            if run.group_size > 1:
                self._mean_within(state, run, rank)
            return tf.constant(True)

        def everywhere() -> tf.Tensor:
            rows = tf.cast(run.count_of(rank), tf.float32)
            [all_rows] = self._reducer.all_reduce([rows], rank, mean=False)
            share = tf.math.divide_no_nan(rows, all_rows)
            shares = [share_of_state(variable, share, rank) for variable in state]
            means = self._reducer.all_reduce(shares, rank, mean=False)
            assign_local(state, means, rank)
            return tf.constant(True)

        if start:
            tf.cond(self._count(rank) < start, everywhere, within)
        else:
            within()

    def _take_state(self, run: ReplicaRun, rank: int) -> list[LocalView]:
        state = run.take_local_state(rank)
        self._refuse_unknown(state)
        return state

    def _mean_within(
        self, state: Sequence[LocalView], run: ReplicaRun, rank: int
    ) -> None:
        """What layers have stored becomes its mean over the rows of the group."""
        # A group without rows has kept what it had, all of its replicas alike.
        total, even = run.total_in_group(rank), run.even_share
        share = tf.where(total > 0, run.share_in_group(rank), even)
        shares = [share_of_state(v, share, rank) for v in state]
        sums = [self._reducer.sum_within(v, rank) for v in shares]
        assign_local(state, sums, rank)

    def _everywhere(
        self,
        gradients: Sequence[Any],
        weight: tf.Tensor | None,
        state: Sequence[LocalView],
        run: ReplicaRun,
        rank: int,
    ) -> list[Any]:
        """One device's gradient: sum of W_g g_g over the groups, by the sum of W_g.

        Of sums, which have no weight, the sum of g_g.

        So no group needs to know the others' samples before its loss is taken.
        """
        rows = tf.cast(run.count_of(rank), tf.float32)
        weighs = tf.ones([]) if weight is None else weight
        # A weight is its group's, which has several replicas.
        counts = [weighs / run.group_size, rows]
        all_weights, all_rows = self._reducer.all_reduce(counts, rank, mean=False)
        # Before they are summed, so that a 16-bit wire has no larger numbers to carry.
        part = tf.math.divide_no_nan(weighs, all_weights)
        own = list(gradients)
        if weight is not None:
            own = [times(gradient, part) for gradient in gradients]
        share = tf.math.divide_no_nan(rows, all_rows)
        shares = [share_of_state(variable, share, rank) for variable in state]
        sums, means = self._reducer.sum_gradients(own, shares, rank)
        assign_local(state, means, rank)
        return sums

    def after_update(self, rank: int) -> None:
        """Counts an update of this replica's weights, and meets when it is time."""
        start = self.sync.start_step
        count = self._count(rank) + 1
        own_copy(self._updates, rank).assign(count)
        if start == 0:
            self._averages.begin(count, rank)

        def in_round() -> tf.Tensor:
            since, overlap = count - start, self._overlap_steps
            fragments = range(len(self._fragments))
            # At most one of them meets: no two wait for each other's exchange. Another
            # one may come back in the same step, without an exchange.
            for number in fragments if overlap else ():
                is_back = self._is_due(number, since - overlap) & (since > overlap)
                tf.cond(is_back, self._coming_back(number, count, rank), lambda: False)
            for number in fragments:
                is_due = self._is_due(number, since)
                tf.cond(
                    is_due, self._synchronization(number, count, rank), lambda: False
                )
            return tf.constant(True)

        if start == 0:
            in_round()
        else:
            tf.cond(count <= start, lambda: self._publish(count, rank), in_round)

    def _is_due(self, number: int, since: tf.Tensor) -> tf.Tensor:
        """Whether a fragment meets after so many updates in rounds."""
        every = self.sync.every
        place = synchronization_of(number, len(self._fragments), every)
        return tf.equal(since % every, place)

    def _publish(self, count: tf.Tensor, rank: int) -> tf.Tensor:
        """The local values, which are alike everywhere, become the outer ones."""
        for variable in (*self._weights, *self._layer_state):
            local = variable.local_copy(rank).read_value()
            variable.outer_copy(rank).assign(local)
        return self._averages.move(count, rank, range(len(self._weights)))

    def _synchronization(
        self, number: int, count: tf.Tensor, rank: int
    ) -> Callable[[], tf.Tensor]:
        def meet() -> tf.Tensor:
            fragment, state = self._fragment(number)
            values = to_be_averaged(
                self.sync,
                [v.outer_copy(rank).read_value() for v in fragment],
                [v.local_copy(rank).read_value() for v in fragment],
            )
            values += [v.local_copy(rank).read_value() for v in state]
            if self._living is not None:
                move = functools.partial(self._move, number, count=count, rank=rank)
                return self._living.meet(count, values, rank, move)
            mean = functools.partial(self._means, number, rank)
            if self._overlap_steps:
                return self._on_the_way[number].begin(values, rank, mean)
            return self._move(number, mean(values), count, rank)

        return meet

    def _coming_back(
        self, number: int, count: tf.Tensor, rank: int
    ) -> Callable[[], tf.Tensor]:
        def come_back() -> tf.Tensor:
            means = self._on_the_way[number].arrived(rank)
            return self._move(number, means, count, rank)

        return come_back

    def _fragment(self, number: int) -> tuple[list[LocalView], list[LocalView]]:
        """Its weights, and with the last one, which ends a round, what layers store."""
        weights = [self._weights[place] for place in self._fragments[number]]
        is_last = number == len(self._fragments) - 1
        return weights, self._layer_state if is_last else []

    def _means(
        self, number: int, rank: int, values: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The means over the groups of what a fragment's weights and state bring."""
        fragment, _ = self._fragment(number)
        mine, state = values[: len(fragment)], values[len(fragment) :]
        if self.compressed is None:
            means = mean_over_groups(mine, self._reducer, rank)
        else:
            means = compressed_mean_over_groups(
                self.compressed,
                self._optimizer,
                self._replicas,
                self._reducer,
                rank,
                mine,
                fragment,
            )
        return means + (mean_over_groups(state, self._reducer, rank) if state else [])

    def _move(
        self, number: int, means: Sequence[tf.Tensor], count: tf.Tensor, rank: int
    ) -> tf.Tensor:
        """Moves the outer values of one fragment, and the local ones to them."""
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
        for variable, value in zip(
            [*fragment, *state], [*weights, *means[len(fragment) :]], strict=True
        ):
            local = variable.local_copy(rank)
            local.assign(mixed(share, local.read_value(), value))
            variable.outer_copy(rank).assign(value)
        return self._averages.move(count, rank, places)

    @property
    def _first_synchronization(self) -> int:
        """The update after which every weight has met for the first time."""
        return 1 if self.sync.start_step else self.sync.every + self._overlap_steps

    def have_synchronized(self) -> bool:
        """Whether there were outer weights since the start, outside of replicas."""
        return int(self._updates.numpy()) >= self._first_synchronization

    def _count(self, rank: int) -> tf.Tensor:
        return own_copy(self._updates, rank).read_value()

    def _refuse_unknown(self, state: Sequence[Any]) -> None:
        known = set(map(id, self._layer_state))
        for variable in state:
            if id(variable) not in known:
                raise ConfigurationError(
                    f"A step stores into {variable.name!r}, which is none of the "
                    "model's variables, and with sync=... replicas train apart: each "
                    "would store another value. Make it a weight of a layer "
                    "(add_weight(trainable=False)), or leave sync out."
                )


# The moving averages of weights that meet now and then: of the outer ones.


class OuterAverages:
    """Moves averages towards the outer weights at each meeting.

    Args:
      weights: all that an optimizer updates.
      averages: that of each; None, or nothing at all, for none.
      momentum: how much of an average stays.
      first_meeting: the update after which every weight has met for the first time.
    """

    def __init__(
        self,
        weights: Sequence[LocalView],
        averages: Sequence[LocalView | None],
        momentum: float | None,
        first_meeting: int,
    ):
        self._pairs = dict(enumerate(zip(weights, averages, strict=False)))
        self._momentum = momentum
        self._first_synchronization = first_meeting

    def begin(self, count: tf.Tensor, rank: int) -> None:
        """With the first update of all, `count` 1, they are the weights of the start.

        Until a meeting they would be zeros, and who takes them then, such as
        `keras.callbacks.SwapEMAWeights`, would evaluate a model of zeros.
        """
        if self._pairs:
            places = list(self._pairs)
            tf.cond(
                tf.equal(count, 1),
                lambda: self.move(count, rank, places),
                lambda: tf.constant(True),
            )

    def move(self, count: tf.Tensor, rank: int, places: Sequence[int]) -> tf.Tensor:
        """Moves those of some weights; until all have met, onto the weights."""
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


# What happens to the weights when groups of replicas meet (`tfdp.sync`).


def mean_over_groups(
    values: Sequence[tf.Tensor], reducer: Reducer, rank: Any
) -> list[tf.Tensor]:
    """The plain mean of each value over all groups, on every replica.

    All groups have as many replicas, and the replicas of a group the same values, so it
    is the mean over replicas. It counts no rows, as in the papers.

    Cost: 2 n (H - 1) / H bytes on the wire for n bytes on H hosts.
    """
    return reducer.all_reduce(values, rank, mean=True)


def compressed_mean_over_groups(
    compressed: CompressedSums,
    optimizer: keras.optimizers.Optimizer,
    replicas: int,
    reducer: Reducer,
    rank: Any,
    values: Sequence[tf.Tensor],
    variables: Sequence[Any],
) -> list[tf.Tensor]:
    """The same of outer gradients that are sent in fewer bytes.

    Args:
      compressed: by which method, and among whom.
      optimizer: it holds what is kept from meeting to meeting.
      replicas: on all hosts.
      reducer: what is not compressed goes this way.
      rank: the calling replica.
      values: outer gradients.
      variables: whose they are.
    """

    def plain_sums(
        gradients: list[Any], state: list[tf.Tensor], *, at_once: bool = False
    ) -> tuple[list, list]:
        sums = reducer.all_reduce([*gradients, *state], rank, mean=False)
        return sums[: len(gradients)], sums[len(gradients) :]

    sums, _ = sum_compressed(
        compressed, values, [], rank, variables, optimizer, plain_sums
    )
    return [total / replicas for total in sums]


def to_be_averaged(
    sync: Sync, outer: Sequence[tf.Tensor], local: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """What groups bring to a meeting: local weights, or for `DiLoCo` their movements.

    Args:
      sync: how they meet.
      outer: w_t, the weights that all groups had after the last meeting.
      local: w_i, this replica's.
    """
    if not isinstance(sync, DiLoCo):
        return list(local)
    return [before - after for before, after in zip(outer, local, strict=True)]


def outer_update(
    sync: Sync,
    outer: Sequence[tf.Tensor],
    momenta: Sequence[tf.Tensor],
    means: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The next outer weights w_(t+1), and the next outer momenta.

    Args:
      sync: `LocalSGD`, the mean of the local weights, or `DiLoCo`, whose equations are
        in its docstring.
      outer: w_t.
      momenta: b; empty for `LocalSGD`.
      means: of `to_be_averaged`, over all groups.
    """
    if not isinstance(sync, DiLoCo):
        return list(means), []
    rate, mu = sync.outer_learning_rate, sync.outer_momentum
    momenta = [mu * b + d for b, d in zip(momenta, means, strict=True)]
    weights = [
        w - rate * (d + mu * b) for w, d, b in zip(outer, means, momenta, strict=True)
    ]
    return weights, momenta


def mixed(share: float, local: tf.Tensor, outer: tf.Tensor) -> tf.Tensor:
    """Where local values go on after a meeting: share local + (1 - share) outer."""
    return share * local + (1 - share) * outer if share else outer
