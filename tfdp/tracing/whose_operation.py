"""Which replica an operation of a step is of, told from when and where it was built."""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.autograph import library_code

__all__ = ["ReplicaPlaces", "operations"]


def operations() -> list[tf.Operation]:
    """All operations of the graph that is being built, in the order of building."""
    return tf.compat.v1.get_default_graph().get_operations()


class ReplicaPlaces:
    """Notes while the replicas of a run are built, one after the other or by turns."""

    def __init__(self) -> None:
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._scopes: list[str] = []

    def seen(self, replica: Callable) -> Callable:
        """`replica`, what each of them runs, whose operations are told apart."""

        @library_code
        @functools.wraps(replica)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._begun.append(len(operations()))
            self._scopes.append(tf.compat.v1.get_default_graph().get_name_scope())
            result = replica(*args, **kwargs)
            self._ended.append(len(operations()))
            return result

        return noted

    @property
    def replicas(self) -> int:
        """How many have been seen."""
        return len(self._begun)

    def of(self, ops: Sequence[tf.Operation], first: int) -> dict[tf.Operation, int]:
        """The replica of each of `ops`, the first of which was built as number `first`.

        Those that took turns (`merge_call`) are told by their name scopes, which the
        first replica shares with what is none's.
        """
        took_turns = any(map(operator.gt, self._ended, self._begun[1:]))
        if not took_turns:
            return {
                op: max(0, bisect.bisect_right(self._begun, place) - 1)
                for place, op in enumerate(ops, start=first)
            }
        scopes = [(f"{scope}/", n) for n, scope in enumerate(self._scopes) if n]
        return {
            op: next((n for scope, n in scopes if op.name.startswith(scope)), 0)
            for op in ops
        }
