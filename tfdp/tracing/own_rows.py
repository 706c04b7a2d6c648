"""Whether a value is made of a replica's own rows, told from the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp.tracing.loss_shares import goes_into, key_of
from tfdp.tracing.replica_invariance import is_exchanged, outermost

__all__ = ["MadeOf", "SHAPES", "batch_keys", "is_of_own_rows"]

#: What an operation makes of the shape of its input, and not of values.
SHAPES = frozenset(("OnesLike", "Shape", "ShapeN", "Size", "ZerosLike"))
#: See `ReplicaRun.batches`.
Batches: TypeAlias = Mapping[int, Sequence[tf.Tensor]]


def batch_keys(batches: Batches, trace: int) -> set[Any]:
    """The keys (`key_of`) of the tensors that the replica of `trace` was given."""
    return {key_of(tensor) for tensor in batches.get(trace, ())}


class MadeOf:
    """All that is made of some tensors; `value in MadeOf(keys)`.

    What was found is remembered: many values of one step are asked for, and each is
    made of the whole model before it.

    Args:
      keys: the keys (`key_of`) of these tensors.
      is_end: what the ways back end at, such as sums over replicas.
    """

    def __init__(
        self, keys: set[Any], is_end: Callable[[tf.Tensor], bool] = is_exchanged
    ) -> None:
        self.keys = keys
        self._is_end = is_end
        self._found: dict[Any, bool] = dict.fromkeys(keys, True)

    def _is_one(self, tensor: tf.Tensor) -> bool:
        return key_of(tensor) in self.keys

    def __contains__(self, value: tf.Tensor) -> bool:
        # Depth first, by a list: graphs are deeper than Python's stack.
        path: list[tuple[Any, Iterator[tf.Tensor]]] = [(None, iter([value]))]
        while path:
            tensor = next(path[-1][1], None)
            if tensor is None:
                path.pop()
                continue
            tensor = outermost(tensor, self._is_one)
            if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
                continue
            key = key_of(tensor)
            if key not in self._found:
                # Until one of its inputs is found to be.
                self._found[key] = False
                if not self._is_end(tensor):
                    path.append((key, iter(goes_into(tensor))))
            elif self._found[key]:
                self._found.update((key, True) for key, _ in path[1:])
                return True
        return False


def is_of_own_rows(batches: Batches, trace: int, value: tf.Tensor) -> bool:
    """Whether `value` is made of the replica's rows, and not of all replicas' as well.

    What was gathered, or added up where replicas meet, is made of all.
    """
    if value not in MadeOf(batch_keys(batches, trace)):
        return False
    others = [batch_keys(batches, other) for other in batches if other != trace]
    return not others or not all(value in MadeOf(batch) for batch in others)
