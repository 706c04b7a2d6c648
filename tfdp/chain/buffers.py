"""Moving statistics as riders: each becomes the mean over the rows of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import graphs_inside, is_branch_graph, own_copy
from tfdp.chain.reduction import Reduction, Stage
from tfdp.lint.registry import note_stored
from tfdp.tracing.state_checks import handles_of, linear_sources
from tfdp.tracing.step import Step
from tfdp.tracing.stored_state import LocalState, StoredState


class Buffers(Stage):
    """Synchronizes `state`, the buffers that the replica has stored in this step."""

    def __init__(self, state: Sequence[Any]):
        self._state = list(state)

    def before(self, reduction: Reduction) -> None:
        step, rank = reduction.step, reduction.rank
        # A variable that a gradient is linear in is the program's own accumulator: its
        # copies are parts of a sum, not means over rows.
        handles, stored = handles_of(self._state, rank), step.of(StoredState)
        stored.own_sums |= linear_sources(step, rank, reduction.gradients, handles)
        state = [one for one in self._state if id(one) not in stored.own_sums]
        self._state = _stored_in_this_branch(state, step, rank)
        reduction.riders += weighted_state(self._state, step, rank)

    def after(self, reduction: Reduction) -> None:
        means = reduction.take_riders(len(self._state))
        # Not by `assign`, which would reduce again.
        store_state(self._state, means, reduction.step, reduction.rank)


def _stored_in_this_branch(state: list[Any], step: Step, rank: Any) -> list[Any]:
    """Drops buffers that every step writes when only every k-th step updates: their
    mean must not use the last step's row counts."""
    if not step.of(StoredState).synchronizes_at_end:
        return state
    around = graphs_inside(None)
    outside = {
        one
        for one, graph in step.of(StoredState).graphs(rank).items()
        # A called function does not count: what surrounds it, such as a loop of steps
        # and its conditionals, surrounds the update as well.
        if any(each is graph for each in around)
        and any(map(is_branch_graph, graphs_inside(graph)))
    }
    step.trace(rank).of(LocalState).put_back(one for one in state if id(one) in outside)
    return [variable for variable in state if id(variable) not in outside]


def weighted_state(state: Sequence[Any], step: Step, rank: Any) -> list[tf.Tensor]:
    """This replica's addends to means over samples; 0 if it has no sample."""
    return [
        addend(own_copy(variable, rank).read_value(), step.share_of(rank))
        for variable in state
    ]


def addend(value: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """The addend of `value` to a mean in which it has this share."""
    own = tf.cast(share, value.dtype)
    # Statistics of no sample are NaN, and 0 times NaN is not 0.
    return tf.where(own > 0, value * own, tf.zeros_like(value))


def store_state(
    state: Sequence[Any], means: Sequence[tf.Tensor], step: Step, rank: Any
) -> None:
    """Stores the means in the calling replica's copies; `assign` would reduce again."""
    for variable, value in zip(state, means, strict=True):
        extended = variable.distribute_strategy.extended
        value = note_stored(own_copy(variable, rank), value)
        extended.update_own_copy(variable, lambda own, v: own.assign(v), value)
