"""What a global batch weighs beside others, of an accumulation or of other groups.

A gradient is a sum over all losses of a model, and has one weight. Where these are
means over unlike numbers, such as rows and unmasked entries, none is right for all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = ["Denominator", "batch_weight"]


class Denominator(NamedTuple):
    """What the mean of one loss over the global batch was divided by.

    Args:
      total: a float scalar; None: the number of rows.
      of: the mask or the weights that it counts; losses that share it divide alike.
    """

    total: tf.Tensor | None
    of: Any = None


def batch_weight(run: ReplicaRun, rank: Any) -> tf.Tensor:
    """What the losses of the global batch were divided by, in the mean over them.

    The unmasked entries or weights where they are means over those, else the samples; 1
    where nothing is known. Losses that divide apart are told of in a warning. Of the
    losses that were taken since the last optimizer asked; all, where there are none.
    """
    trace = trace_of(rank)
    noted: list[Denominator] = run.denominators.get(trace, [])
    found = noted[run.denominators_used.get(trace, 0) :] or noted
    run.denominators_used[trace] = len(noted)
    totals = [each.total for each in found if each.total is not None]
    has_rows = len(totals) < len(found) or not found
    kinds = {id(each.of) for each in found}
    if has_rows and run.total_of(rank) is not None:
        totals.append(run.total_in_group(rank))
    if len(kinds) > 1:
        run.suspicions.add(
            "losses are means over unlike numbers (rows; the entries that a mask "
            "leaves; weights), and batches are added up to one update "
            "(accumulate_steps, or sync with start_step): each has one weight for all "
            "of its losses, the mean of these numbers. Where they are not in the same "
            "proportion in all batches, the update is not that of one large batch. "
            "It is where all losses are means over rows: masked entries as weights, "
            "sample_weight=mask, with the losses' own reduction"
        )
    if not totals:
        return tf.constant(1.0)
    return totals[0] if len(totals) == 1 else tf.add_n(totals) / len(totals)
