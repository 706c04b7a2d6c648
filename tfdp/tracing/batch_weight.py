"""The weight of a global batch in an accumulation, or against other groups' batches.

A gradient sums over all losses of a model and has one weight. If losses are means over
different numbers (rows, unmasked entries), no weight is right for all of them.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private.names import graphs_inside, is_recording
from tfdp.lint.registry import is_of_graph
from tfdp.tracing.step import Step


class Kind(enum.Enum):
    """The kind of a loss that no mask or weights divided."""

    SUM = "a sum over the rows"
    PENALTY = "a number that has nothing to do with rows"
    COUNTED = "the number of values that are not one for each row"


_ADDED_UP = (
    "batches are added up to one update (accumulate_steps, or sync with start_step): "
)
_UNLIKE = (
    "losses are means over different numbers (rows; the entries that a mask "
    f"leaves; weights), and {_ADDED_UP}each has one weight for all "
    "of its losses, the mean of these numbers. Unless they are in the same "
    "proportion in all batches, the update is not that of one large batch. "
    "Use means over rows for all losses: masked entries as weights, "
    "sample_weight=mask, with the losses' own reduction"
)
_BESIDE_SUM = (
    "a loss is a sum over rows (reduction='sum') and another one, or a penalty such as "
    f"a kernel_regularizer, is not, and {_ADDED_UP}the sums of one large batch are "
    "those of its parts, a mean or a penalty is not, so that the update is not that "
    "of one large batch. Use means over rows for all losses"
)


class Denominator(NamedTuple):
    """The divisor of one loss's mean: `total`, None for the number of rows. `of` is the
    mask or weights that it counts, by identity, or a `Kind`."""

    total: tf.Tensor | None
    of: Any = None
    values: Any = None


@dataclasses.dataclass
class _Denominators:
    """Divisors of a replica's mean losses, and how many were used by optimizers."""

    noted: list[Denominator] = dataclasses.field(default_factory=list)
    used: int = 0


def note_denominator(step: Step, rank: Any, denominator: Denominator) -> None:
    """Records it for the next optimizer that accumulates, while a tape records."""
    if is_recording():  # else the loss is only evaluated
        step.trace(rank).of(_Denominators).noted.append(denominator)


def batch_weight(step: Step, rank: Any) -> tf.Tensor | None:
    """The divisor of the global batch's losses since the last call (or of all losses,
    if there are none): the batch's weight. None: they are sums.

    Unmasked entries, or weights, for means over those; else samples; 1 if unknown.
    Losses with different divisors cause a warning.
    """
    of_replica = step.trace(rank).of(_Denominators)
    noted = of_replica.noted
    found = noted[of_replica.used :] or noted
    of_replica.used = len(noted)
    found = [_made_out(each, step, rank) for each in found]
    means = [each for each in found if not isinstance(each.of, Kind)]
    if any(each.of is Kind.SUM for each in found):
        if any(each.of is not Kind.SUM for each in found):
            step.suspicions.add(_BESIDE_SUM)
        if not means:
            return None
    from tfdp.lint.masks import MaskNumbers

    number_of = MaskNumbers()
    if len({number_of(each.of) for each in means}) > 1:
        step.suspicions.add(_UNLIKE)
    totals = [each.total for each in means if each.total is not None]
    if not all(map(_is_near, totals)):
        totals = []  # tensors of a function that the step has called
    has_rows = len(totals) < len(means) or not means
    if has_rows and step.total_of(rank) is not None:
        totals.append(step.total_together(rank))
    if not totals:
        return tf.constant(1.0)
    return totals[0] if len(totals) == 1 else tf.add_n(totals) / len(totals)


def _made_out(noted: Denominator, step: Step, rank: Any) -> Denominator:
    """Values that depend on no row, such as a GAN's noise, count as rows."""
    if noted.of is not Kind.COUNTED:
        return noted
    is_of_rows = step.analysis(rank).value(noted.values).is_of_replica
    return Denominator(noted.total, noted.total if is_of_rows else None)


def _is_near(tensor: tf.Tensor) -> bool:
    """Whether the graph being built can use `tensor`."""
    graphs = graphs_inside(None)
    return not is_of_graph(tensor) or any(tensor.graph is graph for graph in graphs)
