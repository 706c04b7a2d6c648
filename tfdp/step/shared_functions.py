"""What replicas do alike, traced for one or two of them and called by all.

TensorFlow builds each replica's part of a step from Python, optimizes it and keeps it
in memory by itself, so that the first step takes as many times longer as there are
replicas. What is the same on all of them but for the variables can be one function of
the graph, which each replica calls with variables of its own. That it is the same is
not promised by anybody but seen: the first two replicas are traced, and their graphs
compared operation by operation. Where they differ each replica has its own.

One trace is enough where no person's code runs. Keras' and tfdp's can tell replicas
apart in three ways only: it asks which one it is, which is refused while it is traced;
it uses a replica's variables; or tensors of the graph outside. What it used of these it
has captured, so that each one is known, or the second replica is traced as well.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.shared_graphs import (
    AsksForItsReplica,
    LaterChanges,
    TracedAlone,
    are_alike,
    can_be_repeated,
    is_shown_by_one,
    nobody_asks_for_the_replica,
    trace_alone,
)
from tfdp._private.traced_alone import ExchangeInside
from tfdp.tracing.run import ReplicaRun

__all__ = ["SharedFunctions"]


@dataclasses.dataclass
class _Part:
    """What is known of a part of the step."""

    first: TracedAlone | None = None
    is_alike: bool | None = None
    has_exchange: bool = False
    # Whether each replica builds it by itself, and not into a function.
    is_own: bool = False


def _never() -> bool:
    return False


class SharedFunctions:
    """The functions that the replicas of one `strategy.run` share.

    Made where the graph of the step is built, and `finish`ed there.
    """

    def __init__(self) -> None:
        #: Whether TensorFlow's graph optimizer looks into them at each call.
        self.looked_into = True
        self._changes = LaterChanges(tf.compat.v1.get_default_graph())
        self._parts: dict[Any, _Part] = {}
        self._calls: dict[tuple[Any, int], int] = {}

    @classmethod
    def of(cls, run: ReplicaRun) -> SharedFunctions:
        """Those of `run`."""
        if run.functions is None:
            run.functions = cls()
        found: SharedFunctions = run.functions
        return found

    def finish(self) -> None:
        """Waits until all of them have been optimized, and has them called so."""
        self._changes.make()

    def call(
        self,
        key: Any,
        rank: int,
        function: Callable[[list[tf.Tensor]], None],
        arguments: list[tf.Tensor],
        device: str,
        *,
        is_known: Callable[[], bool] = _never,
    ) -> None:
        """Builds `function(arguments)` for the calling replica, or a call of it.

        Args:
          key: what of the run this is; each replica's n-th call with it is the same
            part of the step.
          rank: the calling replica.
          function: builds stateful operations, and returns nothing.
          arguments: all that it takes of what the replica has computed.
          device: of the replica, as a full name.
          is_known: whether no person's code runs in `function`.
        """
        part = self._next_part(key, rank)
        how: Any = {"looked_into": self.looked_into, "changes": self._changes}
        if part.is_alike and part.first is not None and part.first.takes(arguments):
            part.first.call(arguments, rank, **how)
            return
        traced = None
        if part.first is None and not part.has_exchange and is_known():
            traced = _trace_refusing(part, function, arguments, device)
            if traced is not None and is_shown_by_one(traced, rank, []):
                part.is_alike = True
        if traced is None and not part.has_exchange:
            traced = _trace(part, function, arguments, device)
        if traced is None:
            function(arguments)
            return
        if part.first is None:
            part.first = traced
        elif part.is_alike is None:
            part.is_alike = are_alike(part.first, traced, rank)
            if part.is_alike:
                # One body for TensorFlow to optimize, not two.
                part.first.call(arguments, rank, **how)
                return
        traced.call(arguments, **how)

    def results_of(
        self,
        key: Any,
        rank: int,
        function: Callable[[], Any],
        own: Sequence[tf.Tensor],
        device: str,
        *,
        common: Sequence[tf.Tensor] = (),
        is_known: Callable[[], bool] = _never,
    ) -> Any:
        """What `function()` returns, by a graph that replicas share.

        Args:
          key: see `call`.
          rank: the calling replica.
          function: builds anything, and is called again where it was in vain.
          own: tensors of the replica's own that it may use, in one order on all.
          device: of the replica, as a full name.
          common: tensors that all replicas have in common.
          is_known: whether no person's code runs in `function`.

        Returns:
          What it returns, tensors in nested structures; None: replicas cannot share
          it, and nothing was built.
        """
        part = self._next_part(key, rank)
        if part.is_own:
            return None
        if part.first is not None and not part.first.takes([], own):
            return None
        how: Any = {"looked_into": self.looked_into, "changes": self._changes}
        if part.first is not None and part.is_alike:
            return part.first.call([], rank, own, **how)
        # One that is not alike is a function, too: whose results come out of one is
        # handled otherwise than whose do not, and all replicas must exchange alike.
        traced = _trace_any(function, own, device)
        if traced is None:
            part.is_own = True
            return None
        if part.first is None:
            part.first = traced
            part.is_alike = is_shown_by_one(traced, rank, common) and is_known()
            part.is_alike = part.is_alike or None
            return traced.call([], **how)
        if part.is_alike is None:
            part.is_alike = are_alike(part.first, traced, rank)
        if part.is_alike:
            return part.first.call([], rank, own, **how)
        return traced.call([], **how)

    def _next_part(self, key: Any, rank: int) -> _Part:
        number = self._calls.get((key, rank), 0)
        self._calls[key, rank] = number + 1
        return self._parts.setdefault((key, number), _Part())


def _trace_any(
    function: Callable[[], Any], own: Sequence[tf.Tensor], device: str
) -> TracedAlone | None:
    """None: `function` does what replicas cannot do alike, or fails."""
    try:
        with nobody_asks_for_the_replica():
            traced = trace_alone(lambda given: function(), [], device, own)
    except Exception as error:
        # Between here and an exchange may be anybody's code, which raises errors of its
        # own from those that it meets. What is wrong with the model shows once more.
        logging.getLogger("tfdp").debug("each replica has its own graph: %r", error)
        return None
    return traced if can_be_repeated(traced) else None


def _trace_refusing(
    part: _Part,
    function: Callable[[list[tf.Tensor]], None],
    arguments: list[tf.Tensor],
    device: str,
) -> TracedAlone | None:
    """`_trace`, where nobody asks which replica this is; None: somebody does."""
    try:
        with nobody_asks_for_the_replica():
            return _trace(part, function, arguments, device)
    except AsksForItsReplica:
        return None


def _trace(
    part: _Part,
    function: Callable[[list[tf.Tensor]], None],
    arguments: list[tf.Tensor],
    device: str,
) -> TracedAlone | None:
    """None: replicas exchange something within, each in its own way."""
    try:
        return trace_alone(function, arguments, device)
    except ExchangeInside:
        part.has_exchange = True
        return None
