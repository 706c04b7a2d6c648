"""The numbers under which replicas meet while they are traced one after the other."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import tensorflow as tf

from tfdp.errors import CollectiveError
from tfdp.exchange.exchange_names import name_of_exchanges

__all__ = ["CallNumbers"]


class CallNumbers:
    """Counts the exchanges of each replica, in order or by name.

    Args:
      replicas: of this process.
    """

    def __init__(self, replicas: int):
        self._counts = [0] * replicas
        # By its name, and how often that came before: the number of an exchange.
        self._named: dict[tuple[str, int], int] = {}
        self._named_so_far = 0
        self._names_met: collections.Counter[tuple[str, int]] = collections.Counter()
        #: By the number: which replica came first, and for what.
        self._first: dict[int, tuple[int, str]] = {}

    def begin_run(self) -> None:
        """All replicas count alike again.

        A trace that failed half-way has left some ahead of others; without this every
        later exchange would wait for a partner that never comes.
        """
        self._counts = [max(self._counts)] * len(self._counts)
        # Numbers go on: one graph may hold several runs.
        self._named.clear()
        self._names_met.clear()
        self._first.clear()

    def next(self, rank: int, what: str = "", tensors: Sequence[tf.Tensor] = ()) -> int:
        """The number of this exchange; below 0 for one that has a name.

        Args:
          rank: the calling replica.
          what: is done, in words; "": it may differ between replicas.
          tensors: of which all replicas have the same shapes.

        Raises:
          CollectiveError: where another replica does something else.
        """
        name = name_of_exchanges()
        if name is None:
            number = self._counts[rank]
            self._counts[rank] += 1
        else:
            number = self._number_of(name, rank)
        if what and all(tensor.shape.is_fully_defined() for tensor in tensors):
            shapes = ", ".join(f"{t.dtype.name} {t.shape}" for t in tensors)
            self._check_alike(number, rank, f"{what} of {shapes}")
        return number

    def _number_of(self, name: str, rank: int) -> int:
        before = self._names_met[name, rank]
        self._names_met[name, rank] += 1
        if (name, before) not in self._named:
            self._named_so_far += 1
            self._named[name, before] = -self._named_so_far
        return self._named[name, before]

    def _check_alike(self, number: int, rank: int, what: str) -> None:
        first, of_first = self._first.setdefault(number, (rank, what))
        if of_first != what:
            raise CollectiveError(
                f"Replicas {first} and {rank} would exchange different tensors: "
                f"{first} comes with the {of_first}, {rank} with the {what}. They must "
                "come to their exchanges (gradients, all_reduce, synchronized batch "
                "normalization) in the same order. Look for code that only some "
                "replicas run; and gradients of a model's own all_reduce in two "
                "branches may come in another order on each replica: take one "
                "all_reduce of both."
            )
