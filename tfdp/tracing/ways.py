"""What many values are made of, and what is made of that, by one walk for all."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfdp.tracing.loss_shares import goes_into, key_of
from tfdp.tracing.replica_invariance import is_exchanged, outermost

__all__ = ["Ways"]


class Ways:
    """All that some values are made of, with the ways between.

    One walk for all values: of gradients each is made of the whole forward pass.

    Args:
      values: of graphs.
      is_end: what the walk goes to, and not beyond.
      is_argument: an argument of a graph that is looked for.
    """

    def __init__(
        self,
        values: Iterable[tf.Tensor],
        is_end: Callable[[tf.Tensor], bool] = is_exchanged,
        is_argument: Callable[[tf.Tensor], bool] = lambda tensor: False,
    ) -> None:
        self._is_argument = is_argument
        #: By the key of a tensor: the keys of what is made of it.
        self._made_of_it: dict[Any, set[Any]] = collections.defaultdict(set)
        self._tensors: dict[Any, tf.Tensor] = {}
        #: The keys of variables' handles, and of other tensors outside of graphs.
        self.outside: set[Any] = set()
        todo = collections.deque((value, None) for value in values)
        while todo:
            inner, consumer = todo.popleft()
            tensor = outermost(inner, is_argument)
            if tensor is None:
                continue
            key = key_of(tensor)
            if isinstance(tensor, tf.__internal__.EagerTensor):
                self.outside.add(key)
                continue
            if consumer is not None:
                self._made_of_it[key].add(consumer)
            if key not in self._tensors:
                self._tensors[key] = tensor
                if not is_end(tensor):
                    todo.extend((before, key) for before in goes_into(tensor))

    def from_those(self, is_found: Callable[[tf.Tensor], bool]) -> set[Any]:
        """The keys of all that is made of a tensor which `is_found`."""
        todo = [key for key, tensor in self._tensors.items() if is_found(tensor)]
        found = set()
        while todo:
            key = todo.pop()
            if key not in found:
                found.add(key)
                todo += self._made_of_it[key]
        return found

    def key(self, value: tf.Tensor) -> Any:
        """The key of one of the values; None: it is an argument."""
        tensor = outermost(value, self._is_argument)
        return None if tensor is None else key_of(tensor)
