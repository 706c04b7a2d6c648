"""Which of the values that a step stores are made of a replica's share of the loss.

The loss that a step differentiates is the replica's share, a part of a sum. So are its
gradients, and what is made of either is no mean over rows. Gradients that a program
only adds up are parts of a sum in the end as well, and are kept as such.
"""

from __future__ import annotations

from typing import Any

from tfdp._private.names import own_copy
from tfdp.tracing.assigned_terms import term_added_to
from tfdp.tracing.loss_shares import key_of
from tfdp.tracing.replica_invariance import outermost
from tfdp.tracing.run import ReplicaRun, trace_of
from tfdp.tracing.ways import Ways

__all__ = ["made_of_shares"]


def made_of_shares(run: ReplicaRun) -> tuple[list[Any], list[Any]]:
    """Variables in which a replica stored what is made of its share of the loss.

    Args:
      run: whose replicas are traced. They do alike, so one of them is asked.

    Returns:
      Those of which the mean is brought together; and those that are only added to, by
      values that they do not go into, which stay parts of a sum.
    """
    rank = next((rank for rank, _, _ in run.stored), 0)
    shares = run.shares.get(trace_of(rank))
    if not shares:
        return [], []
    stored = [
        (variable, outermost(own_copy(variable, rank).handle), value)
        for by, variable, value in run.stored
        if by == rank and id(variable) not in run.own_sums
    ]
    added = [term_added_to(handle, value) for _, handle, value in stored]
    terms = [
        value if term is None else term
        for (_, _, value), term in zip(stored, added, strict=True)
    ]
    ways = Ways(terms)
    of_shares = ways.from_those(shares.is_factor)
    mixed: list[Any] = []
    sums: list[Any] = []
    for (variable, handle, _), term, own in zip(stored, terms, added, strict=True):
        if ways.key(term) in of_shares:
            is_sum = own is not None and key_of(handle) not in ways.outside
            (sums if is_sum else mixed).append(variable)
    return mixed, sums
