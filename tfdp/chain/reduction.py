"""One sum of gradients over the replicas, and the stages around it. Read `reduce`.

    each stage, in order      `before`: takes gradients out, replaces them, adds riders
    the reducer               sums gradients and riders, in the same buckets, once
    each stage, in reverse    `after`: takes the sums of its riders, puts results in

Then stages that callbacks attached, and those that an optimizer passes, are `around`
its update, in order: see `update_through`.

`tfdp.chain.stages` chooses the stages of a reduction.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdp.tracing.step import Step


class GradientReducer(Protocol):
    """Sums over the replicas that step together; a `Reducer` is one."""

    def sum_gradients(
        self,
        gradients: Sequence[Any],
        riders: Sequence[tf.Tensor],
        rank: Any,
        *,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """The sums of gradients and of riders; see `Reducer.sum_gradients`."""


@dataclasses.dataclass
class Reduction:
    """The values that one replica gives to a sum over the replicas, and gets back.

    Args:
      gradients: the replica's parts; after the exchange the sums. The exchange leaves
        out those that are None: unused variables, and what a stage has taken out.
      variables: those of the gradients.
      step: the step in which the replica trains.
      rank: the replica's.
      optimizer: it keeps what stages store from step to step.
    """

    gradients: list[Any]
    variables: Sequence[Any]
    step: Step
    rank: Any
    optimizer: Any
    #: Small tensors, which travel exactly in the buckets of the gradients.
    riders: list[tf.Tensor] = dataclasses.field(default_factory=list)
    #: Whether rows of equal index may be added before they travel.
    sum_rows: bool = False
    #: Whether all buckets may travel as one, because they become ready together.
    at_once: bool = False

    @property
    def has_table_rows(self) -> bool:
        """Whether a gradient holds the rows of a table that a batch used."""
        return any(isinstance(one, tf.IndexedSlices) for one in self.gradients)

    def take(self, place: int) -> Any:
        """Takes a gradient out of the exchange."""
        gradient, self.gradients[place] = self.gradients[place], None
        return gradient

    def take_riders(self, count: int) -> list[tf.Tensor]:
        """The sums of the last `count` riders, which the calling stage has added."""
        kept = len(self.riders) - count
        own, self.riders = self.riders[kept:], self.riders[:kept]
        return own

    def will_store(self, copies: Sequence[tf.Variable]) -> None:
        """Lets a `FiniteGuard` restore `copies` if the step is skipped; call before a
        stage stores into them."""
        guard = self.step.guard
        if guard is not None and guard.is_about(self.variables):
            before = [(copy, copy.read_value()) for copy in copies]
            guard.remember(self.optimizer, self.rank, before)


class Stage:
    """A feature that takes part in a reduction, or in the update that follows. All
    replicas have the same stages, so that a stage may exchange by itself."""

    #: Whether it skips steps that are not finite: a model has one that acts.
    is_guard = False

    def forget_fit(self) -> None:
        """Forgets a failed `fit`; of stages that a callback attached."""

    def is_about(self, variables: Sequence[Any]) -> bool:
        """Whether a stage that a callback attached belongs to the optimizer of these:
        optimizers of a model may update different variables."""
        return True

    def begin_step(self, rows: Any, batch: Sequence[tf.Tensor]) -> None:
        """Begins a step of a stage that a callback attached, once, around the replicas:
        with this process's rows (None: unknown), and tensors of its batch."""

    def before(self, reduction: Reduction) -> None:
        """Processes the replica's own gradients, before they are summed."""

    def after(self, reduction: Reduction) -> None:
        """Processes the sums, after the stages behind this one."""

    def around(self, reduction: Reduction, update: Callable[[], Any]) -> None:
        """Makes the update from the sums, which calls the stages behind this one.

        `update` uses what `reduction.gradients` holds when it is called; it may be
        called several times, in conditionals, or not at all.
        """
        update()


def attached_stages(reduction: Reduction) -> list[Stage]:
    """The stages that callbacks have attached to the steps of the model."""
    return [one for one in reduction.step.stages if one.is_about(reduction.variables)]


def reduce(
    reduction: Reduction, chain: Sequence[Stage], reducer: GradientReducer
) -> list[Any]:
    """The sums of the gradients, after all stages."""
    for stage in chain:
        stage.before(reduction)
    given = reduction.gradients
    places = [place for place, gradient in enumerate(given) if gradient is not None]
    if places or reduction.riders:
        sums, reduction.riders = reducer.sum_gradients(
            [given[place] for place in places],
            reduction.riders,
            reduction.rank,
            sum_rows=reduction.sum_rows,
            at_once=reduction.at_once,
        )
        for place, total in zip(places, sums, strict=True):
            given[place] = total
    for stage in reversed(chain):
        stage.after(reduction)
    return reduction.gradients


def update_through(
    reduction: Reduction, update: Callable[[], Any], chain: Sequence[Stage] = ()
) -> None:
    """Makes the update within the stages of `chain`, and within those attached."""
    for stage in reversed([*chain, *attached_stages(reduction)]):
        update = functools.partial(stage.around, reduction, update)
    update()


def scale_when_summed(optimizer: Any) -> Any:
    """The factor of the gradients of `optimizer` when they are summed; None for 1."""
    if not hasattr(optimizer, "inner_optimizer"):
        return optimizer.loss_scale_factor
    # A DistributedOptimizer undoes the fixed scale before it sums.
    if not getattr(optimizer, "dynamic_loss_scale", True):
        return None
    return optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
