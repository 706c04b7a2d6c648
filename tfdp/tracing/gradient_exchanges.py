"""Names the exchanges of gradients: these are computed in no common order."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable

from tfdp.exchange.ordering import current_exchange_name, exchanges_of
from tfdp.tracing.step import current_step


def exchanges_of_gradient() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns, in the forward pass, a context for the exchanges of a gradient: within
    it replicas and hosts match them whatever order the gradients are computed in."""
    return functools.partial(exchanges_of, name_of_gradient())


class _ExchangesDue(collections.Counter[str]):
    """The number of values whose gradient takes an exchange, by name scope."""


def name_of_gradient() -> str:
    """Names the exchanges of a gradient, in the forward pass, for `exchanges_of`; equal
    on all replicas and hosts, "" outside of a step. Rematerialized values get names
    with the same prefix."""
    found = current_step()
    if found is None:
        return ""
    step, rank = found
    within = current_exchange_name() or ""
    due = step.trace(rank).of(_ExchangesDue)
    due[within] += 1
    return f"{within}{due[within]}."
