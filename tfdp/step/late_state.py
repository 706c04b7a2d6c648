"""What a step stores behind its last update, brought together at its end.

What layers store travels with the gradients (`step.sums`). A step may store more when
these have left: a centre of the predictions, the probability of an augmentation, the
moving statistics of a second forward pass; or it makes no update at all. Such values
get an exchange of their own where they are made of the replica's rows. Others, such as
an average of weights, are alike on all replicas already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private.autograph import library_code
from tfdp._private.names import current_rank, own_copy
from tfdp.step.state_means import bring_together
from tfdp.tracing.assigned_terms import term_added_to
from tfdp.tracing.own_rows import is_of_own_rows
from tfdp.tracing.replica_invariance import outermost
from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = ["with_late_state"]


def with_late_state(step: Callable, run: ReplicaRun) -> Callable:
    """`step`, which leaves what it stores of its rows alike on all replicas.

    Args:
      step: what every replica runs.
      run: in which it is traced.

    Cost: one exchange of what is stored late; nothing where there is none.
    """
    if tf.executing_eagerly() or run.replicas == 1 or run.is_local:
        return step
    run.ends_with_late_state = True

    @library_code
    @functools.wraps(step)
    def step_with_late_state(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        rank = current_rank()
        if isinstance(rank, int):
            _bring_together(run, rank)
        return result

    return step_with_late_state


def _bring_together(run: ReplicaRun, rank: int) -> None:
    late = run.take_local_state(rank)
    if run.late_state is None:
        # Once for all replicas: one that found something else would wait in an
        # exchange for the others.
        ids = {id(variable) for variable in late} - run.own_sums
        run.late_state = _of_rows(run, rank, ids) if ids else set()
    bring_together([one for one in late if id(one) in run.late_state], run, rank)


def _of_rows(run: ReplicaRun, rank: int, ids: set[int]) -> set[int]:
    """Those of `ids` whose variables' values may be means over rows."""
    found = set()
    for stored_by, variable, value in run.stored:
        if stored_by != rank or id(variable) not in ids:
            continue
        if not is_of_own_rows(run.batches, trace_of(rank), value):
            continue
        handle = outermost(own_copy(variable, rank).handle)
        # Without an update what is added up may be gradients for one in a later step:
        # parts of a sum.
        if run.updates or term_added_to(handle, value) is None:
            found.add(id(variable))
    return found
