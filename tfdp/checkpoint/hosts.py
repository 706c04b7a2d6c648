"""The hosts that write and read a checkpoint together, one or more."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.errors import CollectiveError, ConfigurationError

POLL_SECONDS = 0.5


class Hosts:
    """The hosts that train a model.

    Args:
      link: the transport to the others; None: this host is the only one.
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
        return self.rank == 0

    @property
    def timeout_seconds(self) -> float | None:
        """How long an exchange may wait for other hosts; None: there are none."""
        return None if self.link is None else self.link.timeout_seconds

    def number_of_chief(self, number: int, label: str) -> int:
        """Worker 0's number on every host; a collective."""
        return int(self._from_chief(np.array(number, np.int64), label))

    def text_of_chief(self, text: str) -> str:
        """Worker 0's text on every host; a collective."""
        return self.texts(text if self.is_chief else "", "text of worker 0")[0]

    def texts(self, text: str, label: str) -> list[str]:
        """Every host's text, by rank; a collective."""
        return [text] if self.link is None else self.link.gather_texts(text, label)

    def share_note(
        self, key: str, note: str, has_deadline: bool = True
    ) -> dict[int, str]:
        """Every host's note, by rank; from any thread, in no common order.

        See `HostLink.share_note`. `CollectiveError`: a host sent none in time.
        """
        if self.link is None:
            return {0: note}
        return self.link.share_note(key, note, has_deadline)

    def without_note(self, key: str) -> list[int]:
        """The workers that have sent no note under `key`."""
        return [0] if self.link is None else self.link.without_note(key)


def hosts_of(strategy: tf.distribute.Strategy) -> Hosts:
    """The hosts of a strategy; `ConfigurationError` if elastic or not of tfdp."""
    if getattr(strategy, "elastic_hosts", None) is not None:
        raise ConfigurationError(
            "All hosts write a checkpoint after the same step, but with "
            "Communication(min_hosts=...) they may be at different steps, or gone; a "
            "host that returns takes its state from a running one. Remove the "
            "callback and save the outer weights on worker 0 (keras.callbacks."
            "ModelCheckpoint), or remove min_hosts."
        )
    link = getattr(strategy, "link", None)
    if link is not None:
        return Hosts(link.rank, link.workers, link, strategy.from_chief)
    resolver = strategy.cluster_resolver
    spec = resolver.cluster_spec().as_dict() if resolver is not None else {}
    workers = sum(len(spec.get(job, ())) for job in ("chief", "worker"))
    if workers > 1 and not hasattr(strategy, "from_chief"):
        raise ConfigurationError(
            f"tfdp.checkpoint cannot reach the other workers of a "
            f"{type(strategy).__name__}. Train with tfdp.auto_strategy(), or write "
            "checkpoints with tf.train.CheckpointManager."
        )
    return Hosts(0, 1, None, lambda value, label: value)


class StepAgreement:
    """One host's side of the agreement on a training step to save after.

    A signal reaches one host, hosts progress at different speeds, and all must save
    after the same step without a collective in the steps before. A host that wants to
    save leaves a note; the others answer, from the listener thread, with their number
    of finished steps. A host that answered c does not go beyond step c + 1 until all
    answers have come; so all save after the largest answer plus one.

    Args:
      hosts: that train together.
      name: the same on all hosts, used once.
      in_step: whether all save after the same step; else each after its current one.
    """

    def __init__(self, hosts: Hosts, name: str, *, in_step: bool = True):
        self._hosts, self._name, self._in_step = hosts, name, in_step
        self._changed = threading.Condition(threading.RLock())
        self._done = 0
        self._number = 0
        self._answered = False
        self._answers: dict[int, dict[str, Any]] = {}
        self._listen()

    def _listen(self) -> None:
        if self._hosts.link is not None:
            number = self._number
            self._hosts.link.on_note(self._key, lambda notes: self._hear(number, notes))

    @property
    def _key(self) -> str:
        return f"{self._name}, agreement {self._number}"

    def _hear(self, number: int, notes: dict[int, str]) -> None:
        # Runs in the link's thread, which must not block.
        with self._changed:
            if number != self._number:
                return
            self._answers |= {rank: json.loads(note) for rank, note in notes.items()}
            self._changed.notify_all()
        self.request("")

    def request(self, reason: str) -> None:
        """Requests, or with "" answers, an agreement; nothing if already done."""
        with self._changed:
            if self._answered:
                return
            self._answered = True
            note = {"done": self._done, "reason": reason}
            self._answers[self._hosts.rank] = note
            key = self._key
        if self._hosts.link is not None:
            self._hosts.link.leave_note(key, json.dumps(note))

    def after_step(self, done: int) -> str | None:
        """The reason to save after this step, `done`, of all hosts; None: do not save.

        Raises:
          CollectiveError: a host was lost, or did not answer in time.
        """
        with self._changed:
            self._done = done
            if not self._answered:
                return None
            self._wait_for_answers()
            answers = self._answers
            last = max(int(answer["done"]) for answer in answers.values())
            # Even if all answered from the same step: one rule for all cases.
            if self._in_step and self._hosts.count > 1 and done < last + 1:
                return None
            reasons = [str(answers[r]["reason"]) for r in sorted(answers)]
            self._number += 1
            self._answered, self._answers = False, {}
        self._listen()
        return next((reason for reason in reasons if reason), "")

    def _wait_for_answers(self) -> None:
        link = self._hosts.link
        if link is None:
            return
        deadline = time.monotonic() + link.timeout_seconds
        while len(self._answers) < self._hosts.count:
            self._changed.wait(POLL_SECONDS)
            news = link.news()
            if news is not None:
                raise CollectiveError(
                    f"The hosts cannot save together: {news}. Earlier "
                    "checkpoints are unchanged."
                )
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._hosts.count)) - set(self._answers))
                raise CollectiveError(
                    f"Workers {missing} did not answer for {link.timeout_seconds:g} "
                    "seconds to a request to save. Earlier checkpoints are unchanged."
                )
