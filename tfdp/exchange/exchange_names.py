"""What replicas meet for, where they may come to it in another order.

Exchanges of a forward pass are built in the order of the program, which is the same on
all replicas. A tape takes gradients in an order of its own, which may differ: it goes
by how many operations lie between, and a replica that adds has others than those that
receive. An exchange of a backward pass is named after what it is the gradient of.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["exchanges_of", "name_of_exchanges"]

_local = threading.local()


@contextlib.contextmanager
def exchanges_of(name: str) -> Iterator[None]:
    """While this lasts, replicas meet under `name`, and not by the order of exchanges.

    Args:
      name: alike on all replicas; several exchanges of one name are counted. "": by
        the order all the same.
    """
    before = name_of_exchanges()
    _local.name = name
    try:
        yield
    finally:
        _local.name = before


def name_of_exchanges() -> str | None:
    """What the calling replica is about to meet for; None: the next in order."""
    return getattr(_local, "name", None) or None
