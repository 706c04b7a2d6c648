"""The hosts that write and read a checkpoint together; one may be alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.hosts.messages import read_as

__all__ = ["Hosts", "hosts_of"]


class Hosts:
    """Those that train a model.

    Args:
      rank: this one.
      count: how many there are.
      link: to the others; None where there are none.
      from_chief: see `DataParallelStrategy.from_chief`.
    """

    def __init__(
        self, rank: int, count: int, link: Any, from_chief: Callable[..., np.ndarray]
    ):
        self.rank, self.count = rank, count
        self.link = link
        self._from_chief = from_chief

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0."""
        return self.rank == 0

    @property
    def timeout_seconds(self) -> float | None:
        """How long an exchange may wait for the others; None: there are none."""
        return None if self.link is None else self.link.timeout_seconds

    def number_of_chief(self, number: int, label: str) -> int:
        """Worker 0's number, on every host; an exchange, in the common order."""
        if self.link is None:
            return number
        return int(self._from_chief(np.array(number, np.int64), label))

    def text_of_chief(self, text: str) -> str:
        """Worker 0's text, on every host; an exchange, in the common order."""
        if self.link is None:
            return text
        mine = text.encode() if self.is_chief else b""
        return _text(self.link.gather(mine, "text of worker 0")[0], 0)

    def texts(self, text: str, label: str) -> list[str]:
        """Every host's text, by rank; an exchange, in the common order."""
        if self.link is None:
            return [text]
        blobs = self.link.gather(text.encode(), label)
        return [_text(blob, rank) for rank, blob in enumerate(blobs)]

    def share_note(
        self, key: str, note: str, has_deadline: bool = True
    ) -> dict[int, str]:
        """Everybody's note, by rank; from any thread, in no common order.

        Args:
          key, note, has_deadline: see `HostLink.share_note`.

        Raises:
          CollectiveError: a host was lost, or said nothing in time.
        """
        if self.link is None:
            return {0: note}
        return self.link.share_note(key, note, has_deadline)

    def without_note(self, key: str) -> list[int]:
        """The workers whose note under `key` has not come."""
        return [0] if self.link is None else self.link.without_note(key)


def _text(blob: bytes, rank: int) -> str:
    return read_as(lambda data: bytes(data).decode(), blob, rank, "text")


def hosts_of(strategy: tf.distribute.Strategy) -> Hosts:
    """Those of a strategy.

    Raises:
      ConfigurationError: it spans processes that tfdp does not know of.
    """
    if getattr(strategy, "living", None) is not None:
        raise ConfigurationError(
            "A checkpoint is written by all hosts after the same step, and with "
            "Communication(min_hosts=...) they may be at different ones, or dead: a "
            "host that comes back takes its state from a live one. Leave the callback "
            "out, and save the outer weights of worker 0 (keras.callbacks."
            "ModelCheckpoint), or leave min_hosts out."
        )
    link = getattr(strategy, "link", None)
    if link is not None:
        return Hosts(link.rank, link.workers, link, strategy.from_chief)
    resolver = strategy.cluster_resolver
    spec = resolver.cluster_spec().as_dict() if resolver is not None else {}
    workers = sum(
        len(tasks) for job, tasks in spec.items() if job in ("chief", "worker")
    )
    if workers > 1 and not hasattr(strategy, "from_chief"):
        raise ConfigurationError(
            f"tfdp.checkpoint does not know the other workers of a "
            f"{type(strategy).__name__}. Train with tfdp.auto_strategy(), or write "
            "checkpoints with tf.train.CheckpointManager."
        )
    return Hosts(0, 1, None, lambda value, label: value)
